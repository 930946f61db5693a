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


def _masked(bias: Tensor | None, scores: Tensor, queries: slice, keys: slice) -> Tensor:
    """Scores [rows, heads, queries, keys] with the bias; -inf where a query does not see a key."""
    if bias is not None:
        return scores + bias[:, :, queries, keys]
    at = torch.arange(queries.start, queries.stop, device=scores.device)[:, None]
    return scores.masked_fill(torch.arange(keys.stop, device=scores.device)[None, :] > at, -math.inf)


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        outs, sums = [], []
        for queries, keys in _cuts(q.shape[2]):
            scores = torch.matmul(q[:, :, queries], k[:, :, keys].transpose(-1, -2)).float() * scale
            scores = _masked(bias, scores, queries, keys)
            most = scores.amax(-1, keepdim=True)
            weights = (scores - most).exp()
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
        grad = grads[0].contiguous()
        shared = (grad.float() * out.float()).sum(-1)[:, :, None]  # [rows, heads, 1, queries], of all keys of each
        sums = sums.transpose(-1, -2)
        into_q = []
        into_k, into_v = (torch.zeros(t.shape, device=t.device) for t in (k, v))
        for queries, keys in _cuts(q.shape[2]):
            # Keys by queries: two products need no transposition, and torch.compile does not recognise the scores of
            # the forward pass, which it would then keep for all layers.
            scores = torch.matmul(k[:, :, keys], q[:, :, queries].transpose(-1, -2)).float() * ctx.scale
            scores = _masked(bias, scores.transpose(-1, -2), queries, keys).transpose(-1, -2)
            weights = (scores - sums[..., queries]).exp()
            into_weights = torch.matmul(v[:, :, keys], grad[:, :, queries].transpose(-1, -2)).float()
            into_scores = (weights * (into_weights - shared[..., queries]) * ctx.scale).to(q.dtype)
            into_q.append(torch.matmul(into_scores.transpose(-1, -2), k[:, :, keys]))
            into_k[:, :, keys] += torch.matmul(into_scores, q[:, :, queries])
            into_v[:, :, keys] += torch.matmul(weights.to(q.dtype), grad[:, :, queries])
        return torch.cat(into_q, 2), into_k.to(k.dtype), into_v.to(v.dtype), None, None
