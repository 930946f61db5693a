"""LoRA: y + scale * B (A x), for each row with the matrices of its own adapter. Source: Hu et al. 2021; many adapters
in one step: Chen et al. 2023 (Punica).

Only `passes.adapt` makes these ops. What they read beside their rows is an `AdaptedRows`, which the executable has.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError
from roofline.ops.registry import Call, op
from roofline.ops.symbol import Type

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

ROWS = ("f32", "bf16", "f16")  # dtypes of rows that may be adapted

KEYS_AND_VALUES = ".attn.kv_up.weight"  # of compressed rows: kv_b_proj of Hugging Face's files


def served_merged(tensor: str) -> str:
    """Return what a matrix is of, where an adapter of it is served merged alone, and "" where it is beside the model.
    Attention over compressed rows multiplies with parts of KEYS_AND_VALUES, a head's each."""
    if ".mlp.experts." in tensor:
        return "experts"
    return "keys and values of compressed rows" if tensor.endswith(KEYS_AND_VALUES) else ""


@dataclass(frozen=True, eq=False)
class AdapterMatrix:
    """What an adapter adds to one matrix of the model: `tensor`'s result + scale * B (A x).

    a: float32 [rank, inputs]; b: float32 [rank, outputs], the transpose of B, so that neighbouring outputs lie side by
    side; magnitude: of DoRA, float32 [outputs], the length that each row of W + scale * B A gets; None: rows keep the
    length they have. paired: of q and k, outputs lie as converters to GGUF permute Llama's, the two that rope turns
    together side by side; else as Hugging Face's. tiled: value heads of gated DeltaNet, in outputs or inputs, lie as
    converters to GGUF move Qwen3.5's (`ops.state.delta_rule`); else those of a key head side by side.
    """

    tensor: str
    a: "np.ndarray"
    b: "np.ndarray"
    scale: float
    magnitude: "np.ndarray | None" = None
    paired: bool = False
    tiled: bool = False

    @property
    def rank(self) -> int:
        return int(self.a.shape[0])


@dataclass(frozen=True, eq=False)
class PlacedMatrix:
    """The same in its group, the matrices that read one value: `first` of its columns among the values of A x, `column`
    of its columns in the result.

    gain, shift: of DoRA, float32 [outputs]: the result with the adapter is multiplied by the one, then the other is
    added, which gives back what a bias loses by that. None: the result stays as it is.
    """

    matrix: AdapterMatrix
    group: int
    first: int
    column: int
    gain: "np.ndarray | None" = None
    shift: "np.ndarray | None" = None


@dataclass(frozen=True, eq=False)
class AdaptedRows:
    """The adapter of each row of a step: slots [tokens], 0 for none; logit_rows [rows]; adapters: by slot."""

    slots: "np.ndarray"
    logit_rows: "np.ndarray"
    adapters: "dict[int, Sequence[PlacedMatrix]]"

    def of(self, group: int, rows: int) -> "Iterator[tuple[Tensor, PlacedMatrix]]":
        """(indices of the rows, the matrix) for each matrix of a group that rows of this step have; rows: how many
        there are, one a token or one a logit row."""
        import torch

        slots = self.slots if rows == len(self.slots) else self.slots[self.logit_rows]
        for slot in sorted(set(slots.tolist()) - {0}):
            mine = torch.from_numpy((slots == slot).nonzero()[0])
            yield from ((mine, placed) for placed in self.adapters[slot] if placed.group == group)


# (x [rows, inputs], A [rank, inputs]) -> [rows, rank]; (y [rows, columns], t [rows, rank], B [rank, columns], scale).
Down = Callable[["Tensor", "Tensor"], "Tensor"]
Up = Callable[["Tensor", "Tensor", "Tensor", float], "Tensor"]


def down(x: "Tensor", adapters: AdaptedRows, group: int, ranks: int, product: Down) -> "Tensor":
    """The products with A in the order of `product`; zeros for rows without an adapter."""
    import torch

    out = torch.zeros(x.shape[0], ranks)
    for rows, placed in adapters.of(group, x.shape[0]):
        result = product(x[rows], torch.from_numpy(placed.matrix.a))
        out[rows[:, None], torch.arange(placed.first, placed.first + placed.matrix.rank)] = result
    return out


def up(t: "Tensor", y: "Tensor", adapters: AdaptedRows, group: int, product: Up) -> "Tensor":
    """The products with B in the order of `product`, added to y; rows without an adapter stay as they are."""
    import torch

    out = y.clone()
    for rows, placed in adapters.of(group, y.shape[0]):
        b, scale = torch.from_numpy(placed.matrix.b), placed.matrix.scale
        at = rows[:, None], torch.arange(placed.column, placed.column + b.shape[1])
        result = product(y[at], t[rows, placed.first : placed.first + placed.matrix.rank], b, scale)
        if placed.gain is not None and placed.shift is not None:
            result = result * torch.from_numpy(placed.gain) + torch.from_numpy(placed.shift)
        out[at] = result
    return out


def _down_type(call: Call) -> Type:
    if call.x.dtype not in ROWS or call.ranks < 1:
        raise ConfigError(f"adapter_down: {call.ranks} ranks over rows of {call.x.dtype}; it takes {', '.join(ROWS)}")
    return Type("f32", call.x.leading, (call.ranks,))


def _up_type(call: Call) -> Type:
    if call.y.dtype not in ROWS or call.t.leading != call.y.leading:
        raise ConfigError(f"adapter_up: {call.t} cannot be added to {call.y}")
    return Type("f32", call.y.leading, call.y.trailing)


@op(values=("x", "adapters"), infer=_down_type)
def adapter_down(x: "Tensor", adapters: AdaptedRows, group: int, ranks: int) -> "Tensor":
    """A x of each row's adapter, the matrices of the group side by side: [rows, ranks]."""
    return down(x, adapters, group, ranks, lambda rows, a: rows @ a.T)


@op(values=("t", "y", "adapters"), infer=_up_type, inplace="y")
def adapter_up(t: "Tensor", y: "Tensor", adapters: AdaptedRows, group: int) -> "Tensor":
    """y + scale * B t of each row's adapter, t as `adapter_down` gives it for the same group."""
    return up(t, y, adapters, group, lambda rows, ranks, b, scale: rows + scale * (ranks @ b))
