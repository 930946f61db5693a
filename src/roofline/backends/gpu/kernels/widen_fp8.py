"""Weights in 8-bit floats widened: whole matrices for products with many rows, picked rows for embeddings."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from roofline.backends.gpu import tiles
from roofline.backends.gpu.integers import cdiv
from roofline.backends.gpu.kernels.float8 import GROUP, Float8Weight, e4m3_values, factor
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.hardware.chips.chips import Chip

NAME = "widen_fp8"


@triton.jit(do_not_specialize=["count"])
def _widen_fp8(
    codes, scale, ids, out, count, rows, width, out_stride,
    FACTOR: tl.constexpr, PICKED: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = i
    if PICKED:
        row = tl.load(ids + i, mask=i < count, other=-1).to(tl.int32)
    inside = (i < count) & (row >= 0) & (row < rows)
    k = group * GROUP + tl.arange(0, GROUP)
    block = tl.load(codes + row.to(tl.int64)[:, None] * width + k[None, :], mask=inside[:, None], other=0.0)
    s = tl.load(scale + group * rows + row, mask=inside, other=float("nan")) * FACTOR  # a row that is not there fails
    value = e4m3_values(block, tl.float32) * s[:, None]
    at = out + i.to(tl.int64)[:, None] * out_stride + k[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=(i < count)[:, None])


def widen_fp8(chip: Chip, weight: Float8Weight, *, out: Tensor, ids: Tensor | None = None) -> None:
    """out [rows, columns] = the matrix, or its rows by ids [rows], rounded to out's dtype; rows of out may lie apart.

    An id outside the matrix gives a row of NaN.
    """
    tile = tiles.choose(NAME, chip)
    codes, by = weight.read_on(chip)
    count = out.shape[0]
    grid = (weight.columns // GROUP, cdiv(count, tile.sizes["BLOCK"]))
    _widen_fp8[grid](
        codes, weight.scale, weight.scale if ids is None else ids, out, count, weight.rows, weight.columns,
        out.stride(0), FACTOR=by, PICKED=ids is not None, GROUP=GROUP, **tile.launch(),
    )  # fmt: skip


def cost(weight: Float8Weight, rows: int, dtype: torch.dtype) -> tuple[int, int]:
    """(FLOPs, bytes) of widening so many rows."""
    values = rows * weight.columns
    return values, rows * weight.nbytes // weight.rows + values * dtype.itemsize


def compilations(chip: Chip) -> Iterator[Compilation]:
    """All of a matrix to bf16, and picked rows to float32."""
    tile = tiles.choose(NAME, chip)
    for picked in (False, True):
        case, ids, out = ("picked", "i32", "f32") if picked else ("whole", "f32", "bf16")
        types = pointers(codes=chip.fp8 or "u8", scale="f32", ids=ids, out=out)
        constants, aligned = {"FACTOR": factor(chip), "PICKED": picked, "GROUP": GROUP}, ("rows", "width", "out_stride")
        yield Compilation(NAME, case, _widen_fp8, types, constants, tile, aligned=aligned)
