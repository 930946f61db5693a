"""Packs samples into rows: each sample, longest first, goes into the row with the least room that still holds it.

Best fit decreasing; samples are never cut for it. Rows with equal room are told apart by their number, so the result
follows from the lengths alone.
"""

from collections import defaultdict
from collections.abc import Sequence


def pack(lengths: Sequence[int], size: int) -> list[list[int]]:
    """The samples of each row, by number; their lengths are at most `size` together."""
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = defaultdict(list)  # room left -> the rows with it
    rooms = 0  # bit r is set where a row has r tokens of room left
    for number in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        length = lengths[number]
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = size, len(rows)
            rows.append([])
        rows[row].append(number)
        free_tokens = room - length
        by_room[free_tokens].append(row)
        rooms |= 1 << free_tokens
    return rows
