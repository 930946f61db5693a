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
    """Arrays of length rows; CSR lists for history and bias. Their order is that of the C++ core's arguments.

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
        off = {name: np.zeros(rows, np.float32) for name in ("temperature", "min_p", "presence", "frequency")}
        off |= {name: np.ones(rows, np.float32) for name in ("top_p", "repetition")}
        off |= {name: np.zeros(rows, np.int32) for name in ("top_k", "sample_index", "position")}
        off |= {"seed": np.zeros(rows, np.uint64), "logprobs": np.full(rows, -1, np.int32)}
        lists = {name: np.zeros(0, np.int32) for name in ("hist_ids", "hist_counts", "bias_ids")}
        lists |= {name: np.zeros(rows + 1, np.int32) for name in ("hist_start", "bias_start")}
        return cls(**off, **lists, bias_values=np.zeros(0, np.float32))


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
