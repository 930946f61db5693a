"""Kernels with faults that the gates must catch; compiled by test_static.py in processes of their own."""

from collections.abc import Iterator

import triton
import triton.language as tl

from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.backends.gpu.tiles import Tile
from roofline.hardware.chips.chips import Chip


@triton.jit
def _product(a, b, out, width, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PLAIN: tl.constexpr):
    rows, columns, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, width, K):
        x = tl.load(a + rows[:, None] * width + start + inner[None, :])
        y = tl.load(b + columns[None, :] * width + start + inner[:, None])
        if PLAIN:
            total += tl.sum(x[:, :, None].to(tl.float32) * y[None, :, :].to(tl.float32), axis=1)
        else:
            total = tl.dot(x, y, total, input_precision="ieee")
    tl.store(out + rows[:, None] * N + columns[None, :], total)


def product(case: str, tile: Tile, *, plain: bool = False, dtype: str = "bf16") -> Compilation:
    """out [M, N] float32 = a [M, width] times the transpose of b [N, width]; plain: without tl.dot."""
    signature = {**pointers(a=dtype, b=dtype, out="f32"), "width": "i32"}
    constants = {**tile.sizes, "PLAIN": plain}
    return Compilation("product", case, _product, signature, constants, tile, dots=True, aligned=("width",))


def compilations(chip: Chip) -> Iterator[Compilation]:
    """A good tile, one that no register file holds, one that no local memory holds, and no dot where one belongs."""
    yield product("good", Tile(4, 2, {"M": 64, "N": 64, "K": 32}))
    yield product("spilling", Tile(1, 1, {"M": 128, "N": 128, "K": 64}))
    yield product("local", Tile(8, 4, {"M": 128, "N": 128, "K": 128}))
    yield product("plain", Tile(4, 1, {"M": 16, "N": 16, "K": 16}), plain=True)
    yield product("f32", Tile(4, 1, {"M": 32, "N": 32, "K": 16}), dtype="f32")
