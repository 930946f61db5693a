"""Step 5 in the life of a request: a plan becomes the flat buffer of integers that `forward` reads.

`Batch.fill` is the naive version; both leave the same buffer. The gain: when a decode step follows a decode step of
the same sequences, only what changed is written, in a handful of vectorised writes.
"""

from itertools import accumulate, chain

from roofline.engine.scheduler import StepPlan
from roofline.engine.sequence import Sequence
from roofline.ops.batch import Batch, Header, Segment


class BatchFiller:
    """Writes plans into one batch and remembers the last, if it was all decodes."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._sequences: list[Sequence] = []
        self._page_counts: list[int] = []

    def fill(self, plan: StepPlan) -> None:
        """Write a plan. The plan keeps to the batch's limits; more is a bug of the scheduler."""
        limits = self.batch.limits
        assert plan.tokens <= limits.tokens, "more tokens than the batch holds"
        assert len(plan.sequences) <= limits.segments, "more segments than the batch holds"
        assert len(plan.sampled) <= limits.rows, "more logit rows than the batch holds"
        assert plan.table_pages <= limits.pages, "more pages than the batch holds"
        decode_only = plan.decodes == len(plan.sequences)
        if decode_only and plan.sequences == self._sequences:
            self._advance(plan)
        else:
            self._rebuild(plan)
        self._sequences = plan.sequences if decode_only else []
        if decode_only:
            self._page_counts = [len(s.pages) for s in plan.sequences]

    def _rebuild(self, plan: StepPlan) -> None:
        batch, sequences, counts = self.batch, plan.sequences, plan.counts
        n = len(sequences)
        starts = list(accumulate(counts, initial=0))
        page_starts = list(accumulate((len(s.pages) for s in sequences), initial=0))
        firsts = [s.computed for s in sequences]
        spans = list(zip(sequences, firsts, counts, strict=True))
        batch.ids[: plan.tokens] = list(chain.from_iterable(s.ids[first : first + k] for s, first, k in spans))
        batch.positions[: plan.tokens] = list(chain.from_iterable(range(first, first + k) for _, first, k in spans))
        batch.adapters[: plan.tokens] = 0
        batch.seg_start[: n + 1] = starts
        batch.context_len[:n] = [first + k for _, first, k in spans]
        batch.page_start[: n + 1] = page_starts
        batch.pages[: page_starts[-1]] = list(chain.from_iterable(s.pages for s in sequences))
        rows = logit_rows(plan)
        batch.logit_rows[: len(rows)] = rows
        batch.header[: len(Header)] = (plan.tokens, n, len(rows), page_starts[-1])

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


def logit_rows(plan: StepPlan) -> list[int]:
    """Token rows of the step whose logits are wanted: the last row of each sequence that samples."""
    ends = accumulate(plan.counts)
    return [
        end - 1
        for end, s, count in zip(ends, plan.sequences, plan.counts, strict=True)
        if s.computed + count == len(s.ids)
    ]


def segments(plan: StepPlan) -> list[Segment]:
    """The plan as `Batch.fill` takes it."""
    return [
        Segment(s.ids[s.computed : s.computed + count], s.computed, s.pages)
        for s, count in zip(plan.sequences, plan.counts, strict=True)
    ]
