"""How ranks divide a model's widths: heads, and blocks of columns; whole numbers alone."""

import itertools
import math
from dataclasses import dataclass

from roofline.common.errors import CapacityError

Range = tuple[int, int]
# Columns of a matrix, and rows of the vocabulary, that kernels like to take together.
COLUMN_UNIT = 32
ROW_UNIT = 64


@dataclass(frozen=True)
class Heads:
    """A rank's query heads, and the kv heads they read: those whose queries several ranks have are on all of these."""

    heads: Range
    kv_heads: Range


def evenly(count: int, parts: int) -> list[Range]:
    """`count` things in order, in `parts` shares that differ by one at most; the first are the larger ones."""
    share, more = divmod(count, parts)
    edges = [part * share + min(part, more) for part in range(parts + 1)]
    return list(itertools.pairwise(edges))


def divide_columns(width: int, block: int, ranks: int, what: str) -> list[Range]:
    """The columns that each rank has of a matrix whose format has blocks of `block` columns.

    Raises CapacityError naming `what` where there are fewer units than ranks.
    """
    unit = math.lcm(block, COLUMN_UNIT)
    return _in_units(width, unit, ranks, f"units of {unit} columns in {what}")


def divide_rows(rows: int, ranks: int, what: str) -> list[Range]:
    """The rows of the vocabulary that each rank has. Raises CapacityError where there are fewer rows than ranks."""
    return _in_units(rows, ROW_UNIT if rows >= ROW_UNIT * ranks else 1, ranks, f"rows in {what}")


def _in_units(width: int, unit: int, ranks: int, what: str) -> list[Range]:
    units = -(-width // unit)
    if units < ranks:
        raise _too_many(ranks, units, what)
    return [(start * unit, min(stop * unit, width)) for start, stop in evenly(units, ranks)]


def divide_heads(heads: int, kv_heads: int, head_dim: int, block: int, ranks: int) -> list[Heads]:
    """The heads that each rank has, groups of queries of one kv head kept whole where there are kv heads enough.

    With fewer kv heads than ranks these are copied: each rank has some of the queries of one of them.

    block: columns that the matrix after attention has in a block: no rank's heads may end inside one. Raises
    CapacityError where that cannot be done.
    """
    group = heads // kv_heads
    atom = math.lcm(head_dim, block) // head_dim  # query heads that must stay together
    if kv_heads < ranks and group % atom == 0:
        return _copied(kv_heads, group, atom, block, ranks)
    # Whole groups, as many together as end between blocks.
    together = math.lcm(group, atom) // group
    parts = _in_units(kv_heads, together, ranks, _heads_text(together * group, block))
    return [Heads((start * group, stop * group), (start, stop)) for start, stop in parts]


def _copied(kv_heads: int, group: int, atom: int, block: int, ranks: int) -> list[Heads]:
    """One kv head for each rank: ranks are divided among kv heads, and those of one divide its queries."""
    if ranks > kv_heads * group // atom:
        raise _too_many(ranks, kv_heads * group // atom, _heads_text(atom, block))
    parts = []
    for head, (first, last) in enumerate(evenly(ranks, kv_heads)):
        for start, stop in evenly(group // atom, last - first):
            queries = head * group + start * atom, head * group + stop * atom
            parts.append(Heads(queries, (head, head + 1)))
    return parts


def _heads_text(heads: int, block: int) -> str:
    note = f" (blocks of {block} columns stay whole)" if block > 1 else ""
    return f"parts of {heads} query heads{note}"


def _too_many(ranks: int, available: int, what: str) -> CapacityError:
    return CapacityError(f"tensor_parallel={ranks}", ranks, available, what, f"Lower it to at most {available}.")
