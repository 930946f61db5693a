"""Tiles that were measured on a chip: rows of its tuning store, by kernel, shape, rows, sources and compiler."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files

from roofline.backends.gpu.tiles import Tile
from roofline.common.errors import ConfigError
from roofline.hardware.chips.chips import Chip
from roofline.hardware.tuning.store import Setting

SMALLEST = 16  # side of a block that tl.dot takes
MOST_WARPS, MOST_STAGES = 8, 5


def text(tile: Tile) -> str:
    """ "BLOCK_M=16 BLOCK_N=32 warps=4 stages=2 waves_per_eu=2": what `parse` reads."""
    words = {**tile.sizes, "warps": tile.warps, "stages": tile.stages, **tile.options}
    return " ".join(f"{name}={json.dumps(value, separators=(',', ':'))}" for name, value in words.items())


def parse(words: str) -> Tile:
    """The tile of a text; sizes are the names in capitals. Raises ConfigError."""
    try:
        words_by_name = {name: json.loads(value) for name, value in (word.split("=", 1) for word in words.split(" "))}
        warps, stages = words_by_name.pop("warps"), words_by_name.pop("stages")
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{words!r} is no tile such as 'BLOCK_M=16 warps=4 stages=2'") from error
    sizes = {name: value for name, value in words_by_name.items() if name.isupper()}
    options = {name: value for name, value in words_by_name.items() if name not in sizes}
    if not all(type(value) is bool or (type(value) is int and value > 0) for value in sizes.values()) or not all(
        type(value) is int and value > 0 for value in (warps, stages)
    ):
        raise ConfigError(f"{words!r}: warps, stages and sizes are whole numbers of at least 1")
    return Tile(warps, stages, sizes, options)


def setting(device: str) -> Setting:
    """What a tile's figures depend on: the device by its product's name, the kernels' sources, and their compiler.

    `run` has all three, so that each has keys of its own in the store of an architecture.
    """
    build = _sources()
    compiler = f"triton {_version('triton')}"
    return Setting(f"{device}, kernels {build}, {compiler}", build, compiler)


def near(tile: Tile, chip: Chip, element_bytes: int) -> Iterator[Tile]:
    """The tile, and those that differ from it in one thing: a size doubled or halved, a switch, warps, stages.

    element_bytes: of what lies in local memory; tiles whose blocks of BLOCK_M and BLOCK_N by BLOCK_K do not fit the
    chip's are left out, `tile` itself never.
    """
    yield tile
    changed = [
        replace(tile, sizes={**tile.sizes, name: new})
        for name, size in tile.sizes.items()
        for new in ((not size,) if isinstance(size, bool) else (size // 2, size * 2))
        if isinstance(new, bool) or new >= SMALLEST
    ]
    changed += [replace(tile, warps=n) for n in (tile.warps // 2, tile.warps * 2) if 1 <= n <= MOST_WARPS]
    changed += [replace(tile, stages=n) for n in (tile.stages - 1, tile.stages + 1) if 1 <= n <= MOST_STAGES]
    yield from (tile for tile in changed if _local_bytes(tile.sizes, tile.stages, element_bytes) <= chip.local_bytes)


def _local_bytes(sizes: Mapping[str, int], stages: int, element_bytes: int) -> int:
    return (sizes["BLOCK_M"] + sizes["BLOCK_N"]) * sizes["BLOCK_K"] * element_bytes * stages


def _sources() -> str:
    """Hash of all kernels' sources: they use each other's functions."""
    folder = files("roofline.backends.gpu").joinpath("kernels")
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir(), key=lambda file: str(file.name)):
        if file.name.endswith(".py"):
            digest.update(f"{file.name}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
