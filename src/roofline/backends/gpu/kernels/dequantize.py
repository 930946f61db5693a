"""Quantised weights widened to floats: whole matrices for products with many rows, picked rows for embeddings."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from roofline.backends.gpu import tiles
from roofline.backends.gpu.integers import cdiv
from roofline.backends.gpu.kernels.linear_quant import group_codes, group_scale, layout_constants
from roofline.backends.gpu.pack import LAYOUTS, Packed
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.hardware.chips.chips import Chip

NAME = "dequantize"


@triton.jit(do_not_specialize=["count"])
def _dequantize(
    words, high, scale, minimum, super_scale, super_minimum, ids, out, count, rows, out_stride,
    GROUP: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, TWO_LEVEL: tl.constexpr, HAS_MINIMUM: tl.constexpr,
    SUPER_COLUMNS: tl.constexpr, PICKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = i
    if PICKED:
        row = tl.load(ids + i, mask=i < count, other=-1).to(tl.int32)
    inside = (i < count) & (row >= 0) & (row < rows)
    codes = group_codes(words, high, group, row, rows, inside, BITS, GROUP)
    s = group_scale(scale, super_scale, group, row, rows, inside, GROUP, TWO_LEVEL, SUPER_COLUMNS)
    value = s[:, None] * (codes - ZERO).to(tl.float32)
    if HAS_MINIMUM:
        m = group_scale(minimum, super_minimum, group, row, rows, inside, GROUP, TWO_LEVEL, SUPER_COLUMNS)
        value += (-m if TWO_LEVEL else m)[:, None]
    value = tl.where(inside[:, None], value, float("nan"))  # a row that is not there fails, and nothing beside it
    at = out + i.to(tl.int64)[:, None] * out_stride + group * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=(i < count)[:, None])


def dequantize(chip: Chip, weight: Packed[Tensor], *, out: Tensor, ids: Tensor | None = None) -> None:
    """out [rows, columns] = the matrix, or its rows by ids [rows], rounded to out's dtype; rows of out may lie apart.

    An id outside the matrix gives a row of NaN.
    """
    tile = tiles.choose(NAME, chip)
    count = out.shape[0]
    grid = (weight.columns // weight.layout.group, cdiv(count, tile.sizes["BLOCK"]))
    _dequantize[grid](
        *weight.pointers(), weight.words if ids is None else ids, out, count, weight.rows, out.stride(0),
        **layout_constants(weight.layout), PICKED=ids is not None, **tile.launch(),
    )  # fmt: skip


def cost(weight: Packed[Tensor], rows: int, dtype: torch.dtype) -> tuple[int, int]:
    """(FLOPs, bytes) of widening so many rows."""
    values = rows * weight.columns
    return 2 * values, rows * weight.nbytes // weight.rows + values * dtype.itemsize


def compilations(chip: Chip) -> Iterator[Compilation]:
    """Every format to bf16, and picked rows to float32."""
    tile = tiles.choose(NAME, chip)
    for name, layout in LAYOUTS.items():
        scale = "i8" if layout.two_level else "f16"
        for picked in (False, True):
            types = pointers(
                words="i32", high="i32", scale=scale, minimum=scale if layout.has_minimum else "i32",
                super_scale="f16" if layout.two_level else "i32",
                super_minimum="f16" if layout.two_level and layout.has_minimum else "i32",
                ids="i32", out="f32" if picked else "bf16",
            )  # fmt: skip
            case, constants = f"{name}{' picked' if picked else ''}", {**layout_constants(layout), "PICKED": picked}
            yield Compilation(NAME, case, _dequantize, types, constants, tile, aligned=("rows", "out_stride"))
