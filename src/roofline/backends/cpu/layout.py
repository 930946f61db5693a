"""Where everything lies that the core reads: packed matrices, then vectors, then tables of positions, in one image.

The image is the same in memory and in a bundle's weights.bin; code names places in it as bytes from its start.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from roofline.common.errors import UnsupportedError
from roofline.ops import formats
from roofline.ops.position_factors import PositionFactors
from roofline.program.ir import Program, Recipe, WeightPiece

TILE_ROWS = 16
ALIGN = 64  # bytes: of each weight
SECTION = 2 << 20  # bytes: each section starts on a huge page of its own


@dataclass(frozen=True)
class PackedPiece:
    """A piece of a weight: format number, where its first tile lies, rows, inputs, first output column.

    The fields are those of a piece in native/records.h.
    """

    format: int
    address: int
    rows: int
    columns: int
    start: int


@dataclass(frozen=True)
class ImageLayout:
    """Places in the image, in bytes.

    matrices: weight -> pieces; vectors: weight -> place of its float32, the columns of one with several one behind the
    other; slopes: place of ALiBi's, float32 [heads], -1: none; factors: place of what rows are multiplied by, float32
    [positions], -1: nothing; table: place of the rope tables, float32 [tables, positions, 2, turned / 2], -1: none;
    positions: that can be served; matrix_bytes: of the packed matrices; nbytes: of the whole image.
    """

    matrices: Mapping[str, tuple[PackedPiece, ...]]
    vectors: Mapping[str, int]
    slopes: int
    factors: int
    table: int
    positions: int
    matrix_bytes: int
    nbytes: int


def lay_out(program: Program, positions: int) -> ImageLayout:
    """The layout of a Program's weights. Raises UnsupportedError for a format without kernels."""
    from roofline import _native

    numbers = {name: number for number, name in enumerate(_native.format_names())}
    at, matrices = 0, {}
    for name, recipe in program.weights.items():
        if not _packed(recipe):
            continue
        pieces, start = [], 0
        for piece in recipe.pieces:
            packed = formats.packed(piece.format).name
            if packed not in numbers:
                what = f"weight format {piece.format}"
                raise UnsupportedError(what, "the cpu backend has no kernel for it", list(numbers))
            number, rows = numbers[packed], piece.stop - piece.start
            pieces.append(PackedPiece(number, at, rows, recipe.columns, start))
            at += piece_bytes(piece, number, recipe.columns)
            start += rows
        matrices[name] = tuple(pieces)
    matrix_bytes, at, end = at, _up(at, SECTION), at
    vectors, slopes, factors, place = {}, -1, -1, -1
    for name, recipe in program.weights.items():
        if not _packed(recipe):
            vectors[name], end = at, at + 4 * math.prod(recipe.shape)
            at = _up(end, ALIGN)
    if heads := alibi_heads(program)[0]:
        slopes, end = at, at + 4 * heads
        at = _up(end, ALIGN)
    if position_factors(program) is not None:
        factors, end = at, at + 4 * positions
        at = _up(end, ALIGN)
    if program.tables:
        place = _up(at, SECTION)
        end = place + sum(positions * table.dim * 4 for table in program.tables.values())
    return ImageLayout(
        matrices=matrices,
        vectors=vectors,
        slopes=slopes,
        factors=factors,
        table=place,
        positions=positions,
        matrix_bytes=matrix_bytes,
        nbytes=end,
    )


def with_weights_of(program: Program, guesser: Program) -> Program:
    """What one image for both is laid out by: the Program with the weights of a layer that guesses behind its own.

    Raises UnsupportedError where the layer reads other tables of positions.
    """
    if list(guesser.tables.values()) != list(program.tables.values()):
        reason = "it turns other frequencies than the model, and the cpu backend has one set of tables for both"
        raise UnsupportedError(f"a layer of {program.name} that guesses", reason, ["speculate='ngram'"])
    weights = dict(program.weights)
    for name, recipe in guesser.weights.items():
        assert weights.setdefault(name, recipe) == recipe, "shared weights lie alike"
    return replace(program, weights=weights)


def _packed(recipe: Recipe) -> bool:
    """Whether products and look-ups read a weight. The others stay float32, like the taps of a convolution."""
    return len(recipe.shape) == 2 and recipe.layout != "f32"


def alibi_heads(program: Program) -> tuple[int, int, int]:
    """Heads of an attention whose scores fall with distance, the first of them, and how many the whole model has: zeros
    where there is none, or where these are all (see ops.attention.log2_slopes)."""
    names = ("heads", "first_head", "all_heads")
    leaning = (i.attrs for i in program.body if i.op == "attend" and i.attr("alibi"))
    attrs = next(leaning, {})
    heads, first, total = (int(attrs.get(name, 0)) for name in names)
    return heads, first, total


def position_factors(program: Program) -> PositionFactors | None:
    """What rows are multiplied by at each position; None: nothing. Raises UnsupportedError where that differs."""
    every = {PositionFactors.of(instr.attrs) for instr in program.body} - {None}
    if len(every) > 1:
        raise UnsupportedError("layers with different factors by position", "the cpu backend has one table of them")
    return every.pop() if every else None


def piece_bytes(piece: WeightPiece, number: int, columns: int) -> int:
    """Bytes of a packed piece: whole tiles, each a multiple of 64."""
    from roofline import _native

    return -(-(piece.stop - piece.start) // TILE_ROWS) * _native.tile_bytes(number, columns)


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit
