"""cut_heads, join_heads, head_linear: the columns of rows, head by head, and products with a matrix of each head.

A row of `heads` heads has them side by side, each of equally many columns.
"""

from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError
from roofline.ops.cost import Affine
from roofline.ops.matmul import Q8Rows
from roofline.ops.registry import Call, op
from roofline.ops.symbol import Type
from roofline.ops.traits import Trait

if TYPE_CHECKING:
    from torch import Tensor

_MOVED = (Trait.ROW_WISE, Trait.HEAD_MOVE, Trait.WHOLE_VALUES)


def _cut_type(call: Call) -> Type:
    if call.heads < 1 or call.x.width % call.heads or not 0 <= call.start < min(call.stop, call.x.width // call.heads):
        raise ConfigError(f"cut_heads: columns {call.start}:{call.stop} of {call.heads} heads in {call.x.width}")
    return Type(call.x.dtype, call.x.leading, (call.heads * (call.stop - call.start),))


@op(values=("x",), infer=_cut_type, traits=_MOVED)
def cut_heads(x: "Tensor", heads: int, start: int, stop: int) -> "Tensor":
    """Columns start..stop of each head of x [rows, heads * dim], and zeros for those behind its end:
    [rows, heads * (stop - start)]."""
    from torch.nn.functional import pad

    parts = x.reshape(x.shape[0], heads, x.shape[1] // heads)  # [rows, heads, dim]; of a step there may be no rows
    columns = pad(parts[..., start:stop], (0, max(0, stop - parts.shape[2])))
    return columns.reshape(x.shape[0], heads * (stop - start))


def _join_type(call: Call) -> Type:
    repeated = call.heads if call.shared else 1
    alike = (call.x.dtype, call.x.leading) == (call.y.dtype, call.y.leading)
    if call.heads < 1 or not alike or call.y.width % call.heads or call.x.width * repeated % call.heads:
        raise ConfigError(f"join_heads: {call.x} and {call.y} are not {call.heads} heads each")
    return Type(call.x.dtype, call.x.leading, (call.x.width * repeated + call.y.width,))


@op(values=("x", "y"), infer=_join_type, traits=_MOVED)
def join_heads(x: "Tensor", y: "Tensor", heads: int, shared: bool = False) -> "Tensor":
    """Each head of x with the same head of y behind it: x [rows, heads * a], y [rows, heads * b] give
    [rows, heads * (a + b)]. shared: x is one head, [rows, a], which stands before each of y's."""
    import torch

    counts = (1 if shared else heads), heads
    before, behind = (t.reshape(t.shape[0], n, t.shape[1] // n) for t, n in zip((x, y), counts, strict=True))
    return torch.cat([before.expand(-1, heads, -1), behind], dim=2).flatten(1)


def _head_linear_type(call: Call) -> Type:
    rows, width = call.w.shape
    if call.heads < 1 or rows % call.heads or call.x.width != call.heads * width:
        what = f"input of width {call.x.width}, weight of {rows} rows and {width} columns"
        raise ConfigError(f"head_linear: {what} are not those of {call.heads} heads")
    return Type("f32", call.x.leading, (rows,))


def _head_linear_flops(call: Call) -> Affine:
    return Affine.per(call.x.leading, 2 * call.w.shape[0] * call.w.shape[1])


_HEAD_LINEAR = (Trait.ROW_WISE, Trait.HEAD_PRODUCT, Trait.LONG_SUM, Trait.ROUNDED, Trait.SPLITS)


@op(values=("x",), weights=("w",), infer=_head_linear_type, traits=_HEAD_LINEAR, flops=_head_linear_flops)
def head_linear(x: "Tensor | Q8Rows", w: "Tensor", heads: int) -> "Tensor":
    """x @ w[head].T of each head by itself: x [rows, heads * in], w [heads * out, in], the heads' matrices one below
    the other, give [rows, heads * out]."""
    import torch

    parts = (x.dequantize() if isinstance(x, Q8Rows) else x).unflatten(1, (heads, -1))  # [rows, heads, in]
    return torch.einsum("rhi,hoi->rho", parts, w.unflatten(0, (heads, -1))).flatten(1)
