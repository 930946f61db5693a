"""Guessing with the model's own layer for it (multi-token prediction): it goes on from the rows that steps compute.

At position p the layer's cache has what it makes of id p and the model's hidden row of position p - 1; zeros stand
before the first id. So a page of it depends on the same ids as the model's page with its number, and the two are one
page: found, shared, evicted and taken away together. What a prefix hit needs of the tokens that are not computed again
is the hidden row before it, which is kept of each page.

Behind the known ids the layer goes on from its own rows, as its guesses do. Those places are written again with the
model's rows, once there are any.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from roofline.engine.schedule.plan import State, StepPlan
from roofline.engine.schedule.rows import RowBuilder
from roofline.engine.schedule.sequence import Sequence
from roofline.ops.batch import PAGE_TOKENS, Segment

if TYPE_CHECKING:
    from roofline.backends.base import GuessingExecutable, KeepsHidden


@dataclass(slots=True, eq=False)
class _LayerPlace:
    """How far the layer is with a sequence: all places before `next` are written; rows: float32 [width] each, the
    hidden rows before the places from there on."""

    next: int
    rows: list[np.ndarray] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.next + len(self.rows)


@dataclass(frozen=True, slots=True)
class NotedPart:
    """A sequence's part of a step before it is committed: its rows begin with row `at` of the step, its first position
    is `first`; pages: its table, where a page is filled, since a sequence that ends has none any more."""

    sequence: Sequence
    at: int
    first: int
    count: int
    pages: list[int] | None


@dataclass(slots=True, eq=False)
class _LayerPart:
    """Ids of a sequence from a position on, each with the hidden row before it, that the layer is to compute."""

    ids: list[int]
    first: int
    pages: list[int]
    rows: list[np.ndarray]
    sequence: Sequence | None = None  # that gets the next id of its draft


class LayerDrafter:
    """Drafts with a model's layer that guesses, all sequences side by side. It closes the layer.

    Args:
        executable: the model, loaded with its layer.
        state: whose sequences and pages these are.
    """

    free = False

    def __init__(self, executable: "KeepsHidden", state: State) -> None:
        assert executable.guesser is not None, "loaded with its layer"
        self.layer: GuessingExecutable = executable.guesser
        self.settled = True
        self._executable, self._state = executable, state
        self._places: dict[Sequence, _LayerPlace] = {}
        self._edges = np.zeros((0, 0), np.float32)  # [pages, width]: the hidden row of each page's last position
        self._rows = RowBuilder(drafting=True)

    def note(self, plan: StepPlan) -> list[NotedPart]:
        """Remember of a step that was computed what its commit changes."""
        parts, at = [], 0
        for sequence, count in zip(plan.sequences, plan.counts, strict=True):
            if sequence.hidden:  # whose rows another executable computes
                continue
            first = sequence.computed
            fills = (first + count) // PAGE_TOKENS > first // PAGE_TOKENS
            parts.append(NotedPart(sequence, at, first, count, list(sequence.pages) if fills else None))
            at += count
        return parts

    def take(self, parts: list[NotedPart]) -> None:
        """Take the hidden rows of a step that was committed, and write the pages that it filled."""
        hidden = self._executable.hidden()  # [tokens, width], until the next step
        if not len(self._edges):
            self._edges = np.zeros((self.layer.num_pages, hidden.shape[1]), np.float32)
        filled = []
        for part in parts:
            rows = hidden[part.at : part.at + part.count]
            if part.pages is not None:
                self._keep_edges(part, part.pages, rows)
            place = self._take_rows(part, rows)
            if part.pages is not None and place is not None:
                filled += self._filled(part, part.pages, place)
        self._run(filled)

    def draft(self, sequences: list[Sequence], counts: list[int]) -> None:
        """Give each sequence a draft of `counts` tokens; a shorter one, or none, where pages or positions run out."""
        self.settled = True
        open_: dict[Sequence, int] = {}
        lengths = {sequence: len(sequence.pages) for sequence in sequences}
        parts = []
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.draft = []
            place = self._places.get(sequence)
            if place is None or place.end != len(sequence.ids):
                continue
            room = self._room(sequence, count)
            if room > 0:
                open_[sequence] = room
                self.settled &= len(place.rows) <= PAGE_TOKENS
                parts.append(_LayerPart(sequence.ids[place.next :], place.next, sequence.pages, place.rows, sequence))
        while parts:
            grown = self._run(parts)
            parts = []
            for sequence, row in grown:
                if len(sequence.draft) < open_[sequence]:
                    at = len(sequence.ids) + len(sequence.draft) - 1
                    parts.append(_LayerPart(sequence.draft[-1:], at, sequence.pages, [row], sequence))
        for sequence in filter(lambda s: s.draft, open_):
            place, page_count = self._places[sequence], lengths[sequence]
            written = min(place.end, page_count * PAGE_TOKENS) - place.next  # what lies in pages that go back is lost
            place.next, place.rows = place.next + written, place.rows[written:]
        for sequence, page_count in lengths.items():
            surplus = sequence.pages[page_count:]
            del sequence.pages[page_count:]
            self._state.cache.release(surplus)

    def keep(self, running: list[Sequence]) -> None:
        """Forget all other sequences."""
        if len(self._places) > sum(s in self._places for s in running):
            self._places = {s: place for s in running if (place := self._places.get(s)) is not None}

    def close(self) -> None:
        self.layer.close()

    def _keep_edges(self, part: NotedPart, pages: list[int], rows: np.ndarray) -> None:
        """Keep the hidden rows of the last positions of pages whose ids are known."""
        end = min(part.first + part.count, len(part.sequence.ids) - 1)
        for page in range(part.first // PAGE_TOKENS, end // PAGE_TOKENS):
            self._edges[pages[page]] = rows[(page + 1) * PAGE_TOKENS - 1 - part.first]

    def _take_rows(self, part: NotedPart, rows: np.ndarray) -> _LayerPlace | None:
        """Add a step's rows, as far as the ids behind them are known, to what the layer is to compute of a sequence;
        None for one that has ended, and whose pages nobody can find."""
        sequence, first = part.sequence, part.first
        place = self._places.get(sequence)
        if place is None or place.end < first + 1:  # it begins, with pages that were found or without
            pages = sequence.pages if part.pages is None else part.pages
            if not pages:
                return None
            place = self._places[sequence] = _LayerPlace(first, [self._row_before(first, pages)])
        for at in range(place.end - first - 1, min(part.count, len(sequence.ids) - 1 - first)):
            place.rows.append(rows[at].copy())
        return place

    def _row_before(self, first: int, pages: list[int]) -> np.ndarray:
        """The hidden row before a position at which a sequence begins: that of the page before it, or zeros."""
        if first == 0 or first % PAGE_TOKENS:
            return np.zeros(self._edges.shape[1], np.float32)
        return self._edges[pages[first // PAGE_TOKENS - 1]].copy()

    def _filled(self, part: NotedPart, pages: list[int], place: _LayerPlace) -> list[_LayerPart]:
        """What the layer has to compute so that the pages that others can find are whole. The last known id is left
        for the draft that begins with it."""
        sequence, last = part.sequence, len(part.sequence.ids) - 1
        full = min(part.first + part.count, last) // PAGE_TOKENS * PAGE_TOKENS
        end = full if sequence.finished is not None else min(place.end, last, len(pages) * PAGE_TOKENS)
        if place.next >= full:
            return []
        count = end - place.next
        work = _LayerPart(sequence.ids[place.next : end], place.next, pages, place.rows[:count])
        place.next, place.rows = end, place.rows[count:]
        return [work]

    def _room(self, sequence: Sequence, count: int) -> int:
        """How many tokens can be drafted of at most `count`: the pages for them are taken, for as long as it lasts."""
        state, length = self._state, len(sequence.ids)
        spare = state.limits.table_pages - sum(len(s.pages) for s in state.running)
        count = min(count, self.layer.max_context - length + 1)
        needed = -(-(length + count - 1) // PAGE_TOKENS) - len(sequence.pages)
        if count > 0 and needed <= spare and state.cache.grow(sequence.pages, length + count - 1):
            return count
        return min(count, len(sequence.pages) * PAGE_TOKENS - length + 1)

    def _run(self, parts: list[_LayerPart]) -> list[tuple[Sequence, np.ndarray]]:
        """Compute parts, in as many steps as they need. Of those with a sequence, whose drafts grow by a token: the
        sequence, and the row that the guess after it goes on from."""
        grown: list[tuple[Sequence, np.ndarray]] = []
        waiting = list(parts)
        while waiting:
            segments, rows, ends = list[Segment](), list[np.ndarray](), list[int]()
            sampled: list[Sequence] = []
            limits, tokens, pages = self.layer.limits, 0, 0
            for part in waiting:
                count = min(len(part.ids), limits.tokens - tokens)
                pages += len(part.pages)
                full = len(segments) == limits.segments or len(sampled) == limits.rows or pages > limits.pages
                if count == 0 or full:
                    break
                segments.append(Segment(part.ids[:count], part.first, part.pages))
                rows += part.rows[:count]
                tokens += count
                if count == len(part.ids) and part.sequence is not None:
                    sampled.append(part.sequence)
                    ends.append(tokens - 1)
            if not segments:
                return grown
            self._compute(segments, rows, ends, sampled, grown)
            waiting = _remaining(waiting, segments)
        return grown

    def _compute(
        self,
        segments: list[Segment],
        rows: list[np.ndarray],
        ends: list[int],
        sampled: list[Sequence],
        grown: list[tuple[Sequence, np.ndarray]],
    ) -> None:
        layer = self.layer
        layer.batch.fill(segments, ends)
        layer.take_hidden(np.stack(rows))
        layer.forward()
        if not sampled:
            return
        hidden = layer.hidden()  # [rows, width]
        grown += [(sequence, row.copy()) for sequence, row in zip(sampled, hidden, strict=True)]
        ids = layer.sample(self._rows.build(sampled)).ids.tolist()
        for sequence, token in zip(sampled, ids, strict=True):
            sequence.draft.append(token if 0 <= token < layer.vocab_size else 0)


def _remaining(parts: list[_LayerPart], segments: list[Segment]) -> list[_LayerPart]:
    """What a step has left of parts."""
    remaining = []
    for number, part in enumerate(parts):
        done = len(segments[number].ids) if number < len(segments) else 0
        if done < len(part.ids):
            remaining.append(
                _LayerPart(part.ids[done:], part.first + done, part.pages, part.rows[done:], part.sequence)
            )
    return remaining
