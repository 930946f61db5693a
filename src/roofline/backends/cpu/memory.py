"""The image of a model's weights: made from a file's bytes, or a bundle's file mapped as it is."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from roofline.common import log
from roofline.common.errors import ConfigError

if TYPE_CHECKING:
    from roofline import _native
    from roofline.backends.checkpoint import Tensors
    from roofline.backends.cpu.layout import ImageLayout, PackedPiece
    from roofline.ops.rope_tables import RopeTable
    from roofline.program.ir import Program, Recipe, WeightPiece

    # Memory that holds an image for as long as it is referenced.
    Image = _native.Memory | _native.Mapping

HUGE_SHARE = 0.9  # of the file on huge pages; with less it is copied


def pack_image(program: "Program", layout: "ImageLayout", source: "Tensors", threads: int) -> "Image":
    """The image of a Program's weights in anonymous huge pages."""
    from roofline import _native

    memory = _native.Memory(layout.nbytes)
    view = memory.view()
    for place, size, write in image_parts(program, layout, source, threads):
        write(memory.address + place, view[place : place + size])
    return memory


def image_parts(
    program: "Program", layout: "ImageLayout", source: "Tensors", threads: int
) -> Iterator[tuple[int, int, Callable[[int, np.ndarray], None]]]:
    """(place, bytes, write) of each part of the image in ascending order.

    write(address, view) puts the part into the uint8 `view`, which is zero and lies at `address`.
    """
    from roofline import _native
    from roofline.backends.cpu.layout import alibi_heads, piece_bytes, position_factors
    from roofline.ops import formats
    from roofline.ops.attention import log2_slopes

    for name, pieces in layout.matrices.items():
        for piece, packed in zip(program.weights[name].pieces, pieces, strict=True):

            def tiles(
                address: int, view: np.ndarray, piece: "WeightPiece" = piece, packed: "PackedPiece" = packed
            ) -> None:
                raw = formats.packed_bytes(piece.format, piece.bytes_of(source.read(piece.tensor), packed.columns))
                _native.pack(packed.format, raw, packed.rows, packed.columns, address, threads)

            yield packed.address, piece_bytes(piece, packed.format, packed.columns), tiles
    for name, place in layout.vectors.items():
        recipe = program.weights[name]

        def vector(address: int, view: np.ndarray, recipe: "Recipe" = recipe) -> None:
            parts = [
                formats.get(p.format).dequantize(
                    p.bytes_of(source.read(p.tensor), recipe.columns), (p.stop - p.start, *recipe.shape[1:])
                )
                for p in recipe.pieces
            ]
            view.view(np.float32)[:] = np.concatenate(parts).T.reshape(-1)

        yield place, 4 * math.prod(recipe.shape), vector
    heads, *among = alibi_heads(program)
    if heads:

        def slopes(address: int, view: np.ndarray) -> None:
            view.view(np.float32)[:] = log2_slopes(heads, *among)

        yield layout.slopes, 4 * heads, slopes
    factors = position_factors(program)
    if factors is not None:

        def by_position(address: int, view: np.ndarray) -> None:
            view.view(np.float32)[:] = factors.at(np.arange(layout.positions))

        yield layout.factors, 4 * layout.positions, by_position
    place = layout.table
    for table in program.tables.values():

        def rope(address: int, view: np.ndarray, table: "RopeTable" = table) -> None:
            view.view(np.float32)[:] = rope_array(table, layout.positions).reshape(-1)

        size = layout.positions * table.dim * 4
        yield place, size, rope
        place += size


def map_image(path: Path, nbytes: int) -> "_native.Mapping":
    """A bundle's weights.bin, mapped; a thread reads it meanwhile (`settle` ends that). Raises ConfigError."""
    from roofline import _native

    try:
        return _native.Mapping(str(path), nbytes)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{path} cannot be mapped: {error}") from error


def settle(mapping: "_native.Mapping") -> "Image":
    """The mapping once all of it is in memory; a copy in anonymous huge pages where the file's pages are small."""
    from roofline import _native

    huge = mapping.settle()
    if huge >= HUGE_SHARE * mapping.nbytes or mapping.nbytes < 2 << 20:
        return mapping
    log.get("backends").info(
        "weights copied into huge pages: only %d of %d bytes of the file are on such pages. `roofline doctor --verify` "
        "of the bundle lets its next start have them, if the file system can",
        huge,
        mapping.nbytes,
    )
    memory = _native.Memory(mapping.nbytes)
    memory.view()[: mapping.nbytes] = mapping.view()
    return memory


def rope_array(table: "RopeTable", positions: int) -> np.ndarray:
    """float32 [positions, 2, table.dim / 2]: cosines, then sines."""
    from roofline.ops.rope_tables import cos_sin

    cos, sin = cos_sin(table, np.arange(positions))
    return np.ascontiguousarray(np.stack([cos, sin], axis=1))
