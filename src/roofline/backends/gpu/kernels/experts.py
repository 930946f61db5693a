"""Products with the weights of the experts that each token was sent to: slots sorted by expert, tiles of one expert.

A slot is (token, rank): token * top + rank. Sorting is stable, results lie in the slots' own order, nothing is added
by atomics. Routing and combination are kernels/route.py; the activation between two products is kernels/gated.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from roofline.backends.gpu import tiles
from roofline.backends.gpu.integers import cdiv
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.backends.gpu.tiles import Tile
from roofline.hardware.chips.chips import Chip

NAME = "experts"
REGIMES = ("decode", "prefill", "exact")


@triton.jit(do_not_specialize=["experts"])
def _expert_linear(
    x, w, order, starts, tile_expert, tile_start, out, experts, width, columns, x_stride, out_stride,
    SHARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    expert = tl.load(tile_expert + tl.program_id(0))
    if expert < experts:
        at = tl.load(tile_start + tl.program_id(0)) + tl.arange(0, BLOCK_M)
        real = at < tl.load(starts + expert + 1)
        slot = tl.load(order + at, mask=real, other=0).to(tl.int64)
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        in_columns = column < columns
        k = tl.arange(0, BLOCK_K)
        rows = x + (slot // SHARE * x_stride)[:, None] + k[None, :]
        weights = w + expert.to(tl.int64) * columns * width + column.to(tl.int64)[None, :] * width + k[:, None]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(0, width, BLOCK_K):
            inside = k < width - first
            a = tl.load(rows + first, mask=real[:, None] & inside[None, :], other=0.0)
            b = tl.load(weights + first, mask=in_columns[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        place = out + (slot * out_stride)[:, None] + column[None, :]
        tl.store(place, acc.to(out.dtype.element_ty), mask=real[:, None] & in_columns[None, :])


@dataclass(frozen=True)
class Schedule:
    """Which program computes what, all on the device.

    order int32 [slots]: slots by expert, of one expert ascending; starts int32 [experts + 1]: where an expert's begin;
    tile_expert, tile_start int32 [tiles]: each program's expert (`experts` where it has nothing to do) and first place
    in order; top: slots a token; exact: one tile for every number of slots.
    """

    order: Tensor
    starts: Tensor
    tile_expert: Tensor
    tile_start: Tensor
    top: int
    exact: bool

    @property
    def experts(self) -> int:
        return self.starts.shape[0] - 1


def schedule(chip: Chip, ids: Tensor, experts: int, dtype: torch.dtype, *, exact: bool = False) -> Schedule:
    """Slots sorted for products in `dtype`; ids int32 [tokens, top]: each token's experts, 0 <= id < experts.

    Shapes depend on tokens, top and experts alone, so that nothing waits for the device.
    """
    slots, device = ids.numel(), ids.device
    rows = _tile(chip, slots, experts, dtype, exact).sizes["BLOCK_M"]
    by_expert, order = torch.sort(ids.flatten(), stable=True)
    starts = torch.searchsorted(by_expert, torch.arange(experts + 1, device=device, dtype=ids.dtype))  # [experts + 1]
    blocks = (starts.diff() + rows - 1) // rows  # [experts]
    ends = blocks.cumsum(0)  # [experts]
    place = torch.arange(slots // rows + min(experts, slots), device=device)  # [tiles]: as many as there can be
    expert = torch.searchsorted(ends, place, right=True)  # [tiles]
    within = expert.clamp(max=experts - 1)
    first = starts[within] + (place - ends[within] + blocks[within]) * rows
    return Schedule(
        order=order.int(),
        starts=starts.int(),
        tile_expert=expert.int(),
        tile_start=first.int(),
        top=ids.shape[1],
        exact=exact,
    )


def expert_linear(chip: Chip, x: Tensor, w: Tensor, plan: Schedule, *, out: Tensor) -> None:
    """out[slot] = x[slot] @ w[expert of slot].T for every slot, added up in float32.

    x [tokens, in], the same row for all of a token's slots, or [slots, in]; rows may lie apart. w [experts, out, in] of
    x's dtype (bf16, f16, f32); out [slots, out] of any float dtype. A slot's result depends on its row alone; with
    another number of slots a non-exact schedule may take another tile, and so another order of additions.
    """
    slots, experts, width = plan.order.shape[0], plan.experts, w.shape[2]
    assert w.is_contiguous(), "experts lie apart"
    assert w.shape[0] == experts, f"weights of {w.shape[0]} experts for a schedule of {experts}"
    assert x.shape[0] in (slots, slots // plan.top), "x has neither a row a token nor a row a slot"
    tile = _tile(chip, slots, experts, x.dtype, plan.exact)
    grid = (plan.tile_expert.shape[0], cdiv(w.shape[1], tile.sizes["BLOCK_N"]))
    _expert_linear[grid](
        x, w, plan.order, plan.starts, plan.tile_expert, plan.tile_start, out, experts, width, w.shape[1],
        x.stride(0), out.stride(0), SHARE=slots // x.shape[0], **tile.launch(),
    )  # fmt: skip


def _tile(chip: Chip, slots: int, experts: int, dtype: torch.dtype, exact: bool) -> Tile:
    regime = "exact" if exact else "decode" if slots <= 16 * experts else "prefill"
    return tiles.choose(NAME, chip, regime=regime, bits=dtype.itemsize * 8)


def cost(slots: int, hit: int, out: int, width: int, out_bytes: int = 2) -> tuple[int, int]:
    """(FLOPs, bytes) of one product in 16 bits; hit: experts that have a slot."""
    return 2 * slots * out * width, 2 * (hit * out * width + slots * width) + slots * out * out_bytes


def compilations(chip: Chip) -> Iterator[Compilation]:
    """Every regime in bf16, a row a token and a row a slot; f16 and f32 once."""
    cases = [("bf16", regime, share) for regime in REGIMES for share in (2, 1)]
    for dtype, regime, share in [*cases, ("f16", "decode", 1), ("f32", "prefill", 1)]:
        tile = tiles.choose(NAME, chip, regime=regime, bits=32 if dtype == "f32" else 16)
        tables = dict.fromkeys(("order", "starts", "tile_expert", "tile_start"), "i32")
        yield Compilation(
            kernel=NAME,
            case=f"{dtype} {regime} share={share}",
            function=_expert_linear,
            signature=pointers(x=dtype, w=dtype, out=dtype, **tables),
            constants={"SHARE": share},
            tile=tile,
            dots=True,
            aligned=("width", "columns", "x_stride", "out_stride"),
        )
