"""The sampling parameters of a step's rows, as arrays.

What a row needs is a function of its sequence and of the drafted tokens before it, so the arrays are rebuilt only when
the set of sequences or the lengths of their drafts change; in between only positions, histories and lifted bans are
written.
"""

from collections.abc import Sequence as Items

import numpy as np

from roofline.backends.sampling import SampleRows
from roofline.engine.schedule.sequence import Sequence

NO_IDS = np.zeros(0, np.int32)
MOST_SHAPES = 16  # of which the arrays are kept, while the sequences stay the same


class History:
    """How often each id was generated; 0 for ids that stand only in the prompt. Arrays double when full."""

    def __init__(self, prompt: list[int]) -> None:
        distinct = list(dict.fromkeys(prompt))
        self._slot = {token: i for i, token in enumerate(distinct)}
        self._ids = np.array(distinct, np.int32)
        self._counts = np.zeros(len(distinct), np.int32)
        self.size = self._first_new = len(distinct)

    def add(self, token: int) -> None:
        """Count a generated id."""
        slot = self._slot.get(token)
        if slot is None:
            slot = self._slot[token] = self.size
            if slot == len(self._ids):
                self._ids = np.resize(self._ids, max(16, 2 * slot))
                self._counts = np.resize(self._counts, max(16, 2 * slot))
            self._ids[slot], self._counts[slot] = token, 0
            self.size += 1
        self._counts[slot] += 1

    def remove(self, token: int) -> None:
        """Take back the latest `add`, of this id."""
        slot = self._slot[token]
        self._counts[slot] -= 1
        if slot == self.size - 1 and self._counts[slot] == 0 and slot >= self._first_new:
            del self._slot[token]
            self.size -= 1

    def along(self, draft: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """(ids, counts) before each token of a draft, and after the last."""
        snapshots = []
        for token in draft:
            snapshots.append((self.ids.copy(), self.counts.copy()))
            self.add(token)
        snapshots.append((self.ids.copy(), self.counts.copy()))
        for token in reversed(draft):
            self.remove(token)
        return snapshots

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: self.size]

    @property
    def counts(self) -> np.ndarray:
        return self._counts[: self.size]


class RowState:
    """What sampling keeps for one sequence: its history, if a penalty needs it, its biases and its other
    controls."""

    def __init__(self, sequence: Sequence) -> None:
        params = sequence.request.params
        self.history: History | None = None
        if params.uses_history:
            self.history = History(sequence.ids[: sequence.prompt_length])
            for token in sequence.ids[sequence.prompt_length :]:  # of a resumed answer
                self.history.add(token)
        bias = dict(params.logit_bias)
        self.bias = _pairs(bias)
        # An id both biased and banned is banned; each id stands once in a row's list.
        # Of a sequence with a form its mask has the bans, because it knows whether anything else is left.
        bans = params.min_tokens > 0 and sequence.matcher is None
        banned = bias | dict.fromkeys(sequence.stop_ids, -np.inf) if bans else bias
        self.banned = _pairs(banned)
        self.min_tokens = params.min_tokens
        self.controls = (  # in the order of the fields that `_static_rows` writes
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            -1 if params.logprobs is None else params.logprobs,
        )

    def bias_now(self, generated: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, values) for the next id, `generated` ids into the answer."""
        return self.banned if generated < self.min_tokens else self.bias


class RowBuilder:
    """Builds the SampleRows of each step; the arrays are reused, so a step's rows are valid until the next build.

    Args:
        drafting: build only the last row of each sequence, without log-probabilities: the next token of its draft.

    `histories`: whether any of the last rows counts the ids before it; `digests`: whether a digest of any of their
    logits is wanted.
    """

    def __init__(self, drafting: bool = False) -> None:
        self._drafting = drafting
        self._sequences: list[Sequence] = []
        self._rows_by_shape: dict[tuple[int, ...], SampleRows] = {}  # by the rows of each sequence
        self.histories = self.digests = self._biases = False

    def build(self, sequences: list[Sequence]) -> SampleRows:
        """A row for the id at position len(ids) of each sequence, and one for each position after a drafted token."""
        if sequences != self._sequences:
            self._prepare(sequences)
        if any(s.draft for s in sequences):
            offsets = [[len(s.draft)] if self._drafting else range(len(s.draft) + 1) for s in sequences]
            shape = tuple([len(offset) for offset in offsets])
        else:
            offsets, shape = [range(1)] * len(sequences), (1,) * len(sequences)
        rows = self._rows_by_shape.get(shape)
        if rows is None:
            if len(self._rows_by_shape) == MOST_SHAPES:
                self._rows_by_shape.clear()
            rows = self._rows_by_shape[shape] = _static_rows(sequences, shape, self._drafting)
        each_row = [(s, j) for s, each in zip(sequences, offsets, strict=True) for j in each]
        rows.position[:] = [len(s.ids) + j for s, j in each_row]
        if self.histories:
            pairs = [pair for s in sequences for pair in self._histories_of(s)]
            rows.hist_start = _starts([len(ids) for ids, _ in pairs])
            rows.hist_ids = np.concatenate([ids for ids, _ in pairs])
            rows.hist_counts = np.concatenate([counts for _, counts in pairs])
        if self._biases:
            biases = [s.sampling.bias_now(s.generated + j) for s, j in each_row]
            rows.bias_start = _starts([len(ids) for ids, _ in biases])
            rows.bias_ids = np.concatenate([ids for ids, _ in biases])
            rows.bias_values = np.concatenate([values for _, values in biases])
        return rows

    def _prepare(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence.sampling is None:
                sequence.sampling = RowState(sequence)
        self._sequences, self._rows_by_shape = list(sequences), {}
        self.histories = any(s.sampling.history is not None for s in sequences)
        self.digests = any(s.request.params.digests for s in sequences)
        self._biases = any(len(s.sampling.banned[0]) for s in sequences)

    def _histories_of(self, sequence: Sequence) -> list[tuple[np.ndarray, np.ndarray]]:
        history, draft = sequence.sampling.history, sequence.draft
        if history is None:
            return [(NO_IDS, NO_IDS)] * (1 if self._drafting else len(draft) + 1)
        if not draft:
            return [(history.ids, history.counts)]
        along: list[tuple[np.ndarray, np.ndarray]] = history.along(draft)
        return along[-1:] if self._drafting else along


def _static_rows(sequences: list[Sequence], shape: tuple[int, ...], drafting: bool) -> SampleRows:
    """Everything that stays the same as long as the shape does; histories and biases empty."""
    rows = SampleRows.greedy(sum(shape))
    repeated = [s for s, count in zip(sequences, shape, strict=True) for _ in range(count)]
    rows.seed[:] = [s.request.noise for s in repeated]
    rows.sample_index[:] = [s.index for s in repeated]
    if not repeated:
        return rows
    controls = [s.sampling.controls for s in repeated]
    distinct = set(controls)
    columns = distinct.pop() if len(distinct) == 1 else zip(*controls, strict=True)  # one value, or one for each row
    fields = rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.repetition, rows.presence, rows.frequency
    for field, values in zip((*fields, rows.logprobs), columns, strict=True):
        field[:] = values
    if drafting:
        rows.logprobs[:] = -1
    return rows


def _starts(sizes: Items[int]) -> np.ndarray:
    starts = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=starts[1:])
    return starts


def _pairs(values: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
    ordered = sorted(values.items())
    return np.array([i for i, _ in ordered], np.int32), np.array([v for _, v in ordered], np.float32)
