"""What samples the answers of a run: an engine, which the command hands in, as training and engine do not know each
other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class SampledAnswer:
    """An answer. ids: with the one that ended it, if any. scores: the log-probability of each id at temperature 1."""

    text: str
    ids: list[int]
    scores: list[float]
    ended: bool


class Sampler(Protocol):
    """It computes with the weights that training has now, and with those that the run began with."""

    def load(self, folder: Path) -> None:
        """Sample from now on with what training has written: an adapter of the base, or a model of its own."""

    def sample(
        self, prompts: Sequence[Sequence[int]], count: int, most: int, temperature: float, seeds: Sequence[int]
    ) -> list[list[SampledAnswer]]:
        """`count` answers to each prompt, of at most `most` ids; temperature 0: the likeliest. seeds: one a prompt."""

    def score(self, rows: Sequence[Sequence[int]], behind: Sequence[int]) -> list[list[float]]:
        """By the base: the log-probability of each id of a row behind the first so many."""

    def close(self) -> None:
        """Free what it takes."""


MakeSampler = Callable[[], Sampler]
