"""x @ w.T for quantised w and 17 to 127 rows of x on Hopper: codes become bf16 in registers, where wgmma reads them.

With few rows a product is scaled once a group (linear_whole.py), which takes as many multiplications as x has rows for
each 32 codes; from 17 rows on it is cheaper to scale the codes. They are rounded to bf16 as `dequantize` rounds them,
so that a result is that of the widened matrix, which would be written and read again. w is the first operand, which
wgmma takes from registers: a word holds what its lane multiplies (`order` in backends/gpu/pack.py), so codes go through
shared memory only as they lie in device memory. Method: Frantar et al. 2024 (Marlin), with the operands exchanged.

On an H200 a decoding step of 64 sequences of a 7B in Q4_0 takes 6.4 ms instead of 12.6 (benchmarks/records).
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from roofline.backends.gpu import tiles
from roofline.backends.gpu.integers import cdiv
from roofline.backends.gpu.kernels.linear_quant import cost, layout_constants
from roofline.backends.gpu.kernels.linear_whole import code_pairs
from roofline.backends.gpu.pack import LAYOUTS, SUPER, KernelLayout, Packed
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.hardware.chips.chips import Chip

__all__ = ["NAME", "compilations", "cost", "linear_unpacked", "takes_unpacked"]

NAME = "linear_unpacked"
COLUMN_TILE = 64  # a multiple of BLOCK_N in every tile
ROW_BUCKETS = (32, 64, 128)  # rows of x that a tile takes
_BASE_BITS = 0x4300  # 128 in bf16, whose mantissa takes codes of up to 7 bits


@triton.jit
def _scales(
    plane, upper, first, start, columns, C: tl.constexpr, N: tl.constexpr, EACH: tl.constexpr, TWO_LEVEL: tl.constexpr
):
    """Scales (or minima) of C chunks from `first` on, float32 [C, N, 1, EACH, 1]; C divides the 8 chunks of a block."""
    group = EACH * first + tl.arange(0, EACH * C)
    if TWO_LEVEL:  # bytes by fours and halves by twos: less than 4 bytes cannot be copied ahead
        word: tl.constexpr = tl.pointer_type(tl.int32)
        four = start // 4 + tl.arange(0, N // 4)
        packed = tl.load(plane.to(word, bitcast=True) + group[:, None] * (columns // 4) + four[None, :])
        signed = tl.reshape((packed[:, :, None] << (24 - 8 * tl.arange(0, 4))) >> 24, (EACH * C, N)).to(tl.float32)
        two = first // 8 * (columns // 2) + start // 2 + tl.arange(0, N // 2)
        packed = tl.load(upper.to(word, bitcast=True) + two[None, :])
        halves = tl.reshape((packed[:, :, None] >> (16 * tl.arange(0, 2))).to(tl.int16), (1, N))
        scales = signed * halves.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        scales = tl.load(plane + group[:, None] * columns + start + tl.arange(0, N)[None, :]).to(tl.float32)
    if EACH == 1:
        return scales[:, :, None, None, None]
    return tl.permute(tl.reshape(scales, (C, EACH, N, 1, 1)), (0, 2, 3, 1, 4))


@triton.jit(do_not_specialize=["rows", "chunks", "base"])
def _linear_unpacked(
    x, words, high, scale, minimum, super_scale, super_minimum, bias, out,
    rows, columns, chunks, stride, out_stride, base,
    GROUP: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, TWO_LEVEL: tl.constexpr,
    HAS_MINIMUM: tl.constexpr, SUPER_COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = 32 // GROUP
    SHAPE: tl.constexpr = (CHUNKS, BLOCK_N, 4, 2, 2)  # [chunk, row of w, lane, half of the chunk, pair]
    start = tl.program_id(0) * BLOCK_N
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    chunk, in_x = tl.arange(0, CHUNKS), (row < rows)[:, None]
    # One dimension for rows of w and words: lanes that follow one another copy what lies side by side.
    w_at = words + chunk[:, None].to(tl.int64) * columns * 4 + (start * 4 + tl.arange(0, 4 * BLOCK_N))[None, :]
    x_at = x + row[:, None].to(tl.int64) * stride + tl.arange(0, 32 * CHUNKS)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in tl.range(0, chunks, CHUNKS, num_stages=STAGES):
        first = tl.cast(first, tl.int32)
        packed = tl.reshape(tl.load(w_at + first.to(tl.int64) * columns * 4), (CHUNKS, BLOCK_N, 4))
        upper = packed
        if BITS > 4:
            at = high + (EACH * (first + chunk)[:, None]) * columns + start + tl.arange(0, BLOCK_N)[None, :]
            upper = tl.load(at)
            if BITS == 6:
                upper = tl.join(upper, tl.load(at + columns))
        s = _scales(scale, super_scale, first, start, columns, CHUNKS, BLOCK_N, EACH, TWO_LEVEL)
        offset = s * -(128.0 + ZERO)
        if HAS_MINIMUM:
            m = _scales(minimum, super_minimum, first, start, columns, CHUNKS, BLOCK_N, EACH, TWO_LEVEL)
            offset += -m if TWO_LEVEL else m
        pairs = tl.reshape(code_pairs(packed, upper, base, BITS, 0), SHAPE)
        s, offset = tl.broadcast_to(s, SHAPE), tl.broadcast_to(offset, SHAPE)
        # 128 + code is exact in bf16, and so is its float32, whose upper half it is.
        low = tl.fma((pairs << 16).to(tl.float32, bitcast=True), s, offset).to(tl.bfloat16)
        top = tl.fma((pairs & -65536).to(tl.float32, bitcast=True), s, offset).to(tl.bfloat16)
        values = tl.permute(tl.join(low, top), (1, 0, 3, 2, 4, 5))  # in the order of columns
        part = tl.load(x_at + first * 32, mask=in_x, other=0.0)
        acc = tl.dot(tl.reshape(values, (BLOCK_N, 32 * CHUNKS)), tl.trans(part), acc)
    acc = tl.trans(acc)
    n = start + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        acc += tl.load(bias + n).to(tl.float32)[None, :]
    tl.store(out + row[:, None].to(tl.int64) * out_stride + n[None, :], acc.to(out.dtype.element_ty), mask=in_x)


def takes_unpacked(chip: Chip, layout: KernelLayout, dtype: torch.dtype, columns: int, width: int) -> bool:
    """Return whether a matrix [columns, width] of a layout and x of a dtype have this product on a chip."""
    fits = columns % COLUMN_TILE == 0 and width % SUPER == 0
    return chip.name == "sm_90" and layout.bits < 8 and dtype == torch.bfloat16 and fits


def linear_unpacked(chip: Chip, x: Tensor, weight: Packed[Tensor], bias: Tensor | None, out: Tensor) -> None:
    """Write x @ w.T + bias to out; see `takes_unpacked` for which.

    x bf16 [rows, columns], rows `stride(0)` apart; out [rows, w rows], rows `stride(0)` apart.
    """
    rows, width = x.shape
    tile = _tile(chip, weight.layout, rows)
    _linear_unpacked[weight.rows // tile.sizes["BLOCK_N"], cdiv(rows, tile.sizes["BLOCK_M"])](
        x, *weight.pointers(), x if bias is None else bias, out,
        rows, weight.rows, width // 32, x.stride(0), out.stride(0), _BASE_BITS << 16 | _BASE_BITS,
        HAS_BIAS=bias is not None, STAGES=tile.stages, **layout_constants(weight.layout), **tile.launch(),
    )  # fmt: skip


def _tile(chip: Chip, layout: KernelLayout, rows: int) -> tiles.Tile:
    bucket = next((bucket for bucket in ROW_BUCKETS if rows <= bucket), ROW_BUCKETS[-1])
    return tiles.choose(NAME, chip, rows=bucket, bits=layout.bits)


def compilations(chip: Chip) -> Iterator[Compilation]:
    """Every format with every tile, where the chip has the product."""
    for name, layout in LAYOUTS.items():
        if not takes_unpacked(chip, layout, torch.bfloat16, COLUMN_TILE, SUPER):
            continue
        scale = "i8" if layout.two_level else "f16"
        for rows in ROW_BUCKETS:
            tile = _tile(chip, layout, rows)
            types = pointers(
                x="bf16", words="i32", high="i32", scale=scale,
                minimum=scale if layout.has_minimum else "i32", super_scale="f16" if layout.two_level else "i32",
                super_minimum="f16" if layout.two_level and layout.has_minimum else "i32", bias="bf16", out="bf16",
            )  # fmt: skip
            yield Compilation(
                kernel=NAME,
                case=f"{name} {rows}",
                function=_linear_unpacked,
                signature=types,
                constants={"HAS_BIAS": False, "STAGES": tile.stages, **layout_constants(layout)},
                tile=tile,
                dots=True,
                aligned=("columns", "stride", "out_stride"),
            )
