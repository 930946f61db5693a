"""The cross entropy of logits whose memory becomes that of their gradient."""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import nll_loss

from roofline.train.model.autograd import AutogradContext

IGNORED = -100  # a target that adds nothing to the loss
# Elements of a block, and its rows at least: it takes three tensors in float32. Accelerators wait for launches instead.
BLOCK, LEAST_ROWS, ACCELERATED_ROWS = 1 << 20, 64, 256
_SUM = 2  # torch's number of the reduction


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of the cross entropies of logits [n, vocab], float32; targets: int64 [n], of which IGNORED add nothing.

    The backward pass writes the gradient of the logits over them, so nothing else may read them by then. Loss and
    gradient are those of torch's own function on `logits.float()`, to the bit.
    """
    return cast(Tensor, _CrossEntropy.apply(logits, targets))


def log_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    """The log-probability of each target, float32 [n], without gradients. logits: [n, vocab]; targets: int64 [n]."""
    picked = torch.empty(targets.shape, device=logits.device)
    for rows in _blocks(logits):
        picked[rows] = _log_softmax(logits[rows]).gather(1, targets[rows, None])[:, 0]
    return picked


def weighted_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """The sum of weight * cross entropy over logits [n, vocab], float32; weights: float32 [n].

    Memory as for `cross_entropy`; no target is IGNORED.
    """
    return cast(Tensor, _WeightedCrossEntropy.apply(logits, targets, weights))


class _WeightedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets, weights)
        return -(log_probabilities(logits, targets) * weights).sum()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, weights = ctx.saved_tensors
        for rows in _blocks(logits):
            slopes = _log_softmax(logits[rows]).exp_()  # float32 [rows, vocab]
            slopes.scatter_add_(1, targets[rows, None], slopes.new_full((len(slopes), 1), -1.0))
            logits[rows] = slopes.mul_((weights[rows] * grad)[:, None]).to(logits.dtype)
            del slopes  # otherwise it lives until the next block has its own
        return logits.detach(), None, None


class _CrossEntropy(torch.autograd.Function):
    """Computes blocks of rows one after the other, with the functions that torch's own cross entropy is made of.

    torch has logits, their logarithms of softmax, and two gradients, all of them in float32. Here only a block has
    them, and the backward pass computes its logarithms again. Each row is computed for itself, so blocks change no bit.
    """

    @staticmethod
    def forward(ctx: AutogradContext, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets)
        counts = targets != IGNORED
        classes = targets.where(counts, 0)[:, None]  # [n, 1]
        picked = torch.empty(classes.shape, device=logits.device)  # float32 [n, 1]
        for rows in _blocks(logits):
            picked[rows] = _log_softmax(logits[rows]).gather(1, classes[rows])
        # The sum over all rows at once, in torch's order of additions.
        return nll_loss(picked, torch.where(counts, 0, IGNORED), ignore_index=IGNORED, reduction="sum")

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None]:
        logits, targets = ctx.saved_tensors
        aten = torch.ops.aten
        for rows in _blocks(logits):
            scores = _log_softmax(logits[rows])  # float32 [rows, vocab]
            into_scores = aten.nll_loss_backward(grad, scores, targets[rows], None, _SUM, IGNORED, grad)
            logits[rows] = aten._log_softmax_backward_data(into_scores, scores, 1, scores.dtype)
            del scores, into_scores  # otherwise they live until the next block has its own
        return logits.detach(), None


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.float(), 1)


def _blocks(logits: Tensor) -> Iterator[slice]:
    """The rows of each block."""
    count, vocab = logits.shape
    step = max(LEAST_ROWS if logits.device.type == "cpu" else ACCELERATED_ROWS, BLOCK // vocab)
    return (slice(start, start + step) for start in range(0, count, step))
