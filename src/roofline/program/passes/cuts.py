"""What a rank has of the columns of a value, and of the rows and columns of a weight."""

import itertools
import math
from bisect import bisect_left, bisect_right
from dataclasses import replace

from roofline.ops import formats
from roofline.program.ir import Columns, Recipe, WeightPiece
from roofline.program.passes.divide import Range

Cut = tuple[Range, ...]  # the columns of a value that a rank has, in ascending order


def columns_of_heads(heads: Range, dim: int) -> Cut:
    """The columns of heads of so many each."""
    return ((heads[0] * dim, heads[1] * dim),)


def head_columns(heads: Range, dim: int) -> Range:
    """The columns of heads that are `dim` wide."""
    return heads[0] * dim, heads[1] * dim


def width_of(cut: Cut) -> int:
    """Count the columns of a cut."""
    return sum(stop - start for start, stop in cut)


def within(cut: Cut, start: int, stop: int) -> Cut:
    """Return what of a cut lies among the columns start..stop, counted from `start`."""
    clipped = ((max(first, start) - start, min(last, stop) - start) for first, last in cut)
    return tuple((first, last) for first, last in clipped if first < last)


def ends_inside(cut: Cut, dim: int) -> bool:
    """Say whether a cut begins or ends inside one of the heads, which are `dim` wide."""
    return any(edge % dim for part in cut for edge in part)


def columns_before(cut: Cut, column: int) -> int:
    """Count how many of the first `column` columns of a value the rank has."""
    return sum(max(0, min(stop, column) - start) for start, stop in cut)


def block_of(recipe: Recipe) -> int:
    """Columns that stay together: a block of each piece's format, and of the one it is packed as."""
    return math.lcm(*(form.block for p in recipe.pieces for form in (formats.get(p.format), formats.packed(p.format))))


def columns_of(recipe: Recipe, start: int, stop: int) -> Recipe:
    pieces = []
    for piece in recipe.pieces:
        before, of = (piece.columns.start, piece.columns.of) if piece.columns else (0, recipe.columns)
        pieces.append(replace(piece, columns=Columns(before + start, before + stop, of)))
    return replace(recipe, shape=(recipe.shape[0], stop - start), pieces=tuple(pieces))


def rows_of(recipe: Recipe, rows: Cut) -> Recipe:
    pieces: list[WeightPiece] = []
    # The first row of each piece within the weight, and the end.
    firsts = list(itertools.accumulate((piece.stop - piece.start for piece in recipe.pieces), initial=0))
    for start, stop in rows:
        for n in range(max(0, bisect_right(firsts, start) - 1), min(len(recipe.pieces), bisect_left(firsts, stop))):
            piece, at = recipe.pieces[n], firsts[n]
            first, last = max(start, at), min(stop, firsts[n + 1])
            if first < last:
                begin, end = piece.start + first - at, piece.start + last - at
                pieces.append(WeightPiece(piece.tensor, begin, end, piece.format, piece.columns))
    return replace(recipe, shape=(sum(b - a for a, b in rows), *recipe.shape[1:]), pieces=tuple(pieces))
