"""x @ w.T for 16-bit w as it lies in files [out, in], sums in float32, in one order: ascending in blocks of BLOCK_K.

For few rows, where a library's product is made for many, and for every number of rows where bits must not depend on it.
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

NAME = "linear_float"
FEW_ROWS = 16  # up to which our product is faster than a library's, which is made for many
ROW_BUCKETS = (16, 32, 64, 128, 512, 2048)  # numbers of rows that have tiles of their own; the last also beyond
NARROW = 4096  # columns up to which wide tiles would be fewer programs than a large chip has multiprocessors


@triton.jit
def _added(part, w_block, acc, FLIP: tl.constexpr):
    """Return acc + part @ w_block.T, or its transpose: w is then the first operand."""
    if FLIP:
        acc = tl.dot(w_block, tl.trans(part), acc, input_precision="ieee")
    else:
        acc = tl.dot(part, tl.trans(w_block), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["rows"])
def _linear_float(
    x, w, bias, out, rows, columns, width, stride, out_stride,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    # Programs of the same columns follow one another: w is read from memory once for all blocks of rows.
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    results = columns // 2 if GATED else columns
    in_m, in_n = m < rows, n < results
    x_at = x + m.to(tl.int64)[:, None] * stride + k[None, :]
    w_at = w + n.to(tl.int64)[:, None] * width + k[None, :]
    FIRST: tl.constexpr = BLOCK_N if FLIP else BLOCK_M  # rows of the first operand
    SECOND: tl.constexpr = BLOCK_M if FLIP else BLOCK_N
    acc = tl.zeros((FIRST, SECOND), dtype=tl.float32)
    up = tl.zeros((FIRST, SECOND), dtype=tl.float32)
    for start in range(0, width, BLOCK_K):
        inside = start + k < width
        part = tl.load(x_at + start, mask=in_m[:, None] & inside[None, :], other=0.0)
        w_block = tl.load(w_at + start, mask=in_n[:, None] & inside[None, :], other=0.0)
        acc = _added(part, w_block, acc, FLIP)
        if GATED:
            w_block = tl.load(
                w_at + results.to(tl.int64) * width + start, mask=in_n[:, None] & inside[None, :], other=0.0
            )  # fmt: skip
            up = _added(part, w_block, up, FLIP)
    if FLIP:
        acc, up = tl.trans(acc), tl.trans(up)
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        # The unfused pair rounds gate and up on their way through memory.
        gate = acc.to(out.dtype.element_ty).to(tl.float32)
        up = up.to(out.dtype.element_ty).to(tl.float32)
        acc = gate / (1.0 + tl.exp(-gate)) * up
    at = out + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


def linear_float(
    chip: Chip, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor, *, gated: bool = False, exact: bool = False,
    one_tile: bool = False, tile: Tile | None = None,
) -> None:  # fmt: skip
    """out = x @ w.T + bias, or silu(gate) * up of it where gate and up are the two halves of w's rows.

    x [rows, width], rows may lie apart; w [columns, width], contiguous, in x's dtype; bias [columns], not with `gated`;
    out [rows, columns, half of them when gated], rows may lie apart. exact: a row's bits do not depend on the number of
    rows; one_tile: not even where tiles were found to agree (see `exact_tiles`); tile: instead of the table's, where
    one was measured to be faster.
    """
    assert w.is_contiguous(), "rows of w lie apart"
    assert bias is None or not gated, "a gated product has no bias"
    rows, width = x.shape
    tile = tile or table_tile(chip, rows, w.shape[0], exact=exact, one_tile=one_tile or x.element_size() != 2)
    results = w.shape[0] // 2 if gated else w.shape[0]
    grid = (cdiv(rows, tile.sizes["BLOCK_M"]), cdiv(results, tile.sizes["BLOCK_N"]))
    _linear_float[grid](
        x, w, x if bias is None else bias, out, rows, w.shape[0], width, x.stride(0), out.stride(0),
        HAS_BIAS=bias is not None, GATED=gated, **tile.launch(),
    )  # fmt: skip


def fuses_gated(chip: Chip) -> bool:
    """Return whether gate and up are joined in the product: not where tiles are so tall that too few are left."""
    return not _agrees(chip)


def exact_tiles(chip: Chip) -> list[Tile]:
    """Return the tiles that exact products have, whatever their rows and columns; one where all have the same."""
    return list(_tiles_by_case(chip).values()) if _agrees(chip) else [table_tile(chip, 1, NARROW, exact=True)]


def _tiles_by_case(chip: Chip) -> dict[str, Tile]:
    """Return the tiles of a chip that has one for each number of rows, by that and whether the matrix is narrow."""
    sides = {"wide": NARROW + 1, "narrow": NARROW}
    return {f"{rows} {side}": table_tile(chip, rows, n) for rows in ROW_BUCKETS for side, n in sides.items()}


def table_tile(chip: Chip, rows: int, columns: int, *, exact: bool = False, one_tile: bool = False) -> Tile:
    """Return the tile of tiles.toml for so many rows of x and columns of the result; see `linear_float`."""
    if not _agrees(chip):
        return tiles.choose(NAME, chip, regime="exact" if exact else "decode" if rows <= FEW_ROWS else "many")
    if exact and one_tile:
        return tiles.choose(NAME, chip, regime="exact")
    bucket = next((bucket for bucket in ROW_BUCKETS if rows <= bucket), ROW_BUCKETS[-1])
    return tiles.choose(NAME, chip, rows=bucket, narrow=columns <= NARROW)


def _agrees(chip: Chip) -> bool:
    """Return whether a chip's tiles give the same bits (of an H200 measured), so that each number of rows has its own.

    Its matrix units add 16 products at a time to a float32 and then the next 16, whatever instruction and shape asks
    for it, and every tile goes through the width in ascending order.
    """
    return chip.name == "sm_90"


def cost(rows: int, columns: int, width: int, itemsize: int = 2) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch: each operand once."""
    return 2 * rows * columns * width, itemsize * (columns * width + rows * (columns + width))


def compilations(chip: Chip) -> Iterator[Compilation]:
    """Every tile, also the one where tiles differ, plain in both dtypes, and gated where that is fused."""
    named = {rows: tiles.choose(NAME, chip, regime=rows) for rows in ("decode", "many", "exact")}
    if _agrees(chip):
        named = {**_tiles_by_case(chip), "exact": named["exact"]}
    cases = [("bf16", "bf16", False), ("bf16", "f32", False), ("f16", "f16", False)]
    if fuses_gated(chip):
        cases.append(("bf16", "bf16", True))
    for rows, tile in named.items():
        for dtype, out, gated in cases:
            case, types = f"{rows} {dtype} to {out}{' gated' * gated}", pointers(x=dtype, w=dtype, bias=dtype, out=out)
            constants, aligned = {"HAS_BIAS": False, "GATED": gated}, ("columns", "width", "stride", "out_stride")
            yield Compilation(
                kernel=NAME,
                case=case,
                function=_linear_float,
                signature=types,
                constants=constants,
                tile=tile,
                dots=True,
                aligned=aligned,
            )
