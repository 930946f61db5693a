"""x @ w.T for quantised w as backends/gpu/pack.py lays it out, x in 16 bits, sums in float32.

A group of codes becomes floats by setting their bits into the mantissa of a power of two: no integer is converted. The
group's product is one tl.dot, scaled once in float32. Formats with minima need each group's sum of x anyway, a product
with ones: what the power of two (BASE) added goes with it. Methods: weights unpacked in registers, Frantar et al. 2024
(Marlin); codes as mantissas, Kim et al. 2022.

Matrices of 4 to 6 bits that tiles divide have a loop of their own on NVIDIA chips (linear_whole.py). The loop here is
for all others: unpacking spreads a word over lanes, so a tile goes through shared memory for each group.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from roofline.backends.gpu import tiles
from roofline.backends.gpu.integers import cdiv
from roofline.backends.gpu.kernels.linear_whole import whole_product
from roofline.backends.gpu.pack import LAYOUTS, SUPER, KernelLayout, Packed
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.hardware.chips.chips import Chip

NAME = "linear_quant"
WHOLE_ROWS = 64  # a multiple of every BLOCK_N of tiles for whole matrices
# dtype of x -> the power of two whose mantissa takes the codes, as bits and as a number, and where codes begin in it.
_BASES = {torch.bfloat16: (0x4300, 128, 0), torch.float16: (0x5400, 64, 4), torch.float32: (0, 0, 0)}


@triton.jit
def group_codes(words, high, group, column, columns, inside, BITS: tl.constexpr, GROUP: tl.constexpr):
    """The codes of one group for a tile's rows, int32 [n, GROUP]; column: the rows of w, int [n]."""
    n: tl.constexpr = column.shape[0]
    at = group.to(tl.int64) * columns + column
    if BITS == 8:
        packed = tl.load(words + at[:, None] * 8 + tl.arange(0, 8)[None, :], mask=inside[:, None], other=0)
        codes = tl.reshape((packed[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]) & 255, (n, GROUP))
    else:  # see `order` in pack.py
        EACH: tl.constexpr = 32 // GROUP
        chunk = (group // EACH).to(tl.int64) * columns + column
        packed = tl.load(words + chunk[:, None] * 4 + tl.arange(0, 4)[None, :], mask=inside[:, None], other=0)
        code = tl.arange(0, 4)
        shifts = code // 2 * 4 + code % 2 * 16
        if EACH == 1:
            shifts = (8 * tl.arange(0, 2))[:, None, None] + shifts[None, None, :]
            codes = tl.reshape((packed[:, None, :, None] >> shifts[None, :, :, :]) & 15, (n, GROUP))
        else:
            codes = tl.reshape((packed[:, :, None] >> (shifts + 8 * (group % EACH))[None, None, :]) & 15, (n, GROUP))
    if BITS == 5 or BITS == 6:
        k = tl.arange(0, GROUP)
        place = k // 4 % 4 * (GROUP // 8) + k // 16 * 2 + k // 2 % 2
        shifts = (BITS - 4) * place + 16 * (k % 2)
        upper = tl.load(high + at, mask=inside, other=0)
        codes |= ((upper[:, None] >> shifts[None, :]) & ((1 << (BITS - 4)) - 1)) << 4
    return codes


@triton.jit
def group_scale(
    scale, upper, group, column, columns, inside, GROUP: tl.constexpr, TWO_LEVEL: tl.constexpr,
    SUPER_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Scales (or minima) of one group for a tile's rows, float32 [n]."""
    s = tl.load(scale + group * columns + column, mask=inside, other=0.0).to(tl.float32)
    if TWO_LEVEL:
        at = (group * GROUP // SUPER_COLUMNS) * columns + column
        s *= tl.load(upper + at, mask=inside, other=0.0).to(tl.float32)
    return s


@triton.jit
def _byte_scale(
    scale, upper, group, start, column, columns, inside, fours, GROUP: tl.constexpr, SUPER_COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`group_scale` of two levels for columns from `start` on, bytes by fours: less cannot be copied ahead.

    fours: bool [BLOCK_N / 4], like `inside`. start and columns are multiples of 4.
    """
    at = (group * columns + start) // 4 + tl.arange(0, BLOCK_N // 4)
    packed = tl.load(scale.to(tl.pointer_type(tl.int32), bitcast=True) + at, mask=fours, other=0)
    signed = tl.reshape((packed[:, None] << (24 - 8 * tl.arange(0, 4))[None, :]) >> 24, (BLOCK_N,))
    at = (group * GROUP // SUPER_COLUMNS) * columns + column
    return signed.to(tl.float32) * tl.load(upper + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _product(
    x, words, high, scale, minimum, super_scale, super_minimum,
    row, start, results, rows, columns, groups, stride,
    GROUP: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, TWO_LEVEL: tl.constexpr,
    HAS_MINIMUM: tl.constexpr, BASE_BITS: tl.constexpr, BASE: tl.constexpr, BASE_SHIFT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr, SUPER_COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, FOURS: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_M, BLOCK_N]. row: int [BLOCK_M] of the result; start: its first column, results: how many follow;
    columns: of all of w; FOURS: bytes of scales may be loaded by fours."""
    column = start + tl.arange(0, BLOCK_N)
    in_m, in_n = row < rows, tl.arange(0, BLOCK_N) < results
    x_row = x + row.to(tl.int64)[:, None] * stride + tl.arange(0, GROUP)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # Stages said here are for every load of the loop. Left to the compiler, scales are loaded when they are needed.
    for first in tl.range(0, groups, UNROLL, num_stages=STAGES):
        for u in tl.static_range(UNROLL):
            group = tl.cast(first + u, tl.int32)
            live = group < groups
            part = tl.load(x_row + group * GROUP, mask=in_m[:, None] & live, other=0.0)
            inside = in_n & live
            codes = group_codes(words, high, group, column, columns, inside, BITS, GROUP)
            if HAS_MINIMUM and BASE != 0:
                values = ((codes << BASE_SHIFT) | BASE_BITS).to(tl.int16).to(part.dtype, bitcast=True)
            else:
                # 2^23 + code as a float's bits, less 2^23 + zero: exact, and no integer is converted.
                exact = (codes | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)
                if part.dtype == tl.bfloat16:  # its lower bits are 0: cut, not rounded
                    values = (exact.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
                else:
                    values = exact.to(part.dtype)
            product = tl.dot(part, tl.trans(values), input_precision="ieee")
            if FOURS:
                fours = (4 * tl.arange(0, BLOCK_N // 4) < results) & live
                s = _byte_scale(
                    scale, super_scale, group, start, column, columns, inside, fours, GROUP, SUPER_COLUMNS, BLOCK_N
                )  # fmt: skip
            else:
                s = group_scale(scale, super_scale, group, column, columns, inside, GROUP, TWO_LEVEL, SUPER_COLUMNS)
            acc = tl.fma(product, tl.broadcast_to(s[None, :], (BLOCK_M, BLOCK_N)), acc)
            if HAS_MINIMUM:
                if FOURS:
                    m = _byte_scale(
                        minimum, super_minimum, group, start, column, columns, inside, fours, GROUP, SUPER_COLUMNS,
                        BLOCK_N,
                    )  # fmt: skip
                else:
                    m = group_scale(
                        minimum, super_minimum, group, column, columns, inside, GROUP, TWO_LEVEL, SUPER_COLUMNS
                    )  # fmt: skip
                shift = (-m if TWO_LEVEL else m) - s * BASE
                # The sum of the group of x, in every column: matrix units wait for memory here anyway.
                ones = tl.full((GROUP, BLOCK_N), 1.0, tl.float32).to(part.dtype)
                total = tl.dot(part, ones, input_precision="ieee")
                acc = tl.fma(total, tl.broadcast_to(shift[None, :], (BLOCK_M, BLOCK_N)), acc)
    return acc


@triton.jit(do_not_specialize=["rows", "groups", "base"])
def _linear_quant(
    x, words, high, scale, minimum, super_scale, super_minimum, bias, out,
    rows, columns, groups, stride, out_stride, base,
    GROUP: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, TWO_LEVEL: tl.constexpr,
    HAS_MINIMUM: tl.constexpr, BASE_BITS: tl.constexpr, BASE: tl.constexpr, BASE_SHIFT: tl.constexpr,
    SUPER_COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr, FOURS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = BLOCK_N // 2 if WHOLE and GATED else BLOCK_N  # results of a program
    start = tl.program_id(0) * WIDTH
    n = start + tl.arange(0, WIDTH)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    results = columns // 2 if GATED else columns
    in_n = n < results
    if WHOLE:
        acc = whole_product(
            x, words, high, scale, minimum, super_scale, super_minimum,
            row, start, results, rows, columns, groups // (32 // GROUP), stride, base,
            GROUP, BITS, ZERO, TWO_LEVEL, HAS_MINIMUM, BASE, BASE_SHIFT, BLOCK_M, BLOCK_N, UNROLL, WIDTH, STAGES,
        )  # fmt: skip
    else:
        acc = _product(
            x, words, high, scale, minimum, super_scale, super_minimum,
            row, start, results - start, rows, columns, groups, stride,
            GROUP, BITS, ZERO, TWO_LEVEL, HAS_MINIMUM, BASE_BITS, BASE, BASE_SHIFT,
            BLOCK_M, BLOCK_N, UNROLL, SUPER_COLUMNS, STAGES, FOURS,
        )  # fmt: skip
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if WHOLE:
            acc, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, WIDTH)), (0, 2, 1)))
        else:
            up = _product(
                x, words, high, scale, minimum, super_scale, super_minimum,
                row, start + results, results - start, rows, columns, groups, stride,
                GROUP, BITS, ZERO, TWO_LEVEL, HAS_MINIMUM, BASE_BITS, BASE, BASE_SHIFT,
                BLOCK_M, BLOCK_N, UNROLL, SUPER_COLUMNS, STAGES, FOURS,
            )  # fmt: skip
        # The unfused pair rounds gate and up on their way through memory.
        gate = acc.to(out.dtype.element_ty).to(tl.float32)
        up = up.to(out.dtype.element_ty).to(tl.float32)
        acc = gate / (1.0 + tl.exp(-gate)) * up
    at = out + row.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(row < rows)[:, None] & in_n[None, :])


def layout_constants(layout: KernelLayout) -> dict[str, object]:
    """The constants that a format gives every kernel that reads it."""
    return {
        "GROUP": layout.group,
        "BITS": layout.bits,
        "ZERO": layout.zero,
        "TWO_LEVEL": layout.two_level,
        "HAS_MINIMUM": layout.has_minimum,
        "SUPER_COLUMNS": SUPER,
    }


def constants(layout: KernelLayout, dtype: torch.dtype) -> dict[str, object]:
    """The constants that a format and x's dtype give the kernel."""
    base_bits, base, shift = _BASES[dtype]
    return layout_constants(layout) | {"BASE_BITS": base_bits, "BASE": base, "BASE_SHIFT": shift}


def regime(rows: int, exact: bool) -> str:
    """Which rows of tiles.toml serve: one tile for all row counts when results must not depend on them."""
    if exact:
        return "exact"
    return "decode" if rows <= 16 else "some" if rows <= 64 else "prefill"


def linear_quant(
    chip: Chip, x: Tensor, weight: Packed[Tensor], bias: Tensor | None, out: Tensor, *, gated: bool = False,
    exact: bool = False,
) -> None:  # fmt: skip
    """out = x @ w.T + bias, or silu(gate) * up of it where gate and up are the two halves of w's rows.

    x [rows, columns] in bf16, f16 or f32, rows `stride(0)` apart; out [rows, w rows, half of them when gated], rows
    `stride(0)` apart.
    """
    layout = weight.layout
    rows, width = x.shape
    columns = weight.rows
    is_whole = takes_whole(chip, layout, x.dtype, columns, width)
    tile = _tile(chip, layout, regime(rows, exact), rows, columns, is_whole)
    results = columns // 2 if gated else columns
    programs = cdiv(columns if is_whole else results, tile.sizes["BLOCK_N"])
    base = _BASES[x.dtype][0]
    _linear_quant[programs, cdiv(rows, tile.sizes["BLOCK_M"])](
        x, *weight.pointers(), x if bias is None else bias, out,
        rows, columns, width // layout.group, x.stride(0), out.stride(0), base << 16 | base,
        HAS_BIAS=bias is not None, GATED=gated, WHOLE=is_whole, **_pipeline(chip, tile, layout, results),
        **constants(layout, x.dtype), **tile.launch(),
    )  # fmt: skip


def takes_whole(chip: Chip, layout: KernelLayout, dtype: torch.dtype, columns: int, width: int) -> bool:
    """Whether a matrix has the loop of linear_whole.py: whatever tile is taken divides it."""
    form = layout.bits < 8 and dtype != torch.float32
    return chip.vendor == "nvidia" and form and columns % WHOLE_ROWS == 0 and width % SUPER == 0


def _tile(chip: Chip, layout: KernelLayout, regime: str, rows: int, columns: int, is_whole: bool) -> tiles.Tile:
    """few: up to 8 rows of x; narrow: wide tiles would be fewer programs than a large chip has multiprocessors."""
    return tiles.choose(
        NAME, chip, regime=regime, bits=layout.bits, whole=is_whole, few=rows <= 8, narrow=columns <= 4096
    )  # fmt: skip


def _pipeline(chip: Chip, tile: tiles.Tile, layout: KernelLayout, results: int) -> dict[str, object]:
    """How a loop's loads are begun ahead. STAGES: of all of them; None: of codes alone, where registers hold them."""
    nvidia = chip.vendor == "nvidia"
    return {"STAGES": tile.stages if nvidia else None, "FOURS": nvidia and layout.two_level and results % 4 == 0}


def cost(rows: int, weight: Packed[Tensor], itemsize: int = 2) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch: every array of the weight once, x once, the result once."""
    return 2 * rows * weight.rows * weight.columns, weight.nbytes + itemsize * rows * (weight.rows + weight.columns)


def compilations(chip: Chip) -> Iterator[Compilation]:
    """Every format in every regime, in bf16; 4 bits in f16 too, and gated; whole matrices where they have a loop."""
    for name, layout in LAYOUTS.items():
        for rows in ("decode", "some", "prefill", "exact"):
            yield _compilation(chip, name, rows, "bf16", gated=False)
        if takes_whole(chip, layout, torch.bfloat16, WHOLE_ROWS, SUPER):
            for rows in ("few", "decode", "some", "exact"):
                yield _compilation(chip, name, rows, "bf16", gated=False, is_whole=True)
            yield _compilation(chip, name, "few", "bf16", gated=False, is_whole=True, narrow=True)
    for rows in ("decode", "prefill"):
        yield _compilation(chip, "Q4_0", rows, "f16", gated=False)
        yield _compilation(chip, "Q4_K", rows, "bf16", gated=True)
    if takes_whole(chip, LAYOUTS["Q4_K"], torch.bfloat16, WHOLE_ROWS, SUPER):
        yield _compilation(chip, "Q4_0", "few", "f16", gated=False, is_whole=True)
        for rows in ("few", "decode", "some"):
            yield _compilation(chip, "Q4_K", rows, "bf16", gated=True, is_whole=True)


def _compilation(
    chip: Chip, name: str, rows: str, dtype: str, gated: bool, is_whole: bool = False, narrow: bool = False
) -> Compilation:
    """rows: a regime, or "few" for "decode" with few rows."""
    layout = LAYOUTS[name]
    order, count = ("decode", 1) if rows == "few" else (rows, 16)
    tile = _tile(chip, layout, order, count, 4096 if narrow else 8192, is_whole)
    scale = "i8" if layout.two_level else "f16"
    types = pointers(
        x=dtype, words="i32", high="i32", scale=scale,
        minimum=scale if layout.has_minimum else "i32", super_scale="f16" if layout.two_level else "i32",
        super_minimum="f16" if layout.two_level and layout.has_minimum else "i32", bias=dtype, out=dtype,
    )  # fmt: skip
    kinds = {" gated": gated, " whole": is_whole, " narrow": narrow}
    case = f"{name} {rows} {dtype}{''.join(word for word, enabled in kinds.items() if enabled)}"
    fixed = {"HAS_BIAS": False, "GATED": gated, "WHOLE": is_whole, **_pipeline(chip, tile, layout, 4)}
    fixed |= constants(layout, torch.bfloat16 if dtype == "bf16" else torch.float16)
    aligned = ("columns", "stride", "out_stride")
    return Compilation(
        kernel=NAME,
        case=case,
        function=_linear_quant,
        signature=types,
        constants=fixed,
        tile=tile,
        dots=True,
        aligned=aligned,
    )
