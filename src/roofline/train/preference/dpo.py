"""Losses of pairs of answers, from their log-probabilities under the model and under the reference."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from roofline.train.config.objectives import DpoSection
from roofline.train.preference.objective import Facts

FIGURES = ("reward_chosen", "reward_rejected", "accuracy")  # sums over pairs of what the log shows the means of


def of_documents(values: Tensor, documents: Tensor, count: int) -> Tensor:
    """The sums of values [rows, length] over each document of a row, [rows, count]; documents: int64 [rows, length]."""
    return values.new_zeros(len(values), count).scatter_add(1, documents, values)


def pair_losses(section: DpoSection, policy: Tensor, reference: Tensor, lengths: Tensor) -> Tensor:
    """The loss of each pair, [pairs].

    policy, reference: [pairs, 2], the log-probabilities of the chosen and of the rejected answer as sums over their
    tokens. lengths: [pairs, 2], how many tokens these are.
    """
    ratios = policy - reference
    if section.loss in ("ipo", "sigmoid_norm"):
        ratios = ratios / lengths.clamp(min=1)
    margin = ratios[:, 0] - ratios[:, 1]
    if section.loss == "ipo":
        return (margin - 1 / (2 * section.beta)) ** 2
    margin = section.beta * margin
    if section.loss == "hinge":
        return torch.relu(1 - margin)
    smoothing, sign = section.label_smoothing, 1.0
    if section.loss == "robust":
        smoothing, sign = smoothing, -1.0
    right, wrong = -(1 - smoothing) * logsigmoid(margin), -smoothing * logsigmoid(-margin)
    return (right + sign * wrong) / (1 - 2 * smoothing if sign < 0 else 1)


class PairLoss:
    """The sum of the losses of the pairs in rows, whose documents 2i and 2i + 1 are pair i.

    What follows the last pair of a row (padding) is one more document, or documents without targets.
    """

    temperature = 1.0
    figures: tuple[str, ...] = FIGURES
    over_tokens = False

    def __init__(self, section: DpoSection) -> None:
        self.section = section

    def begin(self, again: bool) -> None:
        """Nothing is kept of the rows of a batch."""

    def units(self, counts: np.ndarray, facts: Facts) -> int:
        """How many pairs rows have."""
        return int(facts["pairs"].sum())

    def value(
        self, counts: Tensor, documents: Tensor | None, facts: Mapping[str, Tensor], note: Callable[[Tensor], None]
    ) -> Callable[[Tensor], Tensor]:
        """facts: "pairs" int64 [rows], how many each row has; "reference" float64 [rows, most pairs, 2]."""
        assert documents is not None, "a pair is two documents"
        reference = facts["reference"]
        max_length = reference.shape[1]
        here = torch.arange(max_length, device=counts.device) < facts["pairs"][:, None]  # [rows, most]
        # What follows the last pair goes together; padding has no targets and may go anywhere.
        documents = documents.clamp(0, 2 * max_length)
        lengths = of_documents(counts.double(), documents, 2 * max_length + 1)[:, :-1].view(-1, max_length, 2)[here]

        def value(scores: Tensor) -> Tensor:
            policy = of_documents(scores.double(), documents, 2 * max_length + 1)[:, :-1].view(-1, max_length, 2)[here]
            rewards = self.section.beta * (policy.detach() - reference[here])
            note(torch.stack([rewards[:, 0].sum(), rewards[:, 1].sum(), (rewards[:, 0] > rewards[:, 1]).sum()]))
            return pair_losses(self.section, policy, reference[here], lengths).sum().float()

        return value
