"""all_reduce and all_gather: the only ops whose result depends on other ranks of a model that several processes share.

The `shard` pass puts them into a Program. Their references work through a group that a backend hands in at run time.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.ops.cost import Affine
from roofline.ops.elementwise import same_as_x
from roofline.ops.registry import Call, op
from roofline.ops.symbol import Type
from roofline.ops.traits import Trait

if TYPE_CHECKING:
    from torch import Tensor

RANK_ORDER = "rank"


class RankGroup(Protocol):
    """The ranks that share a model's matrices, seen from one of them."""

    size: int

    def sum(self, x: "Tensor", order: str) -> "Tensor":
        """The sum of all ranks' x, of one shape and dtype; the same on each.

        order: RANK_ORDER adds float32 in the order of the ranks, whatever the transport, and rounds to x's dtype at the
        end; "": as the transport likes.
        """

    def gather(self, x: "Tensor", widths: Sequence[int]) -> "list[Tensor]":
        """Every rank's x [rows, widths[rank]], by rank."""


def exchange(x: "Tensor", out: "Tensor", group: RankGroup, order: str, widths: Sequence[int]) -> None:
    """Write to `out` what an all_gather (with widths) or an all_reduce makes of the ranks' x."""
    import torch

    if widths:
        torch.cat(group.gather(x, widths), dim=1, out=out)
    else:
        out.copy_(group.sum(x, order))


def require_ranks(ranks: int, group: RankGroup | None, what: str = "") -> None:
    """Raises UnsupportedError where a Program, or an op, is for other ranks than there are; no group: one."""
    size = group.size if group is not None else 1
    if size != ranks:
        reason = f"there are {size} here; a part of a model computes nothing without the others"
        instead = ["as many ranks", "a Program for one rank"]
        raise UnsupportedError(what or f"a Program for {ranks} ranks", reason, instead)


def _reduced_type(call: Call) -> Type:
    if call.ranks < 1 or call.x.dtype not in ("f32", "bf16", "f16"):
        raise ConfigError(f"all_reduce of {call.x.dtype} among {call.ranks} ranks")
    return same_as_x(call)


def _reduced_flops(call: Call) -> Affine:
    return Affine.per(call.x.leading, (call.ranks - 1) * call.x.width)


def _reduced_bytes(call: Call) -> Affine:
    """In rank order everybody's x; else a ring's 2 * (ranks - 1) / ranks of one (Patarasuk and Yuan 2009)."""
    peers = call.ranks - 1
    total = peers * call.x.row_bytes
    return Affine.per(call.x.leading, total if call.order == RANK_ORDER else -(-2 * total // call.ranks))


_REDUCED = (Trait.ROW_WISE, Trait.BY_COLUMN, Trait.LONG_SUM)


@op(values=("x",), infer=_reduced_type, traits=_REDUCED, flops=_reduced_flops, link_bytes=_reduced_bytes, inplace="x")
def all_reduce(x: "Tensor", ranks: int, group: RankGroup | None = None) -> "Tensor":
    """The sum of the ranks' x [rows, width], in x's dtype; x itself where there is one rank.

    group: never part of a Program.
    """
    require_ranks(ranks, group, f"all_reduce among {ranks} ranks")
    return x if group is None else group.sum(x, "")


def _gathered_type(call: Call) -> Type:
    if call.x.width not in call.widths or min(call.widths) < 1:
        raise ConfigError(f"all_gather: a part of width {call.x.width} among parts of {call.widths}")
    return Type(call.x.dtype, call.x.leading, (sum(call.widths),))


def _gathered_bytes(call: Call) -> Affine:
    """The others' parts."""
    return Affine.per(call.x.leading, (sum(call.widths) - call.x.width) * call.x.row_bytes // call.x.width)


@op(values=("x",), infer=_gathered_type, traits=(Trait.ROW_WISE,), link_bytes=_gathered_bytes)
def all_gather(x: "Tensor", widths: tuple[int, ...], group: RankGroup | None = None) -> "Tensor":
    """The ranks' parts side by side: x [rows, widths[rank]] -> [rows, sum of widths].

    group: never part of a Program.
    """
    import torch

    require_ranks(len(widths), group, f"all_gather among {len(widths)} ranks")
    return x if group is None else torch.cat(group.gather(x, widths), dim=1)
