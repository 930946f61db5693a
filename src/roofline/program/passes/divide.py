"""How ranks divide a model's widths: heads, and blocks of columns; whole numbers alone."""

import itertools
import math
from dataclasses import dataclass, replace

from roofline.common.errors import CapacityError

Range = tuple[int, int]
# Columns of a matrix, and rows of the vocabulary, that kernels like to take together.
COLUMN_UNIT = 32
ROW_UNIT = 64


@dataclass(frozen=True)
class Heads:
    """A rank's query heads, and the kv heads they read: those whose queries several ranks have are on all of these.

    Of layers with a delta rule: its value heads, and the key heads they read.
    """

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


def divide_heads(
    heads: int, kv_heads: int, head_dim: int, block: int, ranks: int, kind: str = "query heads"
) -> list[Heads]:
    """The heads that each rank has, groups of queries of one kv head kept whole where there are kv heads enough.

    With fewer kv heads than ranks these are copied: each rank has some of the queries of one of them.

    block: columns that the matrix after attention has in a block: no rank's heads may end inside one; kind: what the
    heads are called. Raises CapacityError where that cannot be done.
    """
    group = heads // kv_heads
    atom = math.lcm(head_dim, block) // head_dim  # query heads that must stay together
    if kv_heads < ranks and group % atom == 0:
        return _copied(kv_heads, group, atom, ranks, _heads_text(atom, block, kind))
    # Whole groups, as many together as end between blocks.
    together = math.lcm(group, atom) // group
    parts = _in_units(kv_heads, together, ranks, _heads_text(together * group, block, kind))
    return [Heads((start * group, stop * group), (start, stop)) for start, stop in parts]


def divide_value_heads(
    value_heads: int, key_heads: int, value_dim: int, block: int, ranks: int, tiled: bool
) -> list[Heads]:
    """The value heads that each rank has of a delta rule, and the key heads they read, likewise.

    tiled: value head i reads key head i % key_heads. A rank has value heads in a row then too, as the blocks of the
    matrix behind them ask: some tiles of `key_heads`, which read all key heads, or a part of one tile, whose value
    heads have a key head each.
    """
    groups = value_heads // key_heads if tiled else key_heads
    parts = divide_heads(value_heads, groups, value_dim, block, ranks, "value heads")
    return [replace(part, kv_heads=_read_by(part.heads, key_heads)) for part in parts] if tiled else parts


def _read_by(heads: Range, key_heads: int) -> Range:
    """The key heads of tiled value heads."""
    first, last = heads
    if (last - first) % key_heads == 0:
        return 0, key_heads
    return first % key_heads, (last - 1) % key_heads + 1


def _copied(kv_heads: int, group: int, atom: int, ranks: int, units_text: str) -> list[Heads]:
    """One kv head for each rank: ranks are divided among kv heads, and those of one divide its queries."""
    if ranks > kv_heads * group // atom:
        raise _too_many(ranks, kv_heads * group // atom, units_text)
    parts = []
    for head, (first, last) in enumerate(evenly(ranks, kv_heads)):
        for start, stop in evenly(group // atom, last - first):
            queries = head * group + start * atom, head * group + stop * atom
            parts.append(Heads(queries, (head, head + 1)))
    return parts


def _heads_text(heads: int, block: int, kind: str) -> str:
    note = f" (blocks of {block} columns stay whole)" if block > 1 else ""
    return f"parts of {heads} {kind}{note}"


def _too_many(ranks: int, available: int, what: str) -> CapacityError:
    return CapacityError(f"tensor_parallel={ranks}", ranks, available, what, f"Lower it to at most {available}.")
