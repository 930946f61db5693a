"""What Gemma 3n does with whole rows: one made as long as another, and what of a row lies far above its mean.

A program has a row, so a row's result depends on that row alone.
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from roofline.backends.gpu.integers import next_power_of_2
from roofline.backends.gpu.kernels.add_norm import row_tile
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.hardware.chips.chips import Chip
from roofline.ops.norms import LEAST_SQUARE

LIKE = "like_norm"
ABOVE = "above_spread"


@triton.jit
def _like_norm(x, y, out, width, x_stride, y_stride, out_stride, least, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.max_contiguous(tl.arange(0, BLOCK), 4)
    inside = column < width
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    model = tl.load(y + row * y_stride + column, mask=inside, other=0.0).to(tl.float32)
    square = tl.sum(values * values, axis=0) / width
    square = tl.where(square < least, least, square)  # a NaN stays one
    result = values * tl.sqrt(tl.sum(model * model, axis=0) / width) / tl.sqrt(square)
    tl.store(out + row * out_stride + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _above_spread(x, out, width, x_stride, out_stride, z, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.max_contiguous(tl.arange(0, BLOCK), 4)
    inside = column < width
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    distance = tl.where(inside, values - tl.sum(values, axis=0) / width, 0.0)
    result = distance - tl.sqrt(tl.sum(distance * distance, axis=0) / width) * z
    result = tl.where(result < 0.0, 0.0, result)  # a NaN stays one
    tl.store(out + row * out_stride + column, result.to(out.dtype.element_ty), mask=inside)


def like_norm(chip: Chip, x: Tensor, y: Tensor, *, out: Tensor) -> None:
    """out = the op like_norm of x and y, all [rows, width] of any float dtypes, rows may lie apart; out may be x."""
    assert x.stride(1) == y.stride(1) == out.stride(1) == 1, "a row lies apart"
    (rows, width), block = out.shape, next_power_of_2(out.shape[1])
    _like_norm[(rows,)](
        x, y, out, width, x.stride(0), y.stride(0), out.stride(0), LEAST_SQUARE,
        BLOCK=block, **row_tile(chip, block).launch(),
    )  # fmt: skip


def above_spread(chip: Chip, x: Tensor, z: float, *, out: Tensor) -> None:
    """out = the op above_spread of x, both [rows, width] of any float dtypes, rows may lie apart; out may be x."""
    assert x.stride(1) == out.stride(1) == 1, "a row lies apart"
    (rows, width), block = out.shape, next_power_of_2(out.shape[1])
    _above_spread[(rows,)](
        x, out, width, x.stride(0), out.stride(0), z, BLOCK=block, **row_tile(chip, block).launch()
    )  # fmt: skip


def like_cost(rows: int, width: int, x_bytes: int = 2, y_bytes: int = 4) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch of like_norm, whose result has the bytes of x."""
    return 6 * rows * width, rows * width * (2 * x_bytes + y_bytes)


def above_cost(rows: int, width: int, element_bytes: int = 2) -> tuple[int, int]:
    """(FLOPs, bytes) of one launch of above_spread."""
    return 6 * rows * width, 2 * rows * width * element_bytes


def compilations(chip: Chip) -> Iterator[Compilation]:
    """Gemma 3n's: streams of 2048 as long as one of float32, and gates of 16384, both of 16 bits."""
    block = 2048
    yield Compilation(
        kernel=LIKE,
        case=f"width={block}",
        function=_like_norm,
        signature=pointers(x="bf16", y="f32", out="bf16") | {"least": "fp32"},
        constants={"BLOCK": block},
        tile=row_tile(chip, block),
        aligned=("width", "x_stride", "y_stride", "out_stride"),
    )
    block = 16384
    yield Compilation(
        kernel=ABOVE,
        case=f"width={block}",
        function=_above_spread,
        signature=pointers(x="bf16", out="bf16") | {"z": "fp32"},
        constants={"BLOCK": block},
        tile=row_tile(chip, block),
        aligned=("width", "x_stride", "out_stride"),
    )
