"""8-bit floats: matrices of them (the format E4M3) as the kernels read them, how their codes become values, and rows of
activations with one scale each (what ops.matmul.round_rows computes, kept apart)."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from roofline.backends.gpu import tiles
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.hardware.chips.chips import Chip
from roofline.ops.formats.float8 import BLOCK, NAN, split

NAME = "rows_fp8"
FLAVOURS = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}
GROUP = BLOCK  # columns that share a scale


@dataclass(frozen=True)
class Float8Weight:
    """A matrix on a device: value = code * scale.

    codes: uint8 [rows, columns], bits of e4m3fn; scale: float32 [columns / 128, rows]. Neither NaN nor -0 is among the
    codes: a group with NaN has the scale NaN. So the bits are good in the other flavour too, where they mean half as
    much.
    """

    codes: Tensor
    scale: Tensor

    @classmethod
    def of(cls, raw: np.ndarray, rows: int, device: torch.device | str) -> "Float8Weight":
        """From the bytes of a matrix in the format E4M3 (uint8), copied to the device."""
        codes, scale = split(raw, rows)
        grouped = codes.reshape(*scale.shape, GROUP)
        scale = np.where(((grouped & NAN) == NAN).any(axis=2), np.float32("nan"), scale)
        codes = np.where((codes == 0x80) | ((codes & NAN) == NAN), np.uint8(0), codes)
        turned = np.ascontiguousarray(scale.T)
        return cls(torch.from_numpy(codes).to(device), torch.from_numpy(turned).to(device))

    @property
    def rows(self) -> int:
        """Of the matrix: columns of a product."""
        return self.codes.shape[0]

    @property
    def columns(self) -> int:
        """Of the matrix: width of what it multiplies."""
        return self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return self.codes.nbytes + self.scale.nbytes

    def read_on(self, chip: Chip) -> tuple[Tensor, float]:
        """The codes in the dtype that the chip converts, uint8 where it converts none; what its values are to be
        multiplied by."""
        codes = self.codes.view(FLAVOURS[chip.fp8]) if chip.fp8 else self.codes
        return codes, factor(chip)


def factor(chip: Chip) -> float:
    """What values read as the chip's flavour are to be multiplied by."""
    return 2.0 if chip.fp8 == "e4m3fnuz" else 1.0


@triton.jit
def e4m3_values(codes, dtype: tl.constexpr):
    """Codes as floats of dtype, exactly; uint8 codes on a chip that converts none, whose bits are e4m3fn's.

    Those bits are a half float's, too, 2^8 too small: as half floats they have no value that a chip flushes to zero.
    """
    if codes.dtype != tl.uint8:
        values = codes.to(dtype)
    else:
        wide = codes.to(tl.int16)
        half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        exact = half.to(tl.float32) * 256.0
        if dtype == tl.bfloat16:  # its lower bits are 0: cut, not rounded
            values = (exact.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            values = exact.to(dtype)
    return values


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
    """(FLOPs, bytes) of one launch of `rows_fp8` on 16-bit rows."""
    return 2 * rows * width, 3 * rows * width + 4 * rows


def compilations(chip: Chip) -> Iterator[Compilation]:
    """From 16 bits, where the chip has 8-bit floats."""
    if not chip.fp8:
        return
    tile = tiles.choose(NAME, chip)
    types, constants = pointers(x="bf16", out=chip.fp8, scale="f32"), {"TOP": torch.finfo(FLAVOURS[chip.fp8]).max}
    yield Compilation(
        kernel=NAME,
        case=f"bf16 to {chip.fp8}",
        function=_rows_fp8,
        signature=types,
        constants=constants,
        tile=tile,
        aligned=("width", "stride"),
    )
