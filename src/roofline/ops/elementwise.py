"""Ops that move or scale rows: add, mul, scale, scale_columns, scale_by_position, soft_cap, cast, split, take_rows,
embed."""

from dataclasses import replace
from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError
from roofline.ops.cost import Affine
from roofline.ops.own_weight import OwnWeight
from roofline.ops.position_factors import PositionFactors
from roofline.ops.registry import Call, CostRule, op
from roofline.ops.rows import TurnedPositions
from roofline.ops.symbol import ELEMENT_BYTES, Type
from roofline.ops.traits import Trait

if TYPE_CHECKING:
    from torch import Tensor


def same_as_x(call: Call) -> Type:
    """The type rule of ops whose result looks like their first operand."""
    x: Type = call.x
    return x


def per_element(count: int) -> CostRule:
    """FLOPs rule: `count` operations for each element of x."""
    return lambda call: Affine.per(call.x.leading, count * call.x.width)


def same_pair(call: Call) -> Type:
    if replace(call.x, dtype=call.y.dtype) != call.y:
        raise ConfigError(f"add, mul: {call.x} and {call.y} differ")
    return same_as_x(call)


# Of ops that compute each element by itself.
ELEMENTWISE = (Trait.ROW_WISE, Trait.BY_COLUMN)


@op(values=("x", "y"), infer=same_pair, traits=ELEMENTWISE, flops=per_element(1), inplace="x")
def add(x: "Tensor", y: "Tensor") -> "Tensor":
    """x + y, both [rows, width], in x's dtype."""
    return x + y.to(x.dtype)


@op(values=("x", "y"), infer=same_pair, traits=ELEMENTWISE, flops=per_element(1), inplace="x")
def mul(x: "Tensor", y: "Tensor") -> "Tensor":
    """x * y, both [rows, width], element by element, in x's dtype."""
    return x * y.to(x.dtype)


@op(values=("x",), infer=same_as_x, traits=ELEMENTWISE, flops=per_element(1), inplace="x")
def scale(x: "Tensor", factor: float) -> "Tensor":
    """x * factor."""
    return x * factor


def _columns_type(call: Call) -> Type:
    if call.w.shape not in ((call.x.width,), (1,)):
        raise ConfigError(f"scale_columns: a weight of shape {call.w.shape} for width {call.x.width}")
    return same_as_x(call)


# Not rounded: what a layer gives to the next one is of the residual stream.
_COLUMNS = (Trait.ROW_WISE, Trait.WHOLE_VALUES)


@op(values=("x",), weights=("w",), infer=_columns_type, traits=_COLUMNS, flops=per_element(1), inplace="x")
def scale_columns(x: "Tensor", w: "Tensor") -> "Tensor":
    """x * w, x [rows, width]: each column times its number of w [width], or all of them times that of w [1]."""
    return x * w.to(x.dtype)


def _scaled_type(call: Call) -> Type:
    PositionFactors(call.beta, call.context, call.offset)  # refuses the impossible
    return same_as_x(call)


# As rope: on its way to attention a row is rounded once.
_SCALED = (*ELEMENTWISE, Trait.ROUNDED, Trait.READS_WIDE)


@op(values=("x", "positions"), infer=_scaled_type, traits=_SCALED, flops=per_element(1), inplace="x")
def scale_by_position(x: "Tensor", positions: "Tensor", beta: float, context: int, offset: int = 0) -> "Tensor":
    """x [tokens, width], each row times 1 + beta * ln(1 + floor((position + offset) / context)).

    positions int [tokens] (TurnedPositions have theirs).
    """
    import torch

    at = positions.at if isinstance(positions, TurnedPositions) else positions
    times = torch.div(at + offset, context, rounding_mode="floor")
    factors = (1.0 + beta * torch.log1p(times.double())).float()
    return (x.float() * factors[:, None]).to(x.dtype)  # in 8 bits neighbouring factors would be one


@op(values=("x",), infer=same_as_x, traits=ELEMENTWISE, flops=per_element(10), inplace="x")
def soft_cap(x: "Tensor", cap: float) -> "Tensor":
    """cap * tanh(x / cap): squeezes x smoothly into (-cap, cap). Source: Gemma 2."""
    import torch

    return cap * torch.tanh(x / cap)


def _cast_type(call: Call) -> Type:
    if call.dtype not in ELEMENT_BYTES:
        raise ConfigError(f"cast: unknown dtype {call.dtype!r}")
    return Type(call.dtype, call.x.leading, call.x.trailing)


@op(values=("x",), infer=_cast_type, traits=ELEMENTWISE)
def cast(x: "Tensor", dtype: str) -> "Tensor":
    """x in another dtype ("f32", "bf16", "f16"), rounded to nearest even."""
    import torch

    return x.to({"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype])


def _split_type(call: Call) -> Type:
    if not 0 <= call.start < call.stop <= call.x.width:
        raise ConfigError(f"split: columns {call.start}:{call.stop} of {call.x.width}")
    return Type(call.x.dtype, call.x.leading, (call.stop - call.start,))


@op(values=("x",), infer=_split_type, traits=(Trait.ROW_WISE, Trait.VIEW))
def split(x: "Tensor", start: int, stop: int) -> "Tensor":
    """Columns start..stop of x: a view."""
    return x[:, start:stop]


def _take_type(call: Call) -> Type:
    return Type(call.x.dtype, "rows", call.x.trailing)


@op(values=("x", "rows"), infer=_take_type, traits=(Trait.BY_COLUMN,))
def take_rows(x: "Tensor", rows: "Tensor") -> "Tensor":
    """The given rows of x [tokens, width]; rows: int [rows]."""
    return x[rows]


def _embed_type(call: Call) -> Type:
    return Type("f32", call.ids.leading, (call.w.shape[1],))


def _embed_bytes(call: Call) -> Affine:
    return Affine.per(call.ids.leading, call.w.nbytes // call.w.shape[0])


_EMBED = (Trait.ROW_WISE, Trait.SPLITS)


@op(values=("ids",), weights=("w",), infer=_embed_type, traits=_EMBED, weight_bytes=_embed_bytes)
def embed(ids: "Tensor", w: "Tensor", first: int | None = None, one_row: bool = False) -> "Tensor":
    """Rows of w [vocab, width] by id; ids int [tokens].

    first: w is part of a table, its first row that of this id; ids whose rows are elsewhere give zeros. Below 0: so
    many rows lie before that of id 0. one_row: the first row of w for every token, whatever its id.
    """
    from torch.nn.functional import embedding

    def look_up(at: "Tensor") -> "Tensor":
        return w.rows(at) if isinstance(w, OwnWeight) else embedding(at, w)

    if one_row:
        return look_up(ids.new_zeros(1)).expand(ids.shape[0], -1)
    if first is None:
        return look_up(ids)
    inside = (ids >= first) & (ids < first + w.shape[0])
    return look_up((ids - first).where(inside, 0)).masked_fill(~inside[:, None], 0.0)
