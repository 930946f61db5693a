"""PackedLinear: a linear layer on quantised weights, in the formats of weight files."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from roofline.backends.gpu.pack import LAYOUTS, ORDER, Packed, pack
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.ops import formats
from roofline.ops.formats.base import SMALL, is_too_small
from roofline.torch import ops


class PackedLinear(nn.Module):
    """y = x @ w.T + bias with w in a block format ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"); no gradients.

    The arrays of the matrix go with the module to another device and keep their dtypes, whatever the module is cast to:
    a scale in bfloat16 would be another scale. The bias is cast as a float layer's is.

    Args:
        packed: the matrix, laid out for the kernels.
        format: its format.
        bias: [rows] or None.
    """

    bias: Tensor | None

    def __init__(self, packed: Packed, format: str, bias: Tensor | None = None) -> None:
        super().__init__()
        self.format, self.in_features, self.out_features = format, packed.columns, packed.rows
        arrays = {name: getattr(packed, name) for name in ops.ARRAYS}
        buffers = {name: None if array is None else torch.from_numpy(array) for name, array in arrays.items()}
        buffers["bias"] = None if bias is None else bias.detach().clone()
        # torch.export (2.13) counts buffers that are None, and inputs without them: behind the others they do no harm.
        for name in sorted(buffers, key=lambda name: buffers[name] is None):
            self.register_buffer(name, buffers[name])

    @classmethod
    def from_bytes(cls, raw: np.ndarray, format: str, rows: int, columns: int, bias: Tensor | None = None) -> Self:
        """Of a matrix's bytes as its file has them (uint8).

        Raises UnsupportedError for a format without a kernel, ConfigError where the bytes are not as many as it takes.
        """
        _check_format(format)
        size = formats.get(format).nbytes((rows, columns))
        if raw.dtype != np.uint8 or raw.size != size:
            cause = f"{format} of {rows} rows and {columns} columns is uint8 [{size}]"
            raise ConfigError(f"{cause}, got {raw.dtype} {list(raw.shape)}")
        return cls(pack(raw, format, rows, columns), format, bias)

    @classmethod
    def from_linear(cls, linear: nn.Linear, format: str = "Q4_0") -> Self:
        """Make the layer of a float layer, rounded to the format, on its device.

        Raises ConfigError where rows are not whole blocks, where weights are no numbers, too large or too small for the
        format's scales, and for a layer that is not torch's own; UnsupportedError for a format without a kernel.
        """
        _check_format(format)
        _check_plain(linear)
        values = linear.weight.detach().float().cpu().numpy()
        row = formats.get(format)
        row.nbytes(values.shape)  # refuses rows that are not whole blocks
        if not np.isfinite(values).all():
            raise ConfigError("the layer's weight holds NaN or infinity")
        with np.errstate(all="ignore"):  # what does not fit is refused below
            raw = row.quantize(values)
        top = float(np.abs(values).max(initial=0))
        if top < SMALL and is_too_small(*row.small_squares(values, raw)):
            cause = f"weights of at most {top:g} need scales that float16, from 6e-8, does not hold in {format}"
            raise ConfigError(f"{cause}: keep this layer in float, or scale it up")
        packed = pack(raw, format, linear.out_features, linear.in_features)
        if not all(array is None or np.isfinite(array).all() for array in packed.arrays):
            largest = f"weights as large as {top:g} need scales that float16, to 65,504, does not hold"
            raise ConfigError(f"{largest} in {format}: keep this layer in float, or scale it down")
        return cls(packed, format, linear.bias).to(linear.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features], in x's dtype."""
        arrays: list[Tensor] = [getattr(self, name) for name in ops.ARRAYS]
        result: Tensor = ops.linear_quant(x, *arrays, self.bias, self.format)
        return result

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What torch moves and casts modules by: the matrix is moved alone."""
        bias = self.bias

        def change(array: Tensor) -> Tensor:
            changed = fn(array)
            return changed if array is bias or changed.dtype == array.dtype else array.to(changed.device)

        return super()._apply(change, recurse)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Raises ConfigError for arrays of another format or layout, and for arrays that have been cast, which torch
        would take as they are; before anything is loaded."""
        if prefix + "_extra_state" in state_dict:
            self._check_state(state_dict[prefix + "_extra_state"])
        expected = [name for name in ops.ARRAYS if getattr(self, name) is not None]
        present = [name for name in ops.ARRAYS if prefix + name in state_dict]
        if present and present != expected:  # of a version that did not say the format
            cause = (
                f"{prefix}{min({*present} ^ {*expected})} is an array of a layer in another format than {self.format}"
            )
            raise ConfigError(f"{cause}: make the model with the format that was saved, or quantise it again")
        for name in present:
            array, ours = state_dict[prefix + name], getattr(self, name)
            if isinstance(array, Tensor) and array.dtype != ours.dtype:
                cause = f"{prefix}{name} was cast to {array.dtype}, and the format has it in {ours.dtype}"
                raise ConfigError(f"{cause}: quantise the model again")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def get_extra_state(self) -> Tensor:
        """The version of the arrays' layout, which the formats of files do not change but ours may, and the format's
        name in ASCII."""
        return torch.tensor([ORDER, *self.format.encode()])

    def set_extra_state(self, state: Tensor) -> None:
        """Raises ConfigError where the arrays that come with it are of another format or laid out otherwise."""
        self._check_state(state)

    def _check_state(self, state: Tensor) -> None:
        order, *name = state.tolist()
        if order != ORDER:
            cause = f"a PackedLinear was saved in layout {order} of its weights, and this version reads {ORDER}"
            raise ConfigError(f"{cause}: quantise the model again")
        format = bytes(name).decode() or self.format  # older versions did not say it
        if format != self.format:
            cause = f"a PackedLinear was saved in {format}, and this one is in {self.format}"
            raise ConfigError(f"{cause}: make the model with that format, or quantise it again")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.format}"


