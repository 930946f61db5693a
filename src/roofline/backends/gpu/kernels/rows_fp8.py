"""Rows of activations in 8-bit floats, with one scale each: what ops.matmul.round_rows computes, kept apart."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from roofline.backends.gpu import tiles
from roofline.backends.gpu.kernels.float8 import FLAVOURS
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.hardware.chips.chips import Chip

NAME = "rows_fp8"


@triton.jit
def _rows_fp8(x, out, scale, width, stride, TOP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x += row * stride
    out += row * width
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        value = tl.abs(tl.load(x + start + at, mask=start + at < width, other=0.0).to(tl.float32))
        largest = tl.maximum(largest, value)  # without NaN, which is there below
    amax = tl.max(largest, axis=0)
    inverse = tl.where(amax >= 7.888609052210118e-31, tl.math.div_rn(TOP, amax), 0.0)  # 2^-100
    tl.store(scale + row, tl.math.div_rn(amax, TOP))
    for start in range(0, width, BLOCK):
        value = tl.load(x + start + at, mask=start + at < width, other=0.0).to(tl.float32) * inverse
        value = tl.where(value > TOP, TOP, tl.where(value < -TOP, -TOP, value))  # comparisons leave NaN as it is
        tl.store(out + start + at, value.to(out.dtype.element_ty), mask=start + at < width)


def rows_fp8(chip: Chip, x: Tensor, *, out: Tensor, scale: Tensor) -> None:
    """out [rows, width], contiguous, in the chip's 8-bit floats, and scale float32 [rows]: x is about their product.

    x [rows, width], rows may lie apart.
    """
    tile = tiles.choose(NAME, chip)
    assert out.dtype == FLAVOURS[chip.fp8], "the chip reads another flavour"
    top = torch.finfo(out.dtype).max
    _rows_fp8[(x.shape[0],)](x, out, scale, x.shape[1], x.stride(0), TOP=top, **tile.launch())


def cost(rows: int, width: int) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch on 16-bit rows."""
    return 2 * rows * width, 3 * rows * width + 4 * rows


def compilations(chip: Chip) -> Iterator[Compilation]:
    """From 16 bits, where the chip has 8-bit floats."""
    if not chip.fp8:
        return
    tile = tiles.choose(NAME, chip)
    types, constants = pointers(x="bf16", out=chip.fp8, scale="f32"), {"TOP": torch.finfo(FLAVOURS[chip.fp8]).max}
    yield Compilation(NAME, f"bf16 to {chip.fp8}", _rows_fp8, types, constants, tile, aligned=("width", "stride"))
