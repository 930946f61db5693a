"""The sampling parameters of a step's rows, as arrays.

What a row needs is a function of its sequence, so the arrays are rebuilt only when the set of sequences changes; in
between only positions, histories and lifted bans are written.
"""

from collections.abc import Sequence as Items
from typing import Any

import numpy as np

from roofline.backends.sampling import SampleRows
from roofline.engine.params import SEED_RANGE
from roofline.engine.sequence import Sequence

NO_IDS = np.zeros(0, np.int32)
NO_VALUES = np.zeros(0, np.float32)


class History:
    """How often each id was generated; 0 for ids that stand only in the prompt. Arrays double when full."""

    def __init__(self, prompt: list[int]) -> None:
        distinct = list(dict.fromkeys(prompt))
        self._slot = {token: i for i, token in enumerate(distinct)}
        self._ids = np.array(distinct, np.int32)
        self._counts = np.zeros(len(distinct), np.int32)
        self.size = len(distinct)

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

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: self.size]

    @property
    def counts(self) -> np.ndarray:
        return self._counts[: self.size]


class RowState:
    """What sampling keeps for one sequence: its history, if a penalty needs it, and its biases."""

    def __init__(self, sequence: Sequence) -> None:
        params = sequence.request.params
        self.history = History(sequence.ids) if params.uses_history else None
        bias = dict(params.logit_bias)
        self.bias = _pairs(bias)
        # An id both biased and banned is banned; each id stands once in a row's list.
        banned = bias | dict.fromkeys(sequence.stop_ids, -np.inf) if params.min_tokens > 0 else bias
        self.banned = _pairs(banned)
        self.min_tokens = params.min_tokens

    def bias_now(self, generated: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, values) for the next id, `generated` ids into the answer."""
        return self.banned if generated < self.min_tokens else self.bias


class RowBuilder:
    """Builds the SampleRows of each step; the arrays are reused, so a step's rows are valid until the next build."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._rows = SampleRows.greedy(0)
        self._histories = self._biases = False

    def build(self, sequences: list[Sequence]) -> SampleRows:
        """One row for each sequence, which is about to get the id at position len(ids)."""
        if sequences != self._sequences:
            self._rows = _static_rows(sequences)
            self._sequences = sequences
            self._histories = any(s.sampling.history is not None for s in sequences)
            self._biases = any(len(s.sampling.banned[0]) for s in sequences)
        rows = self._rows
        rows.position[:] = [len(s.ids) for s in sequences]
        if self._histories:
            histories = [s.sampling.history for s in sequences]
            rows.hist_start = _starts([h.size if h else 0 for h in histories])
            rows.hist_ids = np.concatenate([h.ids if h else NO_IDS for h in histories])
            rows.hist_counts = np.concatenate([h.counts if h else NO_IDS for h in histories])
        if self._biases:
            biases = [s.sampling.bias_now(s.generated) for s in sequences]
            rows.bias_start = _starts([len(ids) for ids, _ in biases])
            rows.bias_ids = np.concatenate([ids for ids, _ in biases])
            rows.bias_values = np.concatenate([values for _, values in biases])
        return rows


def _static_rows(sequences: list[Sequence]) -> SampleRows:
    """Everything that stays the same as long as the rows do; histories and biases empty."""
    for sequence in sequences:
        if sequence.sampling is None:
            sequence.sampling = RowState(sequence)
    rows = SampleRows.greedy(len(sequences))
    params = [s.request.params for s in sequences]
    rows.temperature[:] = [p.temperature for p in params]
    rows.top_k[:] = [p.top_k for p in params]
    rows.top_p[:] = [p.top_p for p in params]
    rows.min_p[:] = [p.min_p for p in params]
    rows.seed[:] = [s.request.seed % SEED_RANGE for s in sequences]
    rows.sample_index[:] = [s.index for s in sequences]
    rows.repetition[:] = [p.repetition_penalty for p in params]
    rows.presence[:] = [p.presence_penalty for p in params]
    rows.frequency[:] = [p.frequency_penalty for p in params]
    rows.logprobs[:] = [-1 if p.logprobs is None else p.logprobs for p in params]
    return rows


def _starts(sizes: Items[int]) -> np.ndarray:
    starts = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=starts[1:])
    return starts


def _pairs(values: dict[int, Any]) -> tuple[np.ndarray, np.ndarray]:
    ordered = sorted(values.items())
    return np.array([i for i, _ in ordered], np.int32), np.array([v for _, v in ordered], np.float32)
