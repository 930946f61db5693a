"""Golden prompts: a few fixed texts, and how far an engine's logits are from those of a slow reference on them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

# Plain words, numbers and code: each crosses pages of the cache in every vocabulary we know.
TEXTS = (
    "The capital of France is Paris, and the capital of Germany is Berlin. The capital of Italy is Rome, and the "
    "capital of Spain is Madrid. All of them lie in Europe, and each has more than two million inhabitants.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\n"
    "for i in range(10):\n    print(i, fibonacci(i))\n",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30",
    "Water boils at one hundred degrees Celsius and freezes at zero. On a high mountain it boils sooner, because the "
    "air presses less on it there; salt in the water makes it freeze later, which is why roads are salted.",
)
LENGTH = 32  # tokens of a prompt: two pages of the cache
PLACES = 8  # positions of a prompt whose logits are compared
MOST_KL = 0.05  # nats, on average over all positions
LEAST_AGREEMENT = 0.8  # part of the positions at which both have the same most likely token


class Encode(Protocol):
    """A tokenizer's method."""

    def __call__(self, text: str, *, add_special: bool) -> list[int]:
        """The ids of a text; add_special: with the marks that the model wants around it."""


@dataclass(frozen=True)
class GoldenPrompt:
    """ids, and the positions among them after which logits are compared."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True)
class GoldenComparison:
    """kl: the Kullback-Leibler divergence of the engine's next-token probabilities from the reference's, in nats, the
    mean over `positions` places; agreement: the part of them at which both have the same most likely token."""

    kl: float
    agreement: float
    positions: int

    @property
    def within(self) -> bool:
        """Whether the thresholds are kept; a KL that is no number does not."""
        return self.kl <= MOST_KL and self.agreement >= LEAST_AGREEMENT

    def __str__(self) -> str:
        return (
            f"KL {self.kl:.2g} nats (at most {MOST_KL:g}), the same most likely token at {self.agreement:.0%} of "
            f"{self.positions} positions (at least {LEAST_AGREEMENT:.0%})"
        )


def golden_prompts(encode: Encode, longest: int) -> list[GoldenPrompt]:
    """The texts as ids. longest: tokens that the engine takes in a prompt."""
    prompts = []
    for text in TEXTS:
        ids = encode(text, add_special=True)[: min(LENGTH, longest)]
        if ids:
            places = np.unique(np.linspace(len(ids) / PLACES, len(ids), PLACES).astype(int).clip(min=1))
            prompts.append(GoldenPrompt(tuple(ids), tuple((places - 1).tolist())))
    return prompts


def compare_row(reference: np.ndarray, logits: np.ndarray) -> tuple[float, bool]:
    """The divergence at one position, in nats, and whether both have the same most likely token. Both are [vocab]."""
    p, q = _log_probabilities(reference), _log_probabilities(logits)
    return float(np.sum(np.exp(p) * (p - q))), bool(np.argmax(reference) == np.argmax(logits))


def summarize(rows: Sequence[tuple[float, bool]]) -> GoldenComparison:
    """What `compare_row` said of each position, as one. A divergence that is no number is an infinite one."""
    kl, agreement = (float(np.mean(column)) for column in zip(*rows, strict=True))
    return GoldenComparison(math.inf if math.isnan(kl) else max(0.0, kl), agreement, len(rows))


def _log_probabilities(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
