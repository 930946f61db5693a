"""What a run needs of an objective that is no sum of cross entropies."""

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from torch import Tensor

Facts = Mapping[str, np.ndarray]  # what the objective has to know of rows, [rows, ...]; [rows, length]: of their tokens


class RowObjective(Protocol):
    """An objective of rows, as a sum over units that a step takes the mean of.

    temperature: logits are divided by it. figures: names of what the log shows means of, over tokens or over units.
    """

    temperature: float
    figures: tuple[str, ...]
    over_tokens: bool

    def begin(self, again: bool) -> None:
        """Begin a batch. again: memory ended in it, so what was noted of its rows is to be forgotten."""

    def units(self, counts: np.ndarray, facts: Facts) -> int:
        """How many units rows have; counts: bool [rows, length], which targets count."""

    def value(
        self, counts: Tensor, documents: Tensor | None, facts: Mapping[str, Tensor], note: Callable[[Tensor], None]
    ) -> Callable[[Tensor], Tensor]:
        """The sum over units as a function of the targets' log-probabilities, float32 [rows, length].

        documents: int64 [rows, length], PADDING behind the last one; None where each row is one. note: takes the sums
        that the figures are the means of.
        """


def some_rows(facts: Facts, which: slice) -> Facts:
    """The facts of some of the rows."""
    return {name: array[which] for name, array in facts.items()}
