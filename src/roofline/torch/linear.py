"""PackedLinear: a linear layer on quantised weights, in the formats of weight files."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from roofline.backends.gpu.pack import ORDER, Packed, pack
from roofline.common.errors import ConfigError
from roofline.ops import formats
from roofline.torch import ops

_ARRAYS = tuple(field.name for field in fields(Packed) if field.name not in ("layout", "rows", "columns"))


class PackedLinear(nn.Module):
    """y = x @ w.T + bias with w in a block format ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"); no gradients.

    Args:
        packed: the matrix, laid out for the kernels.
        format: its format.
        bias: [rows] or None.
    """

    def __init__(self, packed: Packed, format: str, bias: Tensor | None = None) -> None:
        super().__init__()
        self.format, self.in_features, self.out_features = format, packed.columns, packed.rows
        for name in _ARRAYS:
            array = getattr(packed, name)
            self.register_buffer(name, None if array is None else torch.from_numpy(array))
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    @classmethod
    def from_bytes(cls, raw: np.ndarray, format: str, rows: int, columns: int, bias: Tensor | None = None) -> Self:
        """Of a matrix's bytes as its file has them (uint8). Raises UnsupportedError for a format without a kernel."""
        return cls(pack(raw, format, rows, columns), format, bias)

    @classmethod
    def from_linear(cls, linear: nn.Linear, format: str = "Q4_0") -> Self:
        """Make the layer of a float layer, rounded to the format, on its device.

        Raises ConfigError where rows are not whole blocks, UnsupportedError for a format without a kernel.
        """
        values = linear.weight.detach().float().cpu().numpy()
        row = formats.get(format)
        row.nbytes(values.shape)  # refuses rows that are not whole blocks
        raw = row.quantize(values)
        layer = cls.from_bytes(raw, format, linear.out_features, linear.in_features, linear.bias)
        return layer.to(linear.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features], in x's dtype."""
        arrays: list[Tensor] = [getattr(self, name) for name in _ARRAYS]
        result: Tensor = ops.linear_quant(x, *arrays, self.bias, self.format)
        return result

    def get_extra_state(self) -> Tensor:
        """The version of the arrays' layout, which the formats of files do not change but ours may."""
        return torch.tensor([ORDER])

    def set_extra_state(self, state: Tensor) -> None:
        """Raises ConfigError where the arrays that come with it are laid out otherwise."""
        if int(state[0]) != ORDER:
            cause = f"a PackedLinear was saved in layout {int(state[0])} of its weights, and this version reads {ORDER}"
            raise ConfigError(f"{cause}: quantise the model again")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.format}"


def quantize_linears(model: nn.Module, format: str = "Q4_0", keep: Sequence[str] = ("lm_head",)) -> int:
    """Replace a model's linear layers by PackedLinear in place; how many were.

    Args:
        keep: layers whose name ends so stay as they are.

    Raises ConfigError, naming the layer, where rows are not whole blocks of the format; nothing is replaced then.
    """
    replacements: dict[str, PackedLinear] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith(tuple(keep)):
            try:
                replacements[name] = PackedLinear.from_linear(module, format)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
    for name, packed in replacements.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, packed)
    return len(replacements)
