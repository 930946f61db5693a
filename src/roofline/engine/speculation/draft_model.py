"""Guessing with a second, smaller model of the same vocabulary (Leviathan et al. 2023; Chen et al. 2023).

The draft model has its own cache. It samples with the parameters and the noise of the target, so that where the two
agree about the likely ids they also choose the same one.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roofline.engine.cache.paged import PagedCache
from roofline.engine.schedule.rows import RowBuilder
from roofline.engine.schedule.sequence import Sequence
from roofline.ops.batch import PAGE_TOKENS, Segment

if TYPE_CHECKING:
    from roofline.backends.base import Executable

USUAL_GAP = 2  # ids that the draft model lacks when its last draft was right: the last drafted one and the one after


@dataclass(slots=True, eq=False)
class _Side:
    """A sequence in the draft model: `computed` tokens lie in `pages`, the first `length` of them ids of the sequence
    as it was, the others of `drafted`."""

    pages: list[int]
    computed: int
    published: int
    length: int = 0
    drafted: list[int] = field(default_factory=list)


class DraftModel:
    """Drafts with an executable, all sequences side by side. It closes the executable."""

    free = False

    def __init__(self, executable: "Executable") -> None:
        self.executable = executable
        self.settled = True
        self.cache = PagedCache(executable.num_pages)
        self._sides: dict[Sequence, _Side] = {}
        self._rows = RowBuilder(drafting=True)

    def draft(self, sequences: list[Sequence], counts: list[int]) -> None:
        """Give each sequence a draft of `counts` tokens; a shorter one, or none, where pages or positions run out."""
        open_: dict[Sequence, int] = {}
        self.settled = True
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.draft = []
            if count > 0 and self._catch_up(sequence, count):
                open_[sequence] = count
        while open_:
            for sequence in self._step(list(open_)):
                if len(sequence.draft) >= open_[sequence]:
                    del open_[sequence]

    def keep(self, running: list[Sequence]) -> None:
        """Release the pages of all other sequences."""
        if len(self._sides) > sum(s in self._sides for s in running):
            for sequence in self._sides.keys() - set(running):
                self.cache.release(self._sides.pop(sequence).pages)

    def close(self) -> None:
        self.executable.close()

    def _catch_up(self, sequence: Sequence, count: int) -> bool:
        """Find out what the pages hold of the sequence as it is now, and reserve what a draft needs."""
        length, side = len(sequence.ids), self._sides.get(sequence)
        if side is None:
            pages = self.cache.match(sequence.keys, sequence.ids)
            side = self._sides[sequence] = _Side(pages, len(pages) * PAGE_TOKENS, len(pages))
        else:
            right = side.length
            for token, drafted in zip(sequence.ids[side.length :], side.drafted, strict=False):
                if token != drafted:
                    break
                right += 1
            side.computed = min(side.computed, right)
        self.settled &= length - side.computed <= USUAL_GAP
        # The row of the last id makes the first drafted one, so it is computed again even if it lies there.
        side.computed = min(side.computed, length - 1)
        side.length, side.drafted = length, sequence.draft
        needed = length + count - 1
        return needed <= self.executable.max_context and self.cache.grow(side.pages, needed)

    def _step(self, sequences: list[Sequence]) -> list[Sequence]:
        """Run the draft model once over what is missing of the sequences, as far as it fits into a step.

        Returns those whose drafts are to be looked at: they grew by a token, or cannot grow any more.
        """
        executable, limits = self.executable, self.executable.limits
        segments: list[Segment] = []
        ends: list[int] = []
        sampled: list[Sequence] = []
        tokens = pages = 0
        for sequence in sequences:
            side = self._sides[sequence]
            missing = [*sequence.ids[side.computed :], *sequence.draft[max(0, side.computed - side.length) :]]
            chunk = missing[: limits.tokens - tokens]
            pages += len(side.pages)
            if not chunk or len(segments) == limits.segments or len(sampled) == limits.rows or pages > limits.pages:
                break
            segments.append(Segment(chunk, side.computed, side.pages))
            tokens += len(chunk)
            if len(chunk) == len(missing):
                sampled.append(sequence)
                ends.append(tokens - 1)
        executable.batch.fill(segments, ends)
        executable.forward()
        for sequence, segment in zip(sequences, segments, strict=False):
            self._computed(sequence, len(segment.ids))
        if not sampled:
            return []
        ids = executable.sample(self._rows.build(sampled)).ids.tolist()
        for sequence, token in zip(sampled, ids, strict=True):
            sequence.draft.append(token if 0 <= token < executable.vocab_size else 0)
        return sampled

    def _computed(self, sequence: Sequence, count: int) -> None:
        """Count tokens that now lie in the pages, and publish the pages that are full and will not change."""
        side = self._sides[sequence]
        side.computed += count
        full = min(side.computed, side.length - 1) // PAGE_TOKENS
        if full > side.published:
            self.cache.publish(sequence.keys, sequence.ids, side.pages, side.published, full)
            side.published = full
