"""Step 5 in the life of a request: a plan becomes the flat buffer of integers that `forward` reads.

`Batch.fill` is the naive version; both leave the same buffer. The gain: when a decode step follows a decode step of
the same sequences, only what changed is written, in a handful of vectorised writes.
"""

from itertools import accumulate, chain

import numpy as np

from roofline.engine.schedule.plan import StepPlan
from roofline.engine.schedule.sequence import Sequence
from roofline.ops.batch import Batch, Header


class BatchFiller:
    """Writes plans into one batch and remembers the last, if it was all decodes without drafts.

    Args:
        sizes_only: leave out ids, places and page tables, which nobody reads where nothing is computed.
    """

    def __init__(self, batch: Batch, sizes_only: bool = False) -> None:
        self.batch, self._sizes_only = batch, sizes_only
        self._sequences: list[Sequence] = []
        self._page_counts: list[int] = []

    def fill(self, plan: StepPlan) -> None:
        """Write a plan. The plan keeps to the batch's limits; more is a bug of the scheduler."""
        limits = self.batch.limits
        assert plan.tokens <= limits.tokens, "more tokens than the batch holds"
        assert len(plan.sequences) <= limits.segments, "more segments than the batch holds"
        assert plan.rows <= limits.rows, "more logit rows than the batch holds"
        assert plan.table_pages <= limits.pages, "more pages than the batch holds"
        if self._sizes_only:
            self._write_sizes(plan)
            return
        plain = plan.decode_only and not plan.drafted and not plan.repeated
        if plain and plan.sequences == self._sequences:
            self._advance(plan)
        else:
            self._rebuild(plan)
        self._sequences = plan.sequences if plain else []
        if plain:
            self._page_counts = [len(s.pages) for s in plan.sequences]
        if plan.moves:
            self._write_moves(plan)

    def forget(self) -> None:
        """The batch has been written by somebody else."""
        self._sequences = []

    def _write_moves(self, plan: StepPlan) -> None:
        batch, moves, n = self.batch, [planned.move for planned in plan.moves], len(plan.moves)
        batch.state_in[:n] = [move.source for move in moves]
        batch.state_out[:n] = [move.target for move in moves]
        batch.save_at[:n] = [move.save_at for move in moves]
        batch.save_to[:n] = [move.save_to for move in moves]

    def _write_sizes(self, plan: StepPlan) -> None:
        batch, n = self.batch, len(plan.sequences)
        batch.seg_start[: n + 1] = list(accumulate(plan.counts, initial=0))
        batch.context_len[:n] = [s.computed + k for s, k in zip(plan.sequences, plan.counts, strict=True)]
        batch.header[: len(Header)] = (plan.tokens, n, plan.rows, plan.table_pages)

    def _rebuild(self, plan: StepPlan) -> None:
        self._write_sizes(plan)
        batch, sequences, counts = self.batch, plan.sequences, plan.counts
        n = len(sequences)
        page_starts = list(accumulate((len(s.pages) for s in sequences), initial=0))
        pairs = list(zip(sequences, counts, strict=True))
        single = 0 if plan.drafted or plan.repeated else plan.decodes  # leading sequences with one token each
        behind = pairs[single:]
        known = [s.ids[s.computed] for s in sequences[:single]]
        batch.ids[: plan.tokens] = known + list(chain.from_iterable(step_ids(s, k) for s, k in behind))
        positions = [s.computed for s in sequences[:single]]
        ranges = (range(s.computed, s.computed + k) for s, k in behind)
        batch.positions[: plan.tokens] = positions + list(chain.from_iterable(ranges))
        slots = [s.request.slot for s in sequences]
        batch.adapters[: plan.tokens] = np.repeat(slots, counts) if any(slots) else 0
        batch.page_start[: n + 1] = page_starts
        batch.pages[: page_starts[-1]] = list(chain.from_iterable(s.pages for s in sequences))
        rows = logit_rows(plan)
        batch.logit_rows[: len(rows)] = rows
        assert (len(rows), page_starts[-1]) == (plan.rows, plan.table_pages), "a plan that counts its rows and pages"

    def _advance(self, plan: StepPlan) -> None:
        """Every sequence is one token further; a few have a new page at the end of their table."""
        batch, sequences = self.batch, plan.sequences
        n = len(sequences)
        batch.ids[:n] = [s.ids[-1] for s in sequences]
        batch.positions[:n] += 1
        batch.context_len[:n] += 1
        if plan.table_pages == int(batch.header[Header.PAGES]):
            return
        # From the last sequence to the first, so that each tail of the table moves by what lies before it.
        grown = [i for i in range(n) if len(sequences[i].pages) != self._page_counts[i]]
        end = int(batch.header[Header.PAGES])
        for i in reversed(grown):
            at = int(batch.page_start[i + 1])
            new = sequences[i].pages[self._page_counts[i] :]
            batch.pages[at + len(new) : end + len(new)] = batch.pages[at:end]
            batch.pages[at : at + len(new)] = new
            batch.page_start[i + 1 : n + 1] += len(new)
            end += len(new)
        assert end == plan.table_pages, "page tables changed other than by growing"
        batch.header[Header.PAGES] = end


def step_ids(sequence: Sequence, count: int) -> list[int]:
    """The `count` ids that a step computes of a sequence: known ones, then its draft."""
    first = sequence.computed
    ids = sequence.ids[first : first + count]
    return ids if len(ids) == count else ids + sequence.draft


def logit_rows(plan: StepPlan) -> list[int]:
    """Token rows of the step whose logits are wanted: of each sequence those before prompt tokens that are scored, and
    if it samples, that of its last known id and those of its draft."""
    scores = {score.sequence: score for score in plan.scores}
    single = (
        0 if plan.drafted or plan.repeated or scores else plan.decodes
    )  # leading sequences with one token each, and its row
    rows = list(range(single))
    ends = accumulate(plan.counts[single:], initial=single)
    next(ends)
    for end, s, count in zip(ends, plan.sequences[single:], plan.counts[single:], strict=True):
        if scores and (of := scores.get(s)) is not None:
            first = end - count + of.first - s.computed
            rows += range(first, first + len(of.ids))
        if s.computed + count >= len(s.ids):
            rows += range(end - 1 - (s.computed + count - len(s.ids)), end)
    return rows
