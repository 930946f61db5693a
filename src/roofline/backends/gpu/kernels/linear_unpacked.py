"""x @ w.T for quantised w on Hopper: codes become bf16 in registers, where wgmma reads them.

With few rows a product is scaled once a group (linear_whole.py), which takes as many multiplications as x has rows for
each 32 codes; from 9 or 17 rows on it is cheaper to scale the codes. They are rounded to bf16 as `dequantize` rounds
them, so that a result is that of the widened matrix, which would be written and read again. w is the first operand,
which wgmma takes from registers: a word holds what its lane multiplies (`order` in backends/gpu/pack.py), so codes go
through shared memory only as they lie in device memory. Method: Frantar et al. 2024 (Marlin), with the operands
exchanged. A row's sum is cut into parts where a matrix alone has too few programs for a large chip (split K, Osama et
al. 2023), always into the same, so that its bits do not depend on how many rows there are: exact products of any
number of rows are made here too.

On an H200 a decoding step of 64 sequences of a 7B takes 4.7 ms in Q4_0 and 5.4 in Q4_K (benchmarks/records).
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

__all__ = ["ARRIVED", "NAME", "compilations", "cost", "linear_unpacked", "sums_bytes", "takes_unpacked"]

NAME = "linear_unpacked"
COLUMN_TILE = 64  # a multiple of BLOCK_N in every tile
ROW_BUCKETS = (16, 32, 64, 128)  # rows of x that a tile takes
PROGRAMS = 400  # three for each of an H200's 132 multiprocessors
ARRIVED = PROGRAMS // 2  # counters: one for each tile of columns that has parts
_BASE_BITS = 0x4300  # 128 in bf16, whose mantissa takes codes of up to 7 bits


@triton.jit
def _scale_words(
    plane, upper, first, start, columns, C: tl.constexpr, N: tl.constexpr, EACH: tl.constexpr, TWO_LEVEL: tl.constexpr
):
    """Return scales (or minima) of C chunks from `first` on as they lie in memory, and their upper scales.

    Two levels: int32 [EACH * C, N / 4] and [1, N / 2], else float16 [EACH * C, N] twice.
    """
    group = EACH * first + tl.arange(0, EACH * C)
    if TWO_LEVEL:
        word: tl.constexpr = tl.pointer_type(tl.int32)
        four = start // 4 + tl.arange(0, N // 4)
        packed = tl.load(plane.to(word, bitcast=True) + group[:, None] * (columns // 4) + four[None, :])
        two = first // 8 * (columns // 2) + start // 2 + tl.arange(0, N // 2)
        return packed, tl.load(upper.to(word, bitcast=True) + two[None, :])
    else:
        scales = tl.load(plane + group[:, None] * columns + start + tl.arange(0, N)[None, :])
        return scales, scales


@triton.jit
def _all_words(
    scale, super_scale, minimum, super_minimum, first, start, columns,
    C: tl.constexpr, N: tl.constexpr, EACH: tl.constexpr, TWO_LEVEL: tl.constexpr, HAS_MINIMUM: tl.constexpr,
):  # fmt: skip
    """Return `_scale_words` of the scales and of the minima; where there are no minima, those of the scales again."""
    s, s_up = _scale_words(scale, super_scale, first, start, columns, C, N, EACH, TWO_LEVEL)
    m, m_up = s, s_up
    if HAS_MINIMUM:
        m, m_up = _scale_words(minimum, super_minimum, first, start, columns, C, N, EACH, TWO_LEVEL)
    return s, s_up, m, m_up


@triton.jit
def _scales(packed, upper, C: tl.constexpr, N: tl.constexpr, EACH: tl.constexpr, TWO_LEVEL: tl.constexpr):
    """Return what `_scale_words` has as float32 [C, N, 1, EACH, 1]; C divides the 8 chunks of a block."""
    if TWO_LEVEL:
        signed = tl.reshape((packed[:, :, None] << (24 - 8 * tl.arange(0, 4))) >> 24, (EACH * C, N)).to(tl.float32)
        halves = tl.reshape((upper[:, :, None] >> (16 * tl.arange(0, 2))).to(tl.int16), (1, N))
        scales = signed * halves.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        scales = packed.to(tl.float32)
    if EACH == 1:
        return scales[:, :, None, None, None]
    return tl.permute(tl.reshape(scales, (C, EACH, N, 1, 1)), (0, 2, 3, 1, 4))


@triton.jit
def _part_product(
    x_at, in_x, w_at, high, scale, minimum, super_scale, super_minimum,
    begin, end, start, columns, base,
    GROUP: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, TWO_LEVEL: tl.constexpr, HAS_MINIMUM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return float32 [BLOCK_N, BLOCK_M]: the sum over chunks from `begin` up to `end`, a multiple of CHUNKS of them."""
    EACH: tl.constexpr = 32 // GROUP
    SHAPE: tl.constexpr = (CHUNKS, BLOCK_N, 4, 2, 2)  # [chunk, row of w, lane, half of the chunk, pair]
    chunk = tl.arange(0, CHUNKS)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if TWO_LEVEL:
        # Words of two levels are loaded an iteration ahead into registers: Triton 3.6 copies them to shared memory
        # once for every lane that reads them, 384 copies in the code instead of 48.
        s_next, s_up_next, m_next, m_up_next = _all_words(
            scale, super_scale, minimum, super_minimum, begin, start, columns, CHUNKS, BLOCK_N, EACH, True, HAS_MINIMUM
        )  # fmt: skip
    for first in tl.range(begin, end, CHUNKS, num_stages=STAGES):
        first = tl.cast(first, tl.int32)
        packed = tl.reshape(tl.load(w_at + first.to(tl.int64) * columns * 4), (CHUNKS, BLOCK_N, 4))
        upper = packed
        if BITS > 4:
            at = high + (EACH * (first + chunk)[:, None]) * columns + start + tl.arange(0, BLOCK_N)[None, :]
            upper = tl.load(at)
            if BITS == 6:
                upper = tl.join(upper, tl.load(at + columns))
        if TWO_LEVEL:
            s_words, s_up, m_words, m_up = s_next, s_up_next, m_next, m_up_next
            ahead = tl.minimum(first + CHUNKS, end - CHUNKS)
            s_next, s_up_next, m_next, m_up_next = _all_words(
                scale, super_scale, minimum, super_minimum, ahead, start, columns,
                CHUNKS, BLOCK_N, EACH, True, HAS_MINIMUM,
            )  # fmt: skip
        else:
            s_words, s_up, m_words, m_up = _all_words(
                scale, super_scale, minimum, super_minimum, first, start, columns,
                CHUNKS, BLOCK_N, EACH, False, HAS_MINIMUM,
            )  # fmt: skip
        s = _scales(s_words, s_up, CHUNKS, BLOCK_N, EACH, TWO_LEVEL)
        offset = s * -(128.0 + ZERO)
        if HAS_MINIMUM:
            m = _scales(m_words, m_up, CHUNKS, BLOCK_N, EACH, TWO_LEVEL)
            offset += -m if TWO_LEVEL else m
        pairs = tl.reshape(code_pairs(packed, upper, base, BITS, 0), SHAPE)
        s, offset = tl.broadcast_to(s, SHAPE), tl.broadcast_to(offset, SHAPE)
        # 128 + code is exact in bf16, and so is its float32, whose upper half it is.
        low = tl.fma((pairs << 16).to(tl.float32, bitcast=True), s, offset).to(tl.bfloat16)
        top = tl.fma((pairs & -65536).to(tl.float32, bitcast=True), s, offset).to(tl.bfloat16)
        values = tl.permute(tl.join(low, top), (1, 0, 3, 2, 4, 5))  # in the order of columns
        part = tl.load(x_at + first * 32, mask=in_x, other=0.0)
        acc = tl.dot(tl.reshape(values, (BLOCK_N, 32 * CHUNKS)), tl.trans(part), acc)
    return acc


