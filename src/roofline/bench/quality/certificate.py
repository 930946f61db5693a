"""What merging an adapter into a model changed, as facts that lie beside the written model: answers with the adapter
beside those of the merged model, and what rounding left of each matrix."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import roofline
from roofline.backends.options import LoadOptions
from roofline.bench.quality.score import STEP_TOKENS, load_to_score, log_probabilities
from roofline.bench.quality.survival import MatrixSurvival, total
from roofline.common.errors import ConfigError
from roofline.ops.batch import PAGE_TOKENS, Segment

if TYPE_CHECKING:
    from roofline.backends.base import Executable
    from roofline.text.tokenizers.tokenizer import Tokenizer
    from roofline.weights.adapter_merge import Merged
    from roofline.weights.adapters import Adapter
    from roofline.weights.checkpoint import Checkpoint

FORMAT = 1  # of the JSON object
LEAST_KEPT = 0.5  # of the change, below which a merge is refused: more is gone than is left
ANSWER_TOKENS = 24
WORST = 8  # matrices that are printed
PROBES = (
    "The capital of France is",
    "Question: What is the boiling point of water at sea level?\nAnswer:",
    "def fibonacci(n):\n    ",
    "Translate to German: Good morning, how are you?\n",
    '{"name": "Ada Lovelace", "born":',
    "Once upon a time, in a small village by the sea,",
    "Summarise in one sentence: The meeting was moved from Monday to Thursday because of the storm.\n",
    "1, 1, 2, 3, 5, 8, 13,",
)
NO_SERVED = "merged in float32"  # what is compared with where the adapter is not served


@dataclass(frozen=True)
class ComparedAnswers:
    """Two models on the same prompts.

    reference: what the merged model is compared with, "adapter served" or NO_SERVED; positions: whose logits were
    compared, of prompts and of the reference's greedy answers; largest, mean: absolute differences of logits;
    deviation: the standard deviation of the reference's, for their scale; kl, kl_largest: divergence of the merged
    model's next-token probabilities, in nats; same_top: the part of the positions with the same most likely token;
    greedy: of `prompts` so many have the same greedy answer, of ANSWER_TOKENS tokens.
    """

    reference: str
    prompts: int
    positions: int
    largest: float
    mean: float
    deviation: float
    kl: float
    kl_largest: float
    same_top: float
    greedy: int


@dataclass(frozen=True)
class QualityCertificate:
    """tied: whether the head is the embedding, in the model and in what was written alike. time: Unix seconds."""

    base: str
    adapter: str
    digest: str
    written: str
    tied: bool
    matrices: Sequence[MatrixSurvival]
    answers: ComparedAnswers
    time: int = field(default_factory=lambda: int(time.time()))

    def facts(self) -> dict[str, object]:
        """As plain values, for a JSON object."""
        return {
            "format": FORMAT,
            "roofline": roofline.__version__,
            "time": self.time,
            "base": self.base,
            "adapter": self.adapter,
            "adapter_digest": self.digest,
            "written": self.written,
            "tied_head": self.tied,
            "answers": {**vars(self.answers)},
            "all_matrices": total(self.matrices).facts(),
            "least_kept_allowed": LEAST_KEPT,
            "matrices": [matrix.facts() for matrix in self.matrices],
        }

    def lines(self) -> list[str]:
        """For people."""
        answers, sums = self.answers, total(self.matrices)
        head = "the head is the embedding, in both" if self.tied else "the head is a matrix of its own, in both"
        worst = sorted(self.matrices, key=lambda matrix: matrix.sums.projected_share)[:WORST]
        return [
            f"{len(self.matrices)} matrices changed by {sums.size:.2%} of their size; {head}",
            f"rounding lost {sums.loss:.3%} of the matrices and kept {sums.projected_share:.1%} of the adapter's "
            f"change (||written - W|| / ||change|| = {sums.survival:.3f}); least: "
            + ", ".join(f"{matrix.name} ({matrix.format}) {matrix.sums.projected_share:.1%}" for matrix in worst[:3]),
            f"against the model with the adapter ({answers.reference}), {answers.positions} positions of "
            f"{answers.prompts} prompts: logits differ by {answers.mean:.2g} on average and {answers.largest:.2g} at "
            f"most (standard deviation of logits {answers.deviation:.2g}), KL {answers.kl:.2g} (at most "
            f"{answers.kl_largest:.2g}), same top token {answers.same_top:.1%}",
            f"greedy answers of {ANSWER_TOKENS} tokens: {answers.greedy} of {answers.prompts} are the same",
        ]


def check_kept(matrices: Sequence[MatrixSurvival], output: Path) -> None:
    """Raise ConfigError where rounding took away more of the adapter than it left."""
    kept = total(matrices).projected_share
    if kept < LEAST_KEPT:
        forms = "/".join(sorted({matrix.format for matrix in matrices}))
        raise ConfigError(
            f"{output}: not written: rounded to {forms}, the merged matrices keep {kept:.1%} of what the adapter "
            f"changes, and {LEAST_KEPT:.0%} is the least: say --to q8 or --to bf16, serve the adapter unmerged "
            "(roofline serve --adapter), or write it so all the same with --force"
        )


def compare(
    model: "Merged", adapter: "Adapter", written: "Checkpoint", tokenizer: "Tokenizer", prompts: Sequence[str],
    load: LoadOptions,
) -> ComparedAnswers:  # fmt: skip
    """The written model beside the model with the adapter, which is served where that can be, else merged in float32.

    Raises ConfigError for prompts without tokens, and as loading does.
    """
    context = min(STEP_TOKENS, model.base.config["max_position"])
    max_prompt = max(1, context - ANSWER_TOKENS)  # of longer prompts the end is taken
    texts = [tokenizer.encode(text, add_special=True)[-max_prompt:] for text in prompts]
    if not texts or not all(texts):
        raise ConfigError("there must be at least one probe, and each needs text")
    served = not any(".mlp.experts." in matrix.tensor for matrix in adapter.matrices)
    first, slot = _reference(model, adapter, load, context, served)
    second = load_to_score(written, load, context, text=False).executable
    sums, greedy = _Differences(), 0
    try:
        for ids in texts:
            answer = _greedy(first, ids, min(ANSWER_TOKENS, context - len(ids)), slot)
            greedy += answer == _greedy(second, ids, len(answer), 0)
            whole = [*ids, *answer[:-1]]
            sums.add(_logits(first, whole, slot), _logits(second, whole, 0))
    finally:
        first.close()
        second.close()
    return sums.answers("adapter served" if served else NO_SERVED, len(texts), greedy)


def _reference(
    model: "Merged", adapter: "Adapter", load: LoadOptions, context: int, served: bool
) -> "tuple[Executable, int]":
    """What runs the model with the adapter, and the slot that its rows name."""
    from roofline.backends.base import Adapts

    if not served:
        return load_to_score(model.checkpoint, load, context, text=False).executable, 0
    options = replace(load, max_adapters=1, max_adapter_rank=max(adapter.rank, load.max_adapter_rank))
    executable = load_to_score(model.base, options, context, text=False).executable
    assert isinstance(executable, Adapts), "the options were checked"
    executable.adapters.set(1, adapter.matrices)
    return executable, 1


def _logits(executable: "Executable", ids: Sequence[int], slot: int) -> np.ndarray:
    """float32 [ids, vocab]."""
    pages = range(-(-len(ids) // PAGE_TOKENS))
    executable.batch.fill([Segment(ids, 0, pages, slot)], range(len(ids)))
    executable.forward()
    return np.array(executable.logits()[: len(ids)])


def _greedy(executable: "Executable", ids: Sequence[int], count: int, slot: int) -> list[int]:
    """The most likely next ids."""
    answer: list[int] = []
    pages = range(-(-(len(ids) + count) // PAGE_TOKENS))
    start, new = 0, list(ids)
    for _ in range(count):
        executable.batch.fill([Segment(new, start, pages, slot)], [len(new) - 1])
        executable.forward()
        start += len(new)
        new = [int(executable.logits()[0].argmax())]
        answer += new
    return answer


class _Differences:
    """What is collected of the positions."""

    def __init__(self) -> None:
        self._largest = self._absolute = self._squares = self._values = 0.0
        self._kls: list[float] = []
        self._same = 0

    def add(self, first: np.ndarray, second: np.ndarray) -> None:
        """first, second: float32 [positions, vocab]."""
        if first.shape != second.shape or not (np.isfinite(first).all() and np.isfinite(second).all()):
            raise ConfigError("the logits are no numbers, or the models have other vocabularies: the files are damaged")
        difference = np.abs(first - second)
        self._largest = max(self._largest, float(difference.max()))
        self._absolute += float(difference.sum(dtype=np.float64))
        self._squares += float((first.var(axis=1) * first.shape[1]).sum(dtype=np.float64))
        self._values += first.size
        logs = log_probabilities(first), log_probabilities(second)
        self._kls += np.einsum("ij,ij->i", np.exp(logs[0]), logs[0] - logs[1]).clip(min=0).tolist()
        self._same += int((first.argmax(axis=1) == second.argmax(axis=1)).sum())

    def answers(self, reference: str, prompts: int, greedy: int) -> ComparedAnswers:
        count = len(self._kls)
        deviation = (self._squares / self._values) ** 0.5
        mean = self._absolute / self._values
        kl, kl_largest = float(np.mean(self._kls)), max(self._kls)
        return ComparedAnswers(
            reference=reference,
            prompts=prompts,
            positions=count,
            largest=self._largest,
            mean=mean,
            deviation=deviation,
            kl=kl,
            kl_largest=kl_largest,
            same_top=self._same / count,
            greedy=greedy,
        )
