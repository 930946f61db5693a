"""The loss of sampled answers by their advantages (GRPO), from the log-probabilities of their tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from roofline.train.config.objectives import GrpoSection
from roofline.train.preference.objective import Facts

FIGURES = ("ratio", "clipped", "kl")  # sums over tokens of what the log shows the means of


def advantages(section: GrpoSection, rewards: np.ndarray) -> np.ndarray:
    """How much better each answer is than its group, float64 [prompts, group]; rewards: the same shape."""
    centred = rewards - rewards.mean(1, keepdims=True)
    if section.scale == "none":
        return centred
    return centred / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)


def token_losses(
    section: GrpoSection, scores: Tensor, old: Tensor, advantage: Tensor, reference: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each token, whether the clipping took its gradient, and its divergence from the reference.

    scores, old, reference: log-probabilities now, when the answers were sampled, and of the reference, [rows, length];
    advantage: [rows, 1].
    """
    ratio = torch.exp(scores - old)
    high = section.clip if section.clip_high is None else section.clip_high
    bounded = ratio.clamp(1 - section.clip, 1 + high)
    losses = -torch.minimum(ratio * advantage, bounded * advantage)
    clipped = ((ratio < 1 - section.clip) & (advantage < 0)) | ((ratio > 1 + high) & (advantage > 0))
    if reference is None:
        return losses, clipped, torch.zeros_like(losses)
    apart = reference - scores
    kl = torch.exp(apart) - apart - 1
    return losses + section.kl * kl, clipped, kl.detach()


@dataclass
class Apart:
    """Differences of log-probabilities: the largest, their sum, and how many they are."""

    most: float = 0.0
    total: float = 0.0
    count: int = 0

    def add(self, differences: Tensor) -> None:
        """Take some in."""
        if len(differences):
            self.most = max(self.most, float(differences.max()))
            self.total += float(differences.sum())
            self.count += len(differences)


class AnswerLoss:
    """The sum of the losses of rows with one sampled answer each; what it is the mean over, `units` counts.

    Attributes:
        apart: how far log-probabilities are from those of the sampling, over the first `fresh` rows since it was set.
    """

    figures: tuple[str, ...] = FIGURES
    over_tokens = True

    def __init__(self, section: GrpoSection) -> None:
        self.section, self.temperature, self.apart, self.fresh = section, section.temperature, Apart(), 0
        self._before = Apart(), 0  # apart and fresh as the batch began

    def begin(self, again: bool) -> None:
        """Keep what is known of the answers so far, or go back to it."""
        if again:
            apart, self.fresh = self._before
            self.apart = replace(apart)
        else:
            self._before = replace(self.apart), self.fresh

    def units(self, counts: np.ndarray, facts: Facts) -> int:
        """What the loss is the mean over."""
        if self.section.loss == "dapo":
            return int(counts.sum())
        return len(counts) * (self.section.max_new_tokens if self.section.loss == "dr_grpo" else 1)

    def value(
        self, counts: Tensor, documents: Tensor | None, facts: Mapping[str, Tensor], note: Callable[[Tensor], None]
    ) -> Callable[[Tensor], Tensor]:
        """facts: "advantage" float32 [rows]; "old" float32 [rows, length], of the targets when they were sampled; with
        kl also "reference", the same shape."""
        old, advantage = facts["old"], facts["advantage"][:, None]
        each = counts.sum(1, keepdim=True).clamp(min=1) if self.section.loss == "grpo" else 1

        def value(scores: Tensor) -> Tensor:
            losses, clipped, kl = token_losses(self.section, scores, old, advantage, facts.get("reference"))
            moved = torch.where(counts, scores.detach() - old, 0)
            if self.fresh > 0:
                self.apart.add(moved.abs()[counts])
                self.fresh -= len(moved)
            ratios = torch.exp(moved)
            note(torch.stack([(each_ * counts).sum().double() for each_ in (ratios, clipped, kl)]))
            return (losses * counts / each).sum()

        return value
