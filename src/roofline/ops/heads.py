"""cut_heads, join_heads: the columns of rows, head by head, where a model's heads do not lie as attention takes them.

A row of `heads` heads has them side by side, each of equally many columns.
"""

from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError
from roofline.ops.registry import Call, op
from roofline.ops.symbol import Type
from roofline.ops.traits import Trait

if TYPE_CHECKING:
    from torch import Tensor

_MOVED = (Trait.ROW_WISE, Trait.WHOLE_VALUES)


def _cut_type(call: Call) -> Type:
    if call.heads < 1 or call.x.width % call.heads or not 0 <= call.start < min(call.stop, call.x.width // call.heads):
        raise ConfigError(f"cut_heads: columns {call.start}:{call.stop} of {call.heads} heads in {call.x.width}")
    return Type(call.x.dtype, call.x.leading, (call.heads * (call.stop - call.start),))


@op(values=("x",), infer=_cut_type, traits=_MOVED)
def cut_heads(x: "Tensor", heads: int, start: int, stop: int) -> "Tensor":
    """Columns start..stop of each head of x [rows, heads * dim], and zeros for those behind its end:
    [rows, heads * (stop - start)]."""
    from torch.nn.functional import pad

    parts = x.unflatten(1, (heads, x.shape[1] // heads))  # [rows, heads, dim], where there may be no rows
    return pad(parts[..., start:stop], (0, max(0, stop - parts.shape[2]))).flatten(1)


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

    before, behind = (t.unflatten(1, (n, t.shape[1] // n)) for t, n in ((x, 1 if shared else heads), (y, heads)))
    return torch.cat([before.expand(-1, heads, -1), behind], dim=2).flatten(1)
