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


@triton.jit(do_not_specialize=["rows"])
def _linear_float(
    x, w, bias, out, rows, columns, width, stride, out_stride,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Programs of the same columns follow one another: w is read from memory once for all blocks of rows.
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    results = columns // 2 if GATED else columns
    in_m, in_n = m < rows, n < results
    x_at = x + m.to(tl.int64)[:, None] * stride + k[None, :]
    w_at = w + n.to(tl.int64)[:, None] * width + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, width, BLOCK_K):
        inside = start + k < width
        part = tl.load(x_at + start, mask=in_m[:, None] & inside[None, :], other=0.0)
        w_block = tl.load(w_at + start, mask=in_n[:, None] & inside[None, :], other=0.0)
        acc = tl.dot(part, tl.trans(w_block), acc, input_precision="ieee")
        if GATED:
            w_block = tl.load(
                w_at + results.to(tl.int64) * width + start, mask=in_n[:, None] & inside[None, :], other=0.0
            )  # fmt: skip
            up = tl.dot(part, tl.trans(w_block), up, input_precision="ieee")
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
    tile: Tile | None = None,
) -> None:  # fmt: skip
    """out = x @ w.T + bias, or silu(gate) * up of it where gate and up are the two halves of w's rows.

    x [rows, width], rows may lie apart; w [columns, width], contiguous, in x's dtype; bias [columns], not with `gated`;
    out [rows, columns, half of them when gated], rows may lie apart. exact: one tile for every number of rows; tile:
    instead of the table's, where one was measured to be faster.
    """
    assert w.is_contiguous(), "rows of w lie apart"
    assert bias is None or not gated, "a gated product has no bias"
    rows, width = x.shape
    tile = tile or tiles.choose(NAME, chip, regime=regime(rows, exact))
    results = w.shape[0] // 2 if gated else w.shape[0]
    grid = (cdiv(rows, tile.sizes["BLOCK_M"]), cdiv(results, tile.sizes["BLOCK_N"]))
    _linear_float[grid](
        x, w, x if bias is None else bias, out, rows, w.shape[0], width, x.stride(0), out.stride(0),
        HAS_BIAS=bias is not None, GATED=gated, **tile.launch(),
    )  # fmt: skip


def regime(rows: int, exact: bool) -> str:
    """Which rows of tiles.toml serve."""
    return "exact" if exact else "decode" if rows <= 16 else "many"


def cost(rows: int, columns: int, width: int, itemsize: int = 2) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch: each operand once."""
    return 2 * rows * columns * width, itemsize * (columns * width + rows * (columns + width))


def compilations(chip: Chip) -> Iterator[Compilation]:
    """Every regime, plain in both dtypes and gated."""
    cases = (("bf16", "bf16", False), ("bf16", "f32", False), ("f16", "f16", False), ("bf16", "bf16", True))
    for rows in ("decode", "many", "exact"):
        tile = tiles.choose(NAME, chip, regime=rows)
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
