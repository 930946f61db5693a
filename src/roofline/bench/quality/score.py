"""Scores of a text under one model, or under several side by side: perplexity, divergence, agreement."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from roofline.backends.options import LoadOptions
from roofline.bench.quality.windows import ScoredWindow, windows_of
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.ops.batch import PAGE_TOKENS, Segment

if TYPE_CHECKING:
    from roofline.backends.base import Executable
    from roofline.bundle import LoadedModel
    from roofline.text.tokenizers.tokenizer import Tokenizer
    from roofline.weights.checkpoint import Checkpoint

STEP_TOKENS = 128  # computed at once: as many rows of logits are in memory
Progress = Callable[[int, int], None]  # scored tokens, and all


@dataclass(frozen=True)
class Score:
    """Of one model on a text.

    tokens: that were scored; nll: their mean negative log-probability, in nats; error: its standard error, as if the
    tokens were independent; seconds: of the forward passes; computed: tokens in those; kl, agreement: against the first
    model, the mean divergence of the next-token probabilities in nats and the part of the places with the same most
    likely token; kl_99: the divergence that 99 % of the places are below. None for the first model itself.
    """

    tokens: int
    nll: float
    error: float
    seconds: float
    computed: int
    kl: float | None = None
    kl_99: float | None = None
    agreement: float | None = None

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)

    @property
    def tokens_per_second(self) -> float:
        return self.computed / self.seconds

    def facts(self) -> dict[str, float | int | None]:
        """As plain values."""
        rates = {"perplexity": self.perplexity, "tokens_per_second": round(self.tokens_per_second, 1)}
        return {**vars(self), **rates}


def scoring_options(load: LoadOptions, context: int) -> LoadOptions:
    """Options of a model whose every token has a row of logits."""
    step = min(STEP_TOKENS, context)
    cache = -(-context // PAGE_TOKENS) * PAGE_TOKENS
    return replace(load, max_running=step, max_batch_tokens=step, max_model_len=context, cache_tokens=cache)


def load_to_score(source: "str | Checkpoint", load: LoadOptions, context: int, text: bool = True) -> "LoadedModel":
    """A model that `score` takes. Raises as `roofline.bundle.load`."""
    from roofline.bundle import load as load_model

    if load.ranks > 1:
        raise UnsupportedError("scoring a text on several ranks", "its logits are read in one process", ("one rank",))
    return load_model(source, scoring_options(load, context), text=text)


def text_windows(
    tokenizer: "Tokenizer", text: str, context: int, stride: int, limit: int | None = None
) -> list[ScoredWindow]:
    """The windows of a text, or of its first `limit` tokens, each with the mark that the model wants before it. Raises
    as `windows_of`."""
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    return windows_of(tokenizer.encode(text, add_special=False)[:limit], context, stride, bos)


def score(
    executables: "Sequence[Executable]", windows: Sequence[ScoredWindow], progress: Progress = lambda done, total: None
) -> list[Score]:
    """The scores of a text under several models of one vocabulary, all of which read the same ids in turn.

    Raises ConfigError where their vocabularies have other sizes, or logits are no numbers.
    """
    sizes = {executable.vocab_size for executable in executables}
    if len(sizes) > 1:
        raise ConfigError(f"models with {' and '.join(map(str, sorted(sizes)))} rows of logits cannot be compared")
    sums = [_Sums() for _ in executables]
    total = sum(len(window.ids) - window.first for window in windows)
    for window in windows:
        for step in _steps(window):
            base: np.ndarray | None = None
            for executable, each in zip(executables, sums, strict=True):
                logprobs = each.step(executable, step)
                if step.rows:
                    each.add(logprobs, step.targets, base)
                base = logprobs if base is None else base
            progress(len(sums[0].nlls), total)
    return [total.score() for total in sums]


@dataclass(frozen=True)
class _Step:
    """A part of a window. ids: computed, from position `start` on; rows: places among them after which `targets`
    follow, which are scored."""

    ids: Sequence[int]
    start: int
    rows: range
    targets: Sequence[int]


def _steps(window: ScoredWindow) -> Iterator[_Step]:
    for start in range(0, len(window.ids) - 1, STEP_TOKENS):
        end = min(start + STEP_TOKENS, len(window.ids) - 1)  # nothing follows the last id
        first = max(start + 1, window.first)
        rows = range(min(first, end + 1) - 1 - start, end - start)
        yield _Step(window.ids[start:end], start, rows, window.ids[first : end + 1])


class _Sums:
    """What is collected of one model."""

    def __init__(self) -> None:
        self.nlls: list[float] = []
        self.kls: list[float] = []
        self.same = self.computed = 0
        self.seconds = 0.0

    def step(self, executable: "Executable", step: _Step) -> np.ndarray:
        """Compute a step; float32 [rows, vocab], the log-probabilities in its rows."""
        pages = range(-(-(step.start + len(step.ids)) // PAGE_TOKENS))
        begun = time.perf_counter()
        executable.batch.fill([Segment(step.ids, step.start, pages)], step.rows or [len(step.ids) - 1])
        executable.forward()
        logits = executable.logits()
        self.seconds += time.perf_counter() - begun
        self.computed += len(step.ids)
        return log_probabilities(logits[: len(step.rows)])

    def add(self, logprobs: np.ndarray, wanted: Sequence[int], base: np.ndarray | None) -> None:
        picked = logprobs[np.arange(len(wanted)), list(wanted)]
        if not np.isfinite(picked).all():
            raise ConfigError("the model's logits are no numbers: its weights are damaged, or overflow")
        self.nlls += (-picked.astype(np.float64)).tolist()
        if base is not None:
            self.kls += np.einsum("ij,ij->i", np.exp(base), base - logprobs).clip(min=0).tolist()
            self.same += int((base.argmax(axis=1) == logprobs.argmax(axis=1)).sum())

    def score(self) -> Score:
        nlls = np.array(self.nlls)
        compared: dict[str, float] = {}
        if self.kls:
            compared = {"kl": float(np.mean(self.kls)), "kl_99": float(np.quantile(self.kls, 0.99))}
            compared["agreement"] = self.same / len(self.kls)
        error = float(nlls.std() / math.sqrt(len(nlls)))
        return Score(len(nlls), float(nlls.mean()), error, self.seconds, self.computed, **compared)


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """float32 [rows, vocab] of logits [rows, vocab]."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted
