"""Causal attention with gradients on CPUs, as matrix products of a block of queries at a time.

The forward pass keeps no weights; the backward pass recomputes them, as FlashAttention does (Dao et al. 2022). Keys
behind a block's last query are left out of its products. What is done to the scores takes longer than the products, so
they are passed over few times: with torch's fused softmax and its gradient, in place, and in their own type.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from roofline.ops.rows import fused_attention
from roofline.train.model.autograd import AutogradContext

BLOCKS = 4  # of queries: 62.5% of all scores are computed
LEAST = 64  # queries of a block; smaller products are slower


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Causal attention of q, k, v [rows, heads, length, head_dim]; returns the shape of q.

    bias: float32 [rows or 1, heads or 1, length, length], added to scores, -inf for later tokens; gets no gradient.
    Scores in 16 bits are rounded to that type before the softmax, which is computed in float32.
    """
    return _Blocks.apply(q.contiguous(), k.contiguous(), v.contiguous(), bias, scale)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Attention in blocks where they were measured faster than torch's kernel (docs/decisions.md), else that kernel.

    q and k, which norms leave in float32, are taken in the dtype that autocast gave v."""
    q, k = q.to(v.dtype), k.to(v.dtype)
    if q.device.type == "cpu" and (q.dtype == torch.bfloat16 or (q.dtype == torch.float32 and q.shape[2] <= 512)):
        return attend_in_blocks(q, k, v, bias, scale)
    return fused_attention(q, k, v, bias, scale)


def _cuts(length: int) -> Iterator[tuple[slice, slice]]:
    """The queries and the keys of each block."""
    size = max(LEAST, -(-length // (BLOCKS if length > BLOCKS * LEAST else 2)))
    for start in range(0, length, size):
        end = min(length, start + size)
        yield slice(start, end), slice(0, end)


def _is_exact(scale: float) -> bool:
    """Whether it is a power of two: then q times it are the same numbers, and no score needs to be multiplied."""
    return math.frexp(scale)[0] == 0.5


def _weights(scores: Tensor, bias: Tensor | None, hidden: Tensor, scale: float, keys: int) -> Tensor:
    """The weights of a block from its scores, which are overwritten; both [rows, heads, ..] with the keys in dimension
    `keys`.

    bias: of the same block. hidden: of the queries and the last keys, -inf for what is not seen; used without a bias.
    """
    kind = scores.dtype
    if scale != 1:
        scores = scores.float().mul_(scale)
    if bias is not None:
        scores = (scores if bias.dtype == scores.dtype else scores.float()).add_(bias)
    else:
        size = hidden.shape[0]
        scores.narrow(keys, scores.shape[keys] - size, size).add_(hidden)
    return torch.softmax(scores, keys).to(kind)


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        exact, outs = _is_exact(scale), []
        q = q * scale if exact else q
        for queries, keys in _cuts(q.shape[2]):
            block_bias = None if bias is None else bias[:, :, queries, keys]
            hidden = _hidden(q, queries, keys)
            # Scores have no name here, so that they are freed when the weights are there.
            weights = _weights(
                _product(q[:, :, queries], k[:, :, keys].mT), block_bias, hidden, 1 if exact else scale, 3
            )
            outs.append(_product(weights, v[:, :, keys]))
            del weights
        ctx.save_for_backward(q, k, v, bias)
        ctx.scale = scale
        return torch.cat(outs, 2)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias = ctx.saved_tensors
        grad, exact, into_q = grads[0].contiguous(), _is_exact(ctx.scale), []
        into_k, into_v = (torch.zeros(t.shape, device=t.device) for t in (k, v))
        for queries, keys in _cuts(q.shape[2]):
            # Keys by queries: two products need no transposition, and torch.compile does not recognise the scores of
            # the forward pass, which it would then keep for all layers.
            # Copied, as adding a transposed view takes ten times as long.
            block_bias = None if bias is None else bias[:, :, queries, keys].mT.contiguous()
            hidden, factor = _hidden(q, queries, keys).T.contiguous(), 1 if exact else ctx.scale
            weights = _weights(_product(k[:, :, keys], q[:, :, queries].mT), block_bias, hidden, factor, 2)
            into_v[:, :, keys] += _product(weights, grad[:, :, queries])
            into_scores = torch._softmax_backward_data(
                _product(v[:, :, keys], grad[:, :, queries].mT), weights, 2, weights.dtype
            )
            del weights
            if not exact:
                into_scores = into_scores.mul_(ctx.scale)
            into_q.append(_product(into_scores.mT, k[:, :, keys]))
            into_k[:, :, keys] += _product(into_scores, q[:, :, queries])
            del into_scores
        into_q_sum = torch.cat(into_q, 2)
        return into_q_sum.mul_(ctx.scale) if exact else into_q_sum, into_k.to(k.dtype), into_v.to(v.dtype), None, None


def _hidden(q: Tensor, queries: slice, keys: slice) -> Tensor:
    """[queries, queries]: 0 for keys that a query of a block sees among the last ones, -inf for those behind it."""
    size = min(keys.stop, q.shape[2]) - queries.start
    return torch.full((size, size), -math.inf, dtype=q.dtype, device=q.device).triu_(1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix products of each row's heads."""
    rows, heads = a.shape[:2]
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).view(rows, heads, a.shape[2], b.shape[3])
