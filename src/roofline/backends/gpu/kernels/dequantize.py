"""Quantised weights, of blocks or of 8-bit floats, widened: whole matrices for products with many rows, picked rows for
embeddings."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from roofline.backends.gpu import tiles
from roofline.backends.gpu.integers import cdiv
from roofline.backends.gpu.kernels.float8 import GROUP, Float8Weight, e4m3_values, factor
from roofline.backends.gpu.kernels.linear_quant import group_codes, group_scale, layout_constants
from roofline.backends.gpu.pack import LAYOUTS, Packed
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.hardware.chips.chips import Chip

NAME, FLOAT8_NAME = "dequantize", "widen_fp8"


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


def dequantize(chip: Chip, weight: Packed[Tensor] | Float8Weight, *, out: Tensor, ids: Tensor | None = None) -> None:
    """out [rows, columns] = the matrix, or its rows by ids [rows], rounded to out's dtype; rows of out may lie apart.

    An id outside the matrix gives a row of NaN.
    """
    count, picked = out.shape[0], ids is not None
    if isinstance(weight, Float8Weight):
        tile = tiles.choose(FLOAT8_NAME, chip)
        codes, by = weight.read_on(chip)
        _widen_fp8[(weight.columns // GROUP, cdiv(count, tile.sizes["BLOCK"]))](
            codes, weight.scale, ids if picked else weight.scale, out, count, weight.rows, weight.columns,
            out.stride(0), FACTOR=by, PICKED=picked, GROUP=GROUP, **tile.launch(),
        )  # fmt: skip
    else:
        tile = tiles.choose(NAME, chip)
        _dequantize[(weight.columns // weight.layout.group, cdiv(count, tile.sizes["BLOCK"]))](
            *weight.pointers(), ids if picked else weight.words, out, count, weight.rows, out.stride(0),
            **layout_constants(weight.layout), PICKED=picked, **tile.launch(),
        )  # fmt: skip


def cost(weight: Packed[Tensor] | Float8Weight, rows: int, dtype: torch.dtype) -> tuple[int, int]:
    """(FLOPs, bytes) of widening so many rows."""
    values = rows * weight.columns
    flops = values if isinstance(weight, Float8Weight) else 2 * values
    return flops, rows * weight.nbytes // weight.rows + values * dtype.itemsize


def compilations(chip: Chip) -> Iterator[Compilation]:
    """Every format, 8-bit floats last, to bf16, and picked rows to float32."""
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
            yield Compilation(
                kernel=NAME,
                case=case,
                function=_dequantize,
                signature=types,
                constants=constants,
                tile=tile,
                aligned=("rows", "out_stride"),
            )
    tile = tiles.choose(FLOAT8_NAME, chip)
    for picked in (False, True):
        case, ids, out = ("picked", "i32", "f32") if picked else ("whole", "f32", "bf16")
        types = pointers(codes=chip.fp8 or "u8", scale="f32", ids=ids, out=out)
        constants, aligned = {"FACTOR": factor(chip), "PICKED": picked, "GROUP": GROUP}, ("rows", "width", "out_stride")
        yield Compilation(
            kernel=FLOAT8_NAME,
            case=case,
            function=_widen_fp8,
            signature=types,
            constants=constants,
            tile=tile,
            aligned=aligned,
        )
