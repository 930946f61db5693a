"""A loss over many rows whose logits are never all in memory at once."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor

from roofline.train.model.autograd import AutogradContext

LOGITS = 1 << 24  # elements of logits that are in memory at a time
LEAST_ROWS, MOST_ROWS = 1024, 4096  # with more, a sum over rows of one class overflows fp16, whatever the loss scale


def chunk_rows(vocab: int) -> int:
    """Rows of a chunk; with fewer, adding up the gradients of the head would take longer."""
    return min(MOST_ROWS, max(LEAST_ROWS, LOGITS // vocab))


class Sliceable(Protocol):
    """What a loss takes for each row beside the row itself: a tensor of targets, or something that is cut like one."""

    def __getitem__(self, rows: slice, /) -> "Sliceable": ...


class ChunkedLoss(torch.autograd.Function):
    """Computes a loss chunk by chunk; the forward pass already takes the gradients of each chunk, if `trains`.

    The caller says whether it does: inside a forward pass torch shows neither no_grad nor what is behind it.

    This saves memory as Liger's fused linear cross-entropy does (Hsu et al. 2024), for any family's head.
    """

    @staticmethod
    def forward(
        ctx: AutogradContext,
        loss: Callable[..., Tensor],
        chunk: int,
        trains: bool,
        x: Tensor,
        targets: Sliceable,
        *weights: Tensor,
    ) -> Tensor:
        needs_grad = trains and any(ctx.needs_input_grad)
        total = torch.zeros((), device=x.device)
        into_x = torch.empty_like(x) if needs_grad else None
        # In float32: parameters in 16 bits would lose what is small beside the sum.
        trained = [needs_grad and needed for needed in ctx.needs_input_grad[5:]]
        own_weights = [w for w, own in zip(weights, trained, strict=True) if own]
        into_weights = [torch.zeros_like(w, dtype=torch.float32) for w in own_weights]
        # Once for all chunks: autocast keeps a copy in 16 bits of each tensor that it meets until the microbatch ends.
        leaves = [w.detach().requires_grad_(own) for w, own in zip(weights, trained, strict=True)]
        for start in range(0, len(x), chunk):
            part = slice(start, start + chunk)
            inputs = [x[part].detach().requires_grad_(needs_grad), *leaves]
            with torch.enable_grad() if needs_grad else nullcontext():
                part_loss = loss(targets[part], *inputs)
            total += part_loss.detach()
            if into_x is not None:
                into_x[part] = _add_gradients(part_loss, inputs, into_weights)
        sums = [sum_.to(w.dtype) for sum_, w in zip(into_weights, own_weights, strict=True)]
        ctx.save_for_backward(*([into_x, *sums] if into_x is not None else []))
        return total

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        into_x, *sums = [saved.mul_(grads[0]) for saved in ctx.saved_tensors]
        of_weights = iter(sums)
        into_weights = [next(of_weights) if needed else None for needed in ctx.needs_input_grad[5:]]
        return None, None, None, into_x, None, *into_weights


def _add_gradients(loss: Tensor, inputs: Sequence[Tensor], sums: Sequence[Tensor]) -> Tensor:
    """The gradient of the first input; those of the others are added to `sums`, and freed before the next chunk."""
    trained = [tensor for tensor in inputs if tensor.requires_grad]
    into_x, *grads = torch.autograd.grad(loss, trained, allow_unused=True)
    for sum_, grad in zip(sums, grads, strict=True):
        if grad is not None:
            sum_ += grad
    return into_x
