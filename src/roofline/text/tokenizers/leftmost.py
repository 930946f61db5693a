"""How SentencePiece merges where results have equal scores: of those the leftmost goes first.

The library's merges have an order of their own, which is that of the scores where no two are equal. Where some are, its
pre-tokenizer does the merging, and the model finds each piece as it is.
"""

from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import NormalizedString, PreTokenizedString


def has_equal_scores(results: Iterable[str], scores: Mapping[str, float]) -> bool:
    """Whether the order of merges depends on where they stand. results: of all merges.

    Runs of one character are left out: no other run shares a character with them, and the longest goes first.
    """
    ordered = sorted((scores[result], len(set(result)) == 1) for result in set(results))
    for _, group in groupby(ordered, key=lambda pair: pair[0]):
        are_runs = [is_run for _, is_run in group]
        if len(are_runs) > 1 and not all(are_runs):
            return True
    return False


class LeftmostMerges:
    """A pre-tokenizer of the library that cuts a text into SentencePiece's pieces.

    scores: of each text that two pieces may become.
    """

    def __init__(self, scores: Mapping[str, float]) -> None:
        self._scores = scores

    def pre_tokenize(self, pretokenized: "PreTokenizedString") -> None:
        """What the library calls, once a text."""
        pretokenized.split(self._pieces)

    def _pieces(self, _: int, normalized: "NormalizedString") -> "list[NormalizedString]":
        pieces = (normalized[start:end] for start, end in pairwise(self.cuts(normalized.normalized)))
        return [piece for piece in pieces if piece is not None]

    def cuts(self, text: str) -> list[int]:
        """Where the pieces of a text begin, and its end."""
        size = len(text)
        ends = list(range(1, size + 1))  # of the piece that begins at a place; 0 where none does any more
        before = list(range(-1, size - 1))
        pairs: list[tuple[float, int, int]] = []  # by score, then place: begin, and end of what it would become
        for start in range(size - 1):
            score = self._scores.get(text[start : start + 2])
            if score is not None:
                pairs.append((-score, start, start + 2))
        heapify(pairs)
        while pairs:
            _, start, end = heappop(pairs)
            middle = ends[start]
            if middle == 0 or middle >= size or ends[middle] != end:
                continue  # one of the two is part of another piece by now
            ends[start], ends[middle] = end, 0
            if end < size:
                before[end] = start
            for left, right in ((before[start], start), (start, end)):
                if left < 0 or right >= size:
                    continue
                score = self._scores.get(text[left : ends[right]])
                if score is not None:
                    heappush(pairs, (-score, left, ends[right]))
        return [start for start in range(size) if ends[start]] + [size]
