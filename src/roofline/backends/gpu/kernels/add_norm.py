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
    residual, delta, weight, bias, summed, out, width, eps,
    HAS_DELTA: tl.constexpr, HAS_BIAS: tl.constexpr, LAYER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.max_contiguous(tl.arange(0, BLOCK), 4)  # 4 a thread, whatever the dtype: no tile changes its layout
    inside = column < width
    x = tl.load(residual + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta + row * width + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)  # under way while sums are made
    if HAS_BIAS:
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        tl.store(summed + row * width + column, x, mask=inside)
    if LAYER:
        x = tl.where(inside, x - tl.sum(x, axis=0) / width, 0.0)
    y = x * tl.math.rsqrt(tl.sum(x * x, axis=0) / width + eps) * factor
    if HAS_BIAS:
        y += shift
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)


def add_norm(
    chip: Chip, residual: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, *,
    layer: bool, summed: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """summed = residual + delta (float32), out = norm(summed) * weight + bias in out's dtype.

    residual float32 [rows, width]; delta [rows, width] or None: the norm alone; weight, bias float32 [width];
    summed float32 [rows, width], may be residual itself; layer: layer norm instead of RMS norm. Any row's result
    depends on that row alone.
    """
    rows, width = residual.shape
    block = next_power_of_2(width)
    tile = _tile(chip, block)
    _add_norm[(rows,)](
        residual, residual if delta is None else delta, weight, weight if bias is None else bias,
        residual if summed is None else summed, out, width, eps,
        HAS_DELTA=delta is not None, HAS_BIAS=bias is not None, LAYER=layer, BLOCK=block, **tile.launch(),
    )  # fmt: skip


def _tile(chip: Chip, block: int) -> Tile:
    """By the width alone: other warps would add a row up in another order. No more threads than elements: in place, a
    second thread with the same element could read it when the first has written its sum."""
    tile = tiles.choose(NAME, chip, block=block)
    return replace(tile, warps=max(1, min(tile.warps, block // chip.lanes)))


def cost(rows: int, width: int, delta: bool, out_bytes: int = 2) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch."""
    return rows * width * 5, rows * width * (4 + (2 + 4 if delta else 0) + out_bytes) + 4 * width


def compilations(chip: Chip) -> Iterator[Compilation]:
    """Widths of the models we know, with and without a delta, both norms."""
    for width in (576, 4096, 8192):
        for delta, layer in ((True, False), (False, False), (True, True)):
            block = next_power_of_2(width)
            tile = _tile(chip, block)
            second = "bf16" if delta else "f32"  # the residual itself stands for what is not there
            types = pointers(residual="f32", delta=second, weight="f32", bias="f32", summed="f32", out="bf16")
            constants = {"HAS_DELTA": delta, "HAS_BIAS": layer, "LAYER": layer, "BLOCK": block}
            case = f"width={width} delta={delta} layer={layer}"
            yield Compilation(
                kernel=NAME,
                case=case,
                function=_add_norm,
                signature=types | {"eps": "fp32"},
                constants=constants,
                tile=tile,
                aligned=("width",),
            )
