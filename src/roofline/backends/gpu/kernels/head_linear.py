"""Products of each head with a matrix of its own: x[:, head] @ w[head].T, sums in float32 in ascending order.

Attention over compressed rows takes its queries to the rows so, and what it sees back to values (`ops.heads`).
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from roofline.backends.gpu import tiles
from roofline.backends.gpu.integers import cdiv
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.backends.gpu.tiles import Tile
from roofline.hardware.chips.chips import Chip

NAME = "head_linear"
FEW_ROWS = 16  # that a narrow tile takes
REGIMES = ("decode", "prefill", "exact")


@triton.jit(do_not_specialize=["rows"])
def _head_linear(
    x, w, out, rows, columns, width, stride, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows, blocks of a head's columns, heads). columns, width: of one head."""
    # Programs of the same columns follow one another: w is read from memory once for all blocks of rows.
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    head = tl.program_id(2).to(tl.int64)
    in_m, in_n = m < rows, n < columns
    x_at = x + m.to(tl.int64)[:, None] * stride + head * width + k[None, :]
    w_at = w + (head * columns + n)[:, None] * width + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, width, BLOCK_K):
        inside = start + k < width
        part = tl.load(x_at + start, mask=in_m[:, None] & inside[None, :], other=0.0)
        w_block = tl.load(w_at + start, mask=in_n[:, None] & inside[None, :], other=0.0)
        acc = tl.dot(part, tl.trans(w_block), acc, input_precision="ieee")
    at = out + m.to(tl.int64)[:, None] * out_stride + head * columns + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


def head_linear(chip: Chip, x: Tensor, w: Tensor, heads: int, *, out: Tensor, exact: bool = False) -> None:
    """`ops.head_linear`: x [rows, heads * in], w [heads * columns, in], contiguous, in x's dtype; out [rows, heads *
    columns] of any float dtype; rows of x and of out may lie apart. exact: a row's bits do not depend on the number of
    rows."""
    assert w.is_contiguous(), "rows of w lie apart"
    rows, columns, width = x.shape[0], w.shape[0] // heads, w.shape[1]
    tile = _tile(chip, rows, x.element_size(), exact)
    grid = (cdiv(rows, tile.sizes["BLOCK_M"]), cdiv(columns, tile.sizes["BLOCK_N"]), heads)
    _head_linear[grid](x, w, out, rows, columns, width, x.stride(0), out.stride(0), **tile.launch())


def _tile(chip: Chip, rows: int, element_bytes: int, exact: bool) -> Tile:
    regime = "exact" if exact else "decode" if rows <= FEW_ROWS else "prefill"
    return tiles.choose(NAME, chip, regime=regime, bits=8 * element_bytes)


def cost(rows: int, heads: int, columns: int, width: int) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch in 16 bits: each operand once. columns, width: of one head."""
    return 2 * rows * heads * columns * width, 2 * heads * (columns * width + rows * (columns + width))


def compilations(chip: Chip) -> Iterator[Compilation]:
    """Every regime in bf16, one in f16."""
    for regime, dtype in (*((regime, "bf16") for regime in REGIMES), ("decode", "f16")):
        yield Compilation(
            kernel=NAME,
            case=f"{regime} {dtype}",
            function=_head_linear,
            signature=pointers(x=dtype, w=dtype, out=dtype),
            constants={},
            tile=tiles.choose(NAME, chip, regime=regime, bits=16),
            dots=True,
            aligned=("columns", "width", "stride", "out_stride"),
        )
