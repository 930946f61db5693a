"""x @ w.T for w in 8-bit floats with a scale for each 128 columns; sums in float32.

x in 16 bits: w is widened to them in registers, exactly. x in 8 bits with a scale for each row (float8.py), on chips
whose matrix instructions read them: products of 8 bits. A group's product is one tl.dot, scaled once in float32: what a
chip adds up in fewer bits (Hopper, of 8-bit floats) is 128 products, no more; DeepSeek-AI 2024, section 3.3.
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from roofline.backends.gpu import tiles
from roofline.backends.gpu.integers import cdiv
from roofline.backends.gpu.kernels.float8 import GROUP, Float8Weight, e4m3_values, factor
from roofline.backends.gpu.kernels.linear_quant import regime
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.hardware.chips.chips import Chip

NAME = "linear_fp8"


@triton.jit
def _sums(
    x, w, scale, row, column, rows, columns, width, stride,
    GROUP: tl.constexpr, ROWS_FP8: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_M, BLOCK_N], without what scales whole rows; row, column: int [BLOCK_M], [BLOCK_N]."""
    in_m, in_n = (row < rows)[:, None], column < columns
    k = tl.arange(0, GROUP)
    x_at = x + row.to(tl.int64)[:, None] * stride + k[None, :]
    w_at = w + column.to(tl.int64)[:, None] * width + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for group in range(0, width // GROUP):
        part = tl.load(x_at + group * GROUP, mask=in_m, other=0.0)
        w_block = tl.load(w_at + group * GROUP, mask=in_n[:, None], other=0.0)
        if ROWS_FP8:
            product = tl.dot(part, tl.trans(w_block))
        else:
            product = tl.dot(part, tl.trans(e4m3_values(w_block, part.dtype)), input_precision="ieee")
        s = tl.load(scale + group * columns + column, mask=in_n, other=0.0)
        acc = tl.fma(product, tl.broadcast_to(s[None, :], (BLOCK_M, BLOCK_N)), acc)
    return acc


@triton.jit(do_not_specialize=["rows"])
def _linear_fp8(
    x, x_scale, w, scale, bias, out, rows, columns, width, stride, out_stride,
    FACTOR: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, GROUP: tl.constexpr, ROWS_FP8: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Programs of the same columns follow one another: w is read from memory once for all blocks of rows.
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    results = columns // 2 if GATED else columns
    column = tl.where(n < results, n, columns)  # surplus lanes read nothing
    by_row = FACTOR
    if ROWS_FP8:
        by_row = (tl.load(x_scale + row, mask=row < rows, other=0.0) * FACTOR)[:, None]
    acc = _sums(x, w, scale, row, column, rows, columns, width, stride, GROUP, ROWS_FP8, BLOCK_M, BLOCK_N) * by_row
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if GATED:
        column = tl.where(n < results, n + results, columns)
        up = _sums(x, w, scale, row, column, rows, columns, width, stride, GROUP, ROWS_FP8, BLOCK_M, BLOCK_N) * by_row
        # The unfused pair rounds gate and up on their way through memory.
        gate = acc.to(out.dtype.element_ty).to(tl.float32)
        up = up.to(out.dtype.element_ty).to(tl.float32)
        acc = gate / (1.0 + tl.exp(-gate)) * up
    at = out + row.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (n < results)[None, :])


def linear_fp8(
    chip: Chip, x: Tensor, weight: Float8Weight, bias: Tensor | None, out: Tensor, *, x_scale: Tensor | None = None,
    gated: bool = False, exact: bool = False,
) -> None:  # fmt: skip
    """out = x @ w.T + bias, or silu(gate) * up of it where gate and up are the two halves of w's rows.

    x [rows, columns] in bf16, f16 or f32, or in the chip's 8-bit floats with x_scale float32 [rows]; rows may lie
    apart; bias [w rows], not with `gated`; out [rows, w rows, half of them when gated], rows may lie apart. exact: one
    tile for every number of rows.
    """
    assert bias is None or not gated, "a gated product has no bias"
    rows, width = x.shape
    tile = tiles.choose(NAME, chip, regime=regime(rows, exact), bits=8 * min(x.element_size(), 2), gated=gated)
    codes, by = weight.read_on(chip)
    results = weight.rows // 2 if gated else weight.rows
    grid = (cdiv(rows, tile.sizes["BLOCK_M"]), cdiv(results, tile.sizes["BLOCK_N"]))
    _linear_fp8[grid](
        x, weight.scale if x_scale is None else x_scale, codes, weight.scale, weight.scale if bias is None else bias,
        out, rows, weight.rows, width, x.stride(0), out.stride(0), FACTOR=by, HAS_BIAS=bias is not None, GATED=gated,
        GROUP=GROUP, ROWS_FP8=x_scale is not None, **tile.launch(),
    )  # fmt: skip


def cost(rows: int, weight: Float8Weight, itemsize: int = 2) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch: the weight once, x once, the result once in 16 bits."""
    moved = weight.nbytes + rows * (itemsize * weight.columns + 2 * weight.rows)
    return 2 * rows * weight.rows * weight.columns, moved


def compilations(chip: Chip) -> Iterator[Compilation]:
    """Every regime with 16-bit rows, gated, to float32, and with 8-bit rows where the chip has them."""
    for rows in ("decode", "some", "prefill", "exact"):
        yield _compilation(chip, rows, "bf16")
        yield _compilation(chip, rows, "bf16", gated=True)
        if chip.fp8:
            yield _compilation(chip, rows, chip.fp8)
            yield _compilation(chip, rows, chip.fp8, gated=True)
    yield _compilation(chip, "decode", "f16")
    yield _compilation(chip, "decode", "bf16", out="f32")


def _compilation(chip: Chip, rows: str, dtype: str, *, out: str = "", gated: bool = False) -> Compilation:
    eight = dtype == chip.fp8
    tile = tiles.choose(NAME, chip, regime=rows, bits=8 if eight else 16, gated=gated)
    out = out or ("bf16" if eight else dtype)
    types = pointers(x=dtype, x_scale="f32", w=chip.fp8 or "u8", scale="f32", bias="f32", out=out)
    constants = {"FACTOR": factor(chip), "HAS_BIAS": False, "GATED": gated, "GROUP": GROUP, "ROWS_FP8": eight}
    case, aligned = f"{rows} {dtype} to {out}{' gated' * gated}", ("columns", "width", "stride", "out_stride")
    return Compilation(
        kernel=NAME,
        case=case,
        function=_linear_fp8,
        signature=types,
        constants=constants,
        tile=tile,
        dots=True,
        aligned=aligned,
    )