@triton.jit
def _finish(added, bias, out, row, n, out_stride, in_x, HAS_BIAS: tl.constexpr):
    """Write sums [rows, columns] with their bias."""
    if HAS_BIAS:
        added += tl.load(bias + n).to(tl.float32)[None, :]
    tl.store(out + row[:, None].to(tl.int64) * out_stride + n[None, :], added.to(out.dtype.element_ty), mask=in_x)


@triton.jit(do_not_specialize=["rows", "chunks", "part_chunks", "base"])
def _linear_unpacked(
    x, words, high, scale, minimum, super_scale, super_minimum, bias, out, sums, arrived,
    rows, columns, chunks, part_chunks, stride, out_stride, base,
    GROUP: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, TWO_LEVEL: tl.constexpr,
    HAS_MINIMUM: tl.constexpr, SUPER_COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr, PARTS: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """PARTS: of a row's sum, added in ascending order; SHARED: each part has a program, and the last to arrive adds."""
    start = tl.program_id(0) * BLOCK_N
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = start + tl.arange(0, BLOCK_N)
    chunk, in_x = tl.arange(0, CHUNKS), (row < rows)[:, None]
    # One dimension for rows of w and words: lanes that follow one another copy what lies side by side.
    w_at = words + chunk[:, None].to(tl.int64) * columns * 4 + (start * 4 + tl.arange(0, 4 * BLOCK_N))[None, :]
    x_at = x + row[:, None].to(tl.int64) * stride + tl.arange(0, 32 * CHUNKS)[None, :]
    begin = tl.program_id(2) * part_chunks
    total = _part_product(
        x_at, in_x, w_at, high, scale, minimum, super_scale, super_minimum,
        begin, tl.minimum(begin + part_chunks, chunks), start, columns, base,
        GROUP, BITS, ZERO, TWO_LEVEL, HAS_MINIMUM, BLOCK_M, BLOCK_N, CHUNKS, STAGES,
    )  # fmt: skip
    if SHARED:
        at = sums + (row[:, None] * columns + n[None, :])  # below 2^31: of few rows
        tl.store(at + tl.program_id(2) * rows * columns, tl.trans(total), mask=in_x)
        tl.debug_barrier()  # every lane's sums are written before one lane says so
        counter = arrived + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
            tl.store(counter, 0)  # for the next launch
            added = tl.load(at, mask=in_x, other=0.0, cache_modifier=".cg")
            for i in range(1, PARTS):  # not unrolled: all parts at once do not fit registers
                added += tl.load(at + i * rows * columns, mask=in_x, other=0.0, cache_modifier=".cg")
            _finish(added, bias, out, row, n, out_stride, in_x, HAS_BIAS)
    else:
        for i in tl.static_range(1, PARTS):
            total += _part_product(
                x_at, in_x, w_at, high, scale, minimum, super_scale, super_minimum,
                i * part_chunks, tl.minimum((i + 1) * part_chunks, chunks), start, columns, base,
                GROUP, BITS, ZERO, TWO_LEVEL, HAS_MINIMUM, BLOCK_M, BLOCK_N, CHUNKS, STAGES,
            )  # fmt: skip
        _finish(tl.trans(total), bias, out, row, n, out_stride, in_x, HAS_BIAS)


def takes_unpacked(chip: Chip, layout: KernelLayout, dtype: torch.dtype, columns: int, width: int) -> bool:
    """Return whether a matrix [columns, width] of a layout and x of a dtype have this product on a chip."""
    fits = columns % COLUMN_TILE == 0 and width % SUPER == 0
    return chip.name == "sm_90" and layout.bits < 8 and dtype == torch.bfloat16 and fits


def parts_of(columns: int, width: int) -> int:
    """Return into how many parts a row's sum is cut: as many as make three programs for a multiprocessor.

    It depends on the matrix alone, so that a row's bits do not depend on how many rows there are.
    """
    programs, blocks = columns // COLUMN_TILE, width // SUPER
    return next((n for n in (4, 2) if n * programs <= PROGRAMS and (n - 1) * cdiv(blocks, n) < blocks), 1)


def sums_bytes(rows: int, columns: int, width: int) -> int:
    """Return how many bytes of scratch the parts' sums take."""
    parts = parts_of(columns, width)
    return 4 * parts * min(rows, ROW_BUCKETS[-1]) * columns if parts > 1 else 0


def linear_unpacked(
    chip: Chip, x: Tensor, weight: Packed[Tensor], bias: Tensor | None, out: Tensor, *, sums: Tensor, arrived: Tensor
) -> None:  # fmt: skip
    """Write x @ w.T + bias to out; see `takes_unpacked` for which.

    x bf16 [rows, columns], rows `stride(0)` apart; out [rows, w rows], rows `stride(0)` apart. sums: float32 scratch
    of `sums_bytes`; arrived: int32 [ARRIVED], zeros, and zeros again when the launch is done: for one stream alone. A
    row's bits do not depend on the other rows, nor on how many there are.
    """
    rows, width = x.shape
    tile = _tile(chip, weight.layout, rows)
    parts, row_tiles = parts_of(weight.rows, width), cdiv(rows, tile.sizes["BLOCK_M"])
    shared = parts > 1 and row_tiles == 1  # with more rows there are programs enough, and sums would be large
    _linear_unpacked[weight.rows // tile.sizes["BLOCK_N"], row_tiles, parts if shared else 1](
        x, *weight.pointers(), x if bias is None else bias, out, sums, arrived,
        rows, weight.rows, width // 32, cdiv(width // SUPER, parts) * (SUPER // 32), x.stride(0), out.stride(0),
        _BASE_BITS << 16 | _BASE_BITS,
        HAS_BIAS=bias is not None, PARTS=parts, SHARED=shared, STAGES=tile.stages, **layout_constants(weight.layout),
        **tile.launch(),
    )  # fmt: skip


def _tile(chip: Chip, layout: KernelLayout, rows: int) -> tiles.Tile:
    bucket = next((bucket for bucket in ROW_BUCKETS if rows <= bucket), ROW_BUCKETS[-1])
    return tiles.choose(NAME, chip, rows=bucket, bits=layout.bits)


def compilations(chip: Chip) -> Iterator[Compilation]:
    """Every format with every tile, in one part and in four, where the chip has the product."""
    for name, layout in LAYOUTS.items():
        if not takes_unpacked(chip, layout, torch.bfloat16, COLUMN_TILE, SUPER):
            continue
        scale = "i8" if layout.two_level else "f16"
        for rows, parts in ((rows, parts) for rows in ROW_BUCKETS for parts in (1, 4)):
            tile = _tile(chip, layout, rows)
            types = pointers(
                x="bf16", words="i32", high="i32", scale=scale,
                minimum=scale if layout.has_minimum else "i32", super_scale="f16" if layout.two_level else "i32",
                super_minimum="f16" if layout.two_level and layout.has_minimum else "i32", bias="bf16", out="bf16",
                sums="f32", arrived="i32",
            )  # fmt: skip
            fixed = {"HAS_BIAS": False, "PARTS": parts, "SHARED": parts > 1, "STAGES": tile.stages}
            yield Compilation(
                kernel=NAME,
                case=f"{name} {rows}{' in parts' * (parts > 1)}",
                function=_linear_unpacked,
                signature=types,
                constants=fixed | layout_constants(layout),
                tile=tile,
                dots=True,
                aligned=("columns", "stride", "out_stride"),
            )