def _check_format(format: str) -> None:
    """Raise UnsupportedError, with the formats that there are, for one that no kernel reads."""
    if format not in LAYOUTS:
        raise UnsupportedError(
            f"a PackedLinear in {format!r}", "no kernel of its product reads that format", [*LAYOUTS]
        )


def _check_plain(linear: nn.Linear) -> None:
    """Raise ConfigError for a layer that computes anything else than x @ w.T + bias, and for one without values."""
    kind, weight = type(linear).__name__, linear.weight
    if type(linear).forward is not nn.Linear.forward or "forward" in vars(linear):
        raise ConfigError(f"a {kind} with a forward of its own computes more than its weight and bias say")
    if linear._forward_hooks or linear._forward_pre_hooks:
        raise ConfigError("the layer has hooks, which would be lost: remove them, or keep the layer")
    if not weight.is_floating_point() or weight.shape != (linear.out_features, linear.in_features):
        raise ConfigError(f"the layer's weight is {weight.dtype} {list(weight.shape)}: somebody else has quantised it")
    if weight.is_meta:
        raise ConfigError("the layer's weight is on the meta device: load the weights first")


# The submodules into which PEFT puts a layer that an adapter changes, and one that it trains a copy of.
_ADAPTED = ("base_layer", "original_module")
MERGE = "merge it into the weights by the PeftModel: model = peft_model.merge_and_unload()"


def is_adapted(module: nn.Module) -> bool:
    """Whether a module has an adapter of PEFT's beside its weights, merged or not."""
    return any(name in module._modules for name in _ADAPTED)


# Modules that read the weights of layers inside them themselves, whatever is in their place.
_READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def quantize_linears(model: nn.Module, format: str = "Q4_0", keep: str | Sequence[str] = ("lm_head",)) -> int:
    """Replace a model's linear layers by PackedLinear in place; how many were. One that is in several places is one.

    Args:
        keep: layers whose name ends so stay as they are: one ending, or several.

    Raises ConfigError, naming the layer, where one cannot be replaced; nothing is replaced then.
    """
    if isinstance(model, nn.Linear):
        remedy = "use PackedLinear.from_linear(layer, format), and put the result in the layer's place"
        raise ConfigError(f"the model is a linear layer itself, which cannot be replaced in place: {remedy}")
    endings = (keep,) if isinstance(keep, str) else tuple(keep)
    named = list(model.named_modules(remove_duplicate=False))  # with all names of a layer that is in several places
    float_ids = {id(module) for name, module in named if name.endswith(endings)}
    places = {name: m for name, m in named if isinstance(m, nn.Linear) and id(m) not in float_ids}
    adapted = next((name for name, module in named if is_adapted(module)), None)
    if adapted is not None:
        raise ConfigError(f"{adapted} has an adapter beside its weight, merged or not; {MERGE}")
    _check_owners(model, places, endings)
    replacements: dict[int, PackedLinear] = {}
    for name, linear in places.items():
        if id(linear) not in replacements:
            try:
                replacements[id(linear)] = PackedLinear.from_linear(linear, format)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
    for name, linear in places.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, replacements[id(linear)])
    return len(replacements)


def _check_owners(model: nn.Module, names: Iterable[str], keep: Sequence[str]) -> None:
    """Raise ConfigError where a layer's owner reads its weight itself, naming all layers that must be kept for that."""
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
    read = {name: owner for name, owner in owners.items() if isinstance(owner, _READERS)}
    for name, owner in read.items():
        endings = list(dict.fromkeys((*keep, *sorted(each.rpartition(".")[2] for each in read))))
        cause = f"{name}: nn.{type(owner).__name__} reads its weight without calling it"
        raise ConfigError(f"{cause}; leave such layers as they are: keep={endings}")
