"""Objectives that are functions of the targets' log-probabilities, such as preferences, over the chunked loss.

Let L be such an objective and p_i the log-probability of target i. The gradient of L is the sum over i of dL/dp_i times
the gradient of p_i, which is that of a cross entropy with the weight -dL/dp_i. So the head computes all p_i first,
without gradients; autograd differentiates L, a function of few numbers; then the chunked loss computes a weighted cross
entropy. Blocks are computed once, and logits are never all in memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roofline.train.model.chunked_loss import ChunkedLoss
from roofline.train.model.cross_entropy import IGNORED, log_probabilities, weighted_cross_entropy

Logits = Callable[[Tensor, Sequence[Tensor]], Tensor]  # of rows x [n, width] and the head's weights: [n, vocab]


@dataclass(frozen=True)
class TrainingObjective:
    """value: a differentiable function of the log-probabilities of all targets, float32 [rows, length], where IGNORED
    ones have 0; it gives a scalar. temperature: logits are divided by it."""

    value: Callable[[Tensor], Tensor]
    temperature: float = 1.0


@dataclass(frozen=True)
class Weighted:
    """Targets, int64 [n], and the weight of the loss of each, float32 [n]."""

    targets: Tensor
    weights: Tensor

    def __getitem__(self, rows: slice) -> "Weighted":
        return Weighted(self.targets[rows], self.weights[rows])


def objective_loss(
    objective: TrainingObjective, logits: Logits, chunk: int, x: Tensor, targets: Tensor, weights: Sequence[Tensor]
) -> Tensor:
    """The objective's value, float32 [], with its gradient.

    Args:
        logits: the head. chunk: rows of x whose logits are in memory at a time. weights: the head's.
        x: [rows * length, width]. targets: int64 [rows, length].
    """
    trains = torch.is_grad_enabled()
    flat = targets.reshape(-1)
    places = (flat != IGNORED).nonzero()[:, 0]  # the head computes no other rows
    picked, goals = x[places], flat[places]

    def tempered(rows: Tensor, weights: Sequence[Tensor]) -> Tensor:
        result = logits(rows, weights)
        return result if objective.temperature == 1 else result / objective.temperature

    scores = torch.zeros(len(flat), device=x.device)
    with torch.no_grad():
        for start in range(0, len(places), chunk):
            part = slice(start, start + chunk)
            scores[places[part]] = log_probabilities(tempered(picked[part], weights), goals[part])
    scores.requires_grad_(trains)
    with torch.autocast(x.device.type, enabled=False):
        value = objective.value(scores.view_as(targets))
    if not trains:
        return value
    (slopes,) = torch.autograd.grad(value, scores)

    def chunk_loss(part: Weighted, rows: Tensor, *weights: Tensor) -> Tensor:
        return weighted_cross_entropy(tempered(rows, weights), part.targets, part.weights)

    goals_weighted = Weighted(goals, -slopes[places])
    carrier = ChunkedLoss.apply(chunk_loss, chunk, True, picked, goals_weighted, *weights)
    return value.detach() + (carrier - carrier.detach())
