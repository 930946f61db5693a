"""Causal attention with gradients on CPUs, as matrix products of a block of queries at a time.

The forward pass keeps the result and the logarithm of each query's sum of weights; the backward pass recomputes the
weights, as FlashAttention-2 does (Dao 2023). Keys behind a block's last query are left out of its products.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from roofline.ops.rows import fused_attention
from roofline.train.model.autograd import Context

BLOCKS = 4  # of queries: 62.5% of all scores are computed
LEAST = 64  # queries of a block; smaller products are slower


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Causal attention of q, k, v [rows, heads, length, head_dim]; returns the shape of q.

    bias: float32 [rows or 1, heads or 1, length, length], added to scores, -inf for later tokens; gets no gradient.
    Scores in 16 bits are rounded to that type before the softmax, which is computed in float32.
    """
    return _Blocks.apply(q.contiguous(), k.contiguous(), v.contiguous(), bias, scale)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Attention in blocks where they were measured faster than torch's kernel (docs/decisions.md), else that kernel."""
    if q.device.type == "cpu" and (q.dtype == torch.bfloat16 or (q.dtype == torch.float32 and q.shape[2] <= 512)):
        return attend_in_blocks(q, k, v, bias, scale)
    return fused_attention(q, k, v, bias, scale)


def _cuts(length: int) -> Iterator[tuple[slice, slice]]:
    """The queries and the keys of each block."""
    size = max(LEAST, -(-length // (BLOCKS if length > BLOCKS * LEAST else 2)))
    for start in range(0, length, size):
        end = min(length, start + size)
        yield slice(start, end), slice(0, end)


def _hide(scores: Tensor, value: float, queries: slice) -> None:
    """Write `value` over what queries [.., queries, keys] do not see, in place: only the last keys lie behind any."""
    last = scores[..., queries.start :]
    at = torch.arange(last.shape[-1], device=scores.device)
    last.masked_fill_(at[None, :] > at[:, None], value)


def _is_exact(scale: float) -> bool:
    """Whether it is a power of two: then q times it are the same numbers, and no score needs to be multiplied."""
    return math.frexp(scale)[0] == 0.5


class _Blocks(torch.autograd.Function):
    """Passes over the scores take most of its time, so there are few, and they write in place."""

    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        outs, sums, exact = [], [], _is_exact(scale)
        q = q * scale if exact else q
        for queries, keys in _cuts(q.shape[2]):
            scores = torch.matmul(q[:, :, queries], k[:, :, keys].transpose(-1, -2)).float()
            if not exact:
                scores.mul_(scale)
            if bias is None:
                _hide(scores, -math.inf, queries)
            else:
                scores.add_(bias[:, :, queries, keys])
            most = scores.amax(-1, keepdim=True)
            weights = scores.sub_(most).exp_()
            total = weights.sum(-1, keepdim=True)
            out = torch.matmul(weights.to(q.dtype), v[:, :, keys])
            outs.append((out.float() / total).to(q.dtype))
            sums.append(most + total.log())
        out = torch.cat(outs, 2)
        ctx.save_for_backward(q, k, v, bias, out, torch.cat(sums, 2))
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, out, sums = ctx.saved_tensors
        grad, exact = grads[0].contiguous(), _is_exact(ctx.scale)
        shared = (grad.float() * out.float()).sum(-1)[:, :, None]  # [rows, heads, 1, queries], of all keys of each
        sums = sums.transpose(-1, -2)
        into_q = []
        into_k, into_v = (torch.zeros(t.shape, device=t.device) for t in (k, v))
        for queries, keys in _cuts(q.shape[2]):
            # Keys by queries: two products need no transposition, and torch.compile does not recognise the scores of
            # the forward pass, which it would then keep for all layers.
            scores = torch.matmul(k[:, :, keys], q[:, :, queries].transpose(-1, -2)).float()
            if not exact:
                scores.mul_(ctx.scale)
            if bias is not None:
                scores.add_(bias[:, :, queries, keys].transpose(-1, -2))
            weights = scores.sub_(sums[..., queries]).exp_()
            if bias is None:
                _hide(weights.transpose(-1, -2), 0.0, queries)
            into_weights = torch.matmul(v[:, :, keys], grad[:, :, queries].transpose(-1, -2)).float()
            into_scores = into_weights.sub_(shared[..., queries]).mul_(weights)
            into_scores = (into_scores if exact else into_scores.mul_(ctx.scale)).to(q.dtype)
            into_q.append(torch.matmul(into_scores.transpose(-1, -2), k[:, :, keys]))
            into_k[:, :, keys] += torch.matmul(into_scores, q[:, :, queries])
            into_v[:, :, keys] += torch.matmul(weights.to(q.dtype), grad[:, :, queries])
        into_q_sum = torch.cat(into_q, 2)
        return into_q_sum.mul_(ctx.scale) if exact else into_q_sum, into_k.to(k.dtype), into_v.to(v.dtype), None, None
