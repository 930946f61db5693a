"""A kernel whose compilation ends the process, as LLVM does where it cannot go on, between two that compile."""

import os
from collections.abc import Iterator

from gpu_planted import product

from roofline.backends.gpu.signatures import Compilation
from roofline.backends.gpu.tiles import Tile
from roofline.hardware.chips.chips import Chip


class _Deadly:
    def warmup(self, **arguments: object) -> None:
        os._exit(7)


def compilations(chip: Chip) -> Iterator[Compilation]:
    """Two that compile around the one that ends its process."""
    tile = Tile(4, 1, {"M": 16, "N": 16, "K": 16})
    yield product("before", tile)
    yield Compilation("product", "deadly", _Deadly(), {}, {}, tile, dots=False)
    yield product("after", tile)
