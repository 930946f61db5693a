"""What `sample` receives and returns: a struct of arrays over a step's logit rows, shared by every backend.

Meaning, in this order: logit bias and masks; repetition penalty over prompt and generated ids (divide when positive,
multiply when negative); presence and frequency penalties over generated ids; temperature; top-k; top-p; min-p;
then Gumbel-max with noise from a counter-based generator keyed by (seed, sample index, position, token id).
Every tie goes to the lowest id. Log-probabilities are those of the raw logits.
"""

from dataclasses import dataclass

import numpy as np

MAX_LOGPROBS = 20


@dataclass
class SampleRows:
    """Arrays of length rows; CSR lists for history and bias.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0, repetition 1, presence 0, frequency 0 are off;
    position: absolute position of the token being sampled; sample_index: which of a request's n;
    hist_counts: times an id was generated (0: it is only in the prompt); bias_values may be -inf (a ban);
    mask: allowed ids as bits, uint32 [rows, ceil(vocab / 32)], or None; logprobs: -1 none, else how many top entries.
    """

    temperature: np.ndarray  # float32
    top_k: np.ndarray  # int32
    top_p: np.ndarray  # float32
    min_p: np.ndarray  # float32
    seed: np.ndarray  # uint64
    sample_index: np.ndarray  # int32
    position: np.ndarray  # int32
    repetition: np.ndarray  # float32
    presence: np.ndarray  # float32
    frequency: np.ndarray  # float32
    hist_start: np.ndarray  # int32 [rows + 1]
    hist_ids: np.ndarray  # int32
    hist_counts: np.ndarray  # int32
    bias_start: np.ndarray  # int32 [rows + 1]
    bias_ids: np.ndarray  # int32
    bias_values: np.ndarray  # float32
    logprobs: np.ndarray  # int32
    mask: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return len(self.temperature)

    @classmethod
    def greedy(cls, rows: int) -> "SampleRows":
        """Rows that take the largest logit, with nothing else switched on."""
        zeros, ones = np.zeros(rows, np.float32), np.ones(rows, np.float32)
        none = np.zeros(rows, np.int32)
        return cls(
            temperature=zeros.copy(),
            top_k=none.copy(),
            top_p=ones.copy(),
            min_p=zeros.copy(),
            seed=np.zeros(rows, np.uint64),
            sample_index=none.copy(),
            position=none.copy(),
            repetition=ones.copy(),
            presence=zeros.copy(),
            frequency=zeros.copy(),
            hist_start=np.zeros(rows + 1, np.int32),
            hist_ids=np.zeros(0, np.int32),
            hist_counts=np.zeros(0, np.int32),
            bias_start=np.zeros(rows + 1, np.int32),
            bias_ids=np.zeros(0, np.int32),
            bias_values=np.zeros(0, np.float32),
            logprobs=np.full(rows, -1, np.int32),
        )


@dataclass
class Sampled:
    """The chosen ids and, where asked for, log-probabilities.

    ids int32 [rows]; logprob float32 [rows] (NaN where not asked); top_ids int32 and top_logprobs float32
    [rows, MAX_LOGPROBS], filled up to each row's `logprobs`, ids -1 beyond.
    """

    ids: np.ndarray
    logprob: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
