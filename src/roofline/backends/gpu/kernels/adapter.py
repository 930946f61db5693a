"""LoRA with an adapter for each row: out += scale * (x @ A.T) @ B.T. Source: Hu et al. 2021; many at once: Chen et al.
2023 (Punica).

Rows need not be grouped: a block of rows is computed once for each adapter in it, and a row keeps its own's result.
One tile serves every number of rows, so that a row's result depends on nothing beside it.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from roofline.backends.gpu import tiles
from roofline.backends.gpu.integers import cdiv, next_power_of_2
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.hardware.chips.chips import Chip

NAME = "adapter"
LARGEST_RANK = 64
NO_ADAPTER = tl.constexpr(2147483647)


@triton.jit
def _next_adapter(ids, current, adapters):
    """The smallest of ids (1 to adapters) above current; NO_ADAPTER after the last."""
    return tl.min(tl.where((ids > current) & (ids <= adapters), ids, NO_ADAPTER), axis=0)


@triton.jit(do_not_specialize=["rows", "adapters"])
def _shrink(x, a, ids, middle, rows, adapters, width, rank, x_stride,
            RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    id = tl.load(ids + row, mask=row < rows, other=0)
    adapter = tl.cast(0, tl.int32)
    for _ in range(0, tl.program_id(1) + 1):  # this program's is one of the adapters in the block, by its place
        adapter = _next_adapter(id, adapter, adapters)
    if adapter != NO_ADAPTER:
        k, r = tl.arange(0, BLOCK_K), tl.arange(0, RANK)
        mine = id == adapter
        inputs = x + (row * x_stride)[:, None] + k[None, :]
        weights = a + (adapter - 1).to(tl.int64) * rank * width + r[None, :] * width + k[:, None]
        acc = tl.zeros((BLOCK_M, RANK), tl.float32)
        for first in range(0, width, BLOCK_K):
            inside = k < width - first
            lhs = tl.load(inputs + first, mask=mine[:, None] & inside[None, :], other=0.0)
            rhs = tl.load(weights + first, mask=inside[:, None] & (r < rank)[None, :], other=0.0)
            acc = tl.dot(lhs, rhs, acc, input_precision="ieee")
        tl.store(middle + (row * RANK)[:, None] + r[None, :], acc.to(middle.dtype.element_ty), mask=mine[:, None])


@triton.jit(do_not_specialize=["rows", "adapters"])
def _expand(middle, b, scales, ids, out, rows, adapters, columns, rank, out_stride,
            RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column, r = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, RANK)
    id = tl.load(ids + row, mask=row < rows, other=0)
    adapted, inside = id != 0, column < columns
    lhs = tl.load(middle + (row * RANK)[:, None] + r[None, :], mask=adapted[:, None], other=0.0)
    total = tl.full((BLOCK_M, BLOCK_N), float("nan"), tl.float32)  # stays where an adapter is not there
    adapter = _next_adapter(id, 0, adapters)
    while adapter != NO_ADAPTER:
        weights = b + (adapter - 1).to(tl.int64) * columns * rank + (column * rank)[None, :] + r[:, None]
        rhs = tl.load(weights, mask=inside[None, :] & (r < rank)[:, None], other=0.0)
        product = tl.dot(lhs, rhs, input_precision="ieee") * tl.load(scales + adapter - 1)
        total = tl.where((id == adapter)[:, None], product, total)
        adapter = _next_adapter(id, adapter, adapters)
    place, stored = out + (row * out_stride)[:, None] + column[None, :], adapted[:, None] & inside[None, :]
    total += tl.load(place, mask=stored, other=0.0).to(tl.float32)
    tl.store(place, total.to(out.dtype.element_ty), mask=stored)


def adapter(chip: Chip, x: Tensor, a: Tensor, b: Tensor, scales: Tensor, ids: Tensor, *, out: Tensor) -> None:
    """out[row] += scales[i] * (x[row] @ a[i].T) @ b[i].T, i = ids[row] - 1; rows of id 0 stay as they are.

    x [rows, in] and out [rows, out], rows may lie apart; a [adapters, rank, in], b [adapters, out, rank] of x's dtype
    (bf16, f16, f32), rank <= 64: adapters of less end in zeros; scales float32 [adapters], ids int32 [rows].
    Both products add up in float32; between them stand values of x's dtype. An id that no adapter has gives NaN.
    """
    rows, width = x.shape
    adapters, rank, _ = a.shape
    assert rank <= LARGEST_RANK, f"rank {rank}"
    assert a.is_contiguous(), "a lies apart"
    assert b.is_contiguous(), "b lies apart"
    block = _rank_block(rank)
    tile = tiles.choose(NAME, chip, bits=x.dtype.itemsize * 8)
    blocks, columns = cdiv(rows, tile.sizes["BLOCK_M"]), b.shape[1]
    middle = torch.empty((rows, block), dtype=x.dtype, device=x.device)  # [rows, rank, filled up]
    sizes = dict(tile.sizes)
    narrow, wide = sizes.pop("BLOCK_N"), sizes.pop("BLOCK_K")
    _shrink[(blocks, min(sizes["BLOCK_M"], adapters))](
        x, a, ids, middle, rows, adapters, width, rank, x.stride(0), RANK=block, BLOCK_K=wide, **sizes,
        **tile.compiler(),
    )  # fmt: skip
    _expand[(blocks, cdiv(columns, narrow))](
        middle, b, scales, ids, out, rows, adapters, columns, rank, out.stride(0), RANK=block, BLOCK_N=narrow, **sizes,
        **tile.compiler(),
    )  # fmt: skip


def _rank_block(rank: int) -> int:
    return max(16, next_power_of_2(rank))


def cost(rows: int, width: int, columns: int, rank: int, hit: int, out_bytes: int = 4) -> tuple[int, int]:
    """(FLOPs, bytes) of one call in 16 bits; hit: adapters that have a row."""
    moved = 2 * (rows * width + hit * rank * (width + columns)) + 4 * rows * rank
    return 2 * rows * rank * (width + columns), moved + 2 * rows * columns * out_bytes


def compilations(chip: Chip) -> Iterator[Compilation]:
    """Both products of ranks 16 and 64 in bf16, of 16 in f16 and f32."""
    for dtype, rank in (("bf16", 16), ("bf16", 64), ("f16", 16), ("f32", 16)):
        tile = tiles.choose(NAME, chip, bits=32 if dtype == "f32" else 16)
        first, second = f"shrink {dtype} rank={rank}", f"expand {dtype} rank={rank}"
        types, aligned = pointers(x=dtype, a=dtype, ids="i32", middle=dtype), ("width", "x_stride", "rank")
        yield Compilation(
            kernel=NAME,
            case=first,
            function=_shrink,
            signature=types,
            constants={"RANK": rank},
            tile=tile,
            dots=True,
            aligned=aligned,
        )
        types = pointers(middle=dtype, b=dtype, scales="f32", ids="i32", out="f32")
        aligned = ("columns", "out_stride", "rank")
        yield Compilation(
            kernel=NAME,
            case=second,
            function=_expand,
            signature=types,
            constants={"RANK": rank},
            tile=tile,
            dots=True,
            aligned=aligned,
        )
