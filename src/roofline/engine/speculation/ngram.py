"""Guessing from the text itself: what followed the last time the latest ids stood there (prompt lookup).

Source: Saxena, "Prompt Lookup Decoding", 2023. Right where a text is quoted, edited or summarised, and it costs next to
nothing: a few dictionary look-ups a token.
"""

from collections.abc import Sequence as Items

from roofline.engine.schedule.sequence import Sequence

LONGEST, SHORTEST = 4, 2  # ids that are compared
ID_BITS = 32


class NgramIndex:
    """Where each run of `shortest` to `longest` ids last stood in one growing list of ids."""

    def __init__(self, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        assert 1 <= shortest <= longest, "lengths of runs"
        self._length = 0
        self._tail = 0  # the latest `longest` ids, packed
        self._widest = (1 << longest * ID_BITS) - 1
        # (length, mask of as many ids, packed run -> index of the id that followed it), longest first
        self._runs: list[tuple[int, int, dict[int, int]]] = [
            (n, (1 << n * ID_BITS) - 1, {}) for n in range(longest, shortest - 1, -1)
        ]

    def guess(self, ids: Items[int], count: int) -> list[int]:
        """`count` ids that may follow `ids`, or none. `ids` begins with the `ids` of every earlier call.

        The longest known run at the end decides, its latest place before any earlier one. A place so near the end that
        fewer than `count` ids follow it is taken as a period, and goes on repeating.
        """
        tail = self._tail
        for at in range(self._length, len(ids)):
            for n, mask, places in self._runs:
                if at >= n:
                    places[tail & mask] = at
            tail = (tail << ID_BITS | ids[at]) & self._widest
        self._length, self._tail = len(ids), tail
        for n, mask, places in self._runs:
            place = places.get(tail & mask) if len(ids) >= n else None
            if place is not None:
                following = list(ids[place : place + count])
                period = len(ids) - place
                return following if len(following) == count else [following[i % period] for i in range(count)]
        return []


class NgramDrafter:
    """Drafts from each sequence's own prompt and answer."""

    free = True

    def __init__(self) -> None:
        self.settled = True
        self._indices: dict[Sequence, NgramIndex] = {}

    def draft(self, sequences: list[Sequence], counts: list[int]) -> None:
        self.settled = True
        for sequence, count in zip(sequences, counts, strict=True):
            index = self._indices.get(sequence)
            if index is None:
                self.settled = False
                index = self._indices[sequence] = NgramIndex()
            sequence.draft = index.guess(sequence.ids, count)

    def keep(self, running: list[Sequence]) -> None:
        if len(self._indices) > len(running):
            self._indices = {s: index for s in running if (index := self._indices.get(s)) is not None}

    def close(self) -> None:
        self._indices.clear()
