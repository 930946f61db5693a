"""residual + delta, and the sum's RMS or layer norm, in one pass over a row.

The residual stream is float32: it is rounded nowhere between the embedding and the head.
"""

from collections.abc import Iterator
from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from roofline.backends.gpu import tiles
from roofline.backends.gpu.integers import next_power_of_2
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.backends.gpu.tiles import Tile
from roofline.hardware.chips.chips import Chip

NAME = "add_norm"


@triton.jit
def _add_norm(
    residual, delta, weight, bias, summed, out, width, residual_stride, delta_stride, eps,
    HAS_DELTA: tl.constexpr, WEIGHTS: tl.constexpr, HAS_BIAS: tl.constexpr, LAYER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.max_contiguous(tl.arange(0, BLOCK), 4)  # 4 a thread, whatever the dtype: no tile changes its layout
    inside = column < width
    x = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta + row * delta_stride + column, mask=inside, other=0.0).to(tl.float32)
    if WEIGHTS > 0:  # under way while sums are made
        factor = tl.load(weight + row % WEIGHTS * width + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        tl.store(summed + row * width + column, x, mask=inside)
    if LAYER:
        x = tl.where(inside, x - tl.sum(x, axis=0) / width, 0.0)
    y = x * tl.math.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    if WEIGHTS > 0:
        y *= factor
    if HAS_BIAS:
        y += shift
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)


def add_norm(
    chip: Chip, residual: Tensor, delta: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, *,
    layer: bool, summed: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """summed = residual + delta (float32), out = norm(summed) * weight + bias in out's dtype.

    residual [rows, width], float32 where there is a delta; delta [rows, width] or None: the norm alone; rows of both
    may lie apart, those of summed and out do not. weight float32 [width], or [n * width]: n rows one after the other
    have weights of their own; None: the norm is not multiplied; bias float32 [width]; summed float32 [rows, width], may
    be residual itself; layer: layer norm instead of RMS norm. Any row's result depends on that row alone.
    """
    rows, width = residual.shape
    second = residual if delta is None else delta
    assert residual.stride(1) == second.stride(1) == 1, "a row lies apart"
    assert all(t is None or t.is_contiguous() for t in (summed, out)), "rows of a result lie apart"
    block = next_power_of_2(width)
    tile = row_tile(chip, block)
    stand_in = out if weight is None else weight  # of what is not read
    _add_norm[(rows,)](
        residual, second, stand_in, stand_in if bias is None else bias, residual if summed is None else summed, out,
        width, residual.stride(0), second.stride(0), eps, HAS_DELTA=delta is not None,
        WEIGHTS=0 if weight is None else weight.numel() // width, HAS_BIAS=bias is not None, LAYER=layer, BLOCK=block,
        **tile.launch(),
    )  # fmt: skip


def row_tile(chip: Chip, block: int) -> Tile:
    """By the width alone: other warps would add a row up in another order. No more threads than elements: in place, a
    second thread with the same element could read it when the first has written its sum."""
    tile = tiles.choose(NAME, chip, block=block)
    return replace(tile, warps=max(1, min(tile.warps, block // chip.lanes)))


def cost(rows: int, width: int, delta: bool, out_bytes: int = 2, weights: int = 1) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch; weights: rows of them."""
    return rows * width * 5, rows * width * (4 + (2 + 4 if delta else 0) + out_bytes) + 4 * weights * width


def compilations(chip: Chip) -> Iterator[Compilation]:
    """Widths of the models we know, with and without a delta, both norms; heads without weights, and groups with
    weights of their own."""
    for width in (576, 4096, 8192):
        for delta, layer in ((True, False), (False, False), (True, True)):
            yield _compilation(chip, width, delta=delta, layer=layer)
    yield _compilation(chip, 256, weights=0)
    yield _compilation(chip, 1024, weights=8)


def _compilation(chip: Chip, width: int, *, delta: bool = False, layer: bool = False, weights: int = 1) -> Compilation:
    """One binary. weights: rows of them; other numbers than one are of rows of 16 bits."""
    block, several = next_power_of_2(width), weights != 1
    source = "bf16" if several else "f32"
    second = "bf16" if delta or several else "f32"  # the residual itself stands for what is not there
    factors = "f32" if weights else "bf16"  # out stands for them
    types = pointers(residual=source, delta=second, weight=factors, bias=factors, summed=source, out="bf16")
    return Compilation(
        kernel=NAME,
        case=f"width={width} delta={delta} layer={layer}" + (f" weights={weights}" if several else ""),
        function=_add_norm,
        signature=types | {"eps": "fp32"},
        constants={"HAS_DELTA": delta, "WEIGHTS": weights, "HAS_BIAS": layer, "LAYER": layer, "BLOCK": block},
        tile=row_tile(chip, block),
        aligned=("width", "residual_stride", "delta_stride"),
    )
