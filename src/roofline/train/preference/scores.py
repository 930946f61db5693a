"""The log-probabilities of rows as training computes them, without a step."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from roofline.train.data.row_arrays import RowArrays
from roofline.train.preference.objective import Facts

if TYPE_CHECKING:
    from roofline.train.run.gradients import Gradients


class Scores:
    """An objective that keeps what it is a function of. last: float32 [rows, length] of the last rows."""

    figures: tuple[str, ...] = ()
    over_tokens = False

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = temperature
        self.last = torch.zeros(0, 0)

    def begin(self, again: bool) -> None:
        """Nothing is kept of the rows of a batch."""

    def units(self, counts: np.ndarray, facts: Facts) -> int:
        """Nothing is a mean."""
        return 0

    def value(
        self, counts: Tensor, documents: Tensor | None, facts: Mapping[str, Tensor], note: Callable[[Tensor], None]
    ) -> Callable[[Tensor], Tensor]:
        """Keep them."""

        def value(scores: Tensor) -> Tensor:
            self.last = scores.cpu()
            return scores.sum()

        return value


def scored(gradients: "Gradients", rows: RowArrays, temperature: float = 1.0) -> np.ndarray:
    """The log-probability of each row's targets where they are predicted, float32 [rows, length], 0 elsewhere. Without
    rows nothing is computed but what other ranks wait for."""
    result, objective, scores = np.zeros(rows.tokens.shape, np.float32), gradients.objective, Scores(temperature)
    gradients.objective = scores
    gradients.model.eval()
    with torch.no_grad():
        gradients.loss(*rows, {})
    gradients.model.train()
    gradients.objective = objective
    if len(result):
        result[:, : scores.last.shape[1]] = scores.last.numpy()
    return result
