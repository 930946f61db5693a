"""Rows of one length side by side, as training has them: a cache that keeps nothing, and attention with gradients.

The only fast torch form of `attend`; tests set it beside the reference.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class TurnedPositions:
    """Positions int [tokens] whose rope angles are computed already, once for all layers: cos, sin float32 [tokens,
    dim / 2]."""

    at: "Tensor"
    cos: "Tensor"
    sin: "Tensor"


@dataclass(frozen=True)
class Rows:
    """A KvCache that holds what the layer at hand wrote: no layer reads what another one, or another step, has written.

    count rows of `length` tokens; bias: None (each token sees itself and those before it), or what `score_bias` made.
    attend: what to take instead of `fused_attention`.
    """

    count: int
    length: int
    kv_heads: int
    bias: "Tensor | None" = None
    k: "Tensor | None" = None  # [count, kv_heads, length, head_dim]
    v: "Tensor | None" = None
    attend: "Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor] | None" = None

    def write(self, layer: int, k: "Tensor", v: "Tensor") -> "Rows":
        """With k, v [tokens, kv_heads, head_dim]."""
        shape = (self.count, self.length, self.kv_heads, k.shape[-1])
        return replace(self, k=k.view(shape).transpose(1, 2), v=v.view(shape).transpose(1, 2))


def alibi_slopes(heads: int) -> list[float]:
    """The slope of each head. Source: Press et al. 2021, with its rule for head counts that are no power of two."""

    def powers(count: int) -> list[float]:
        start = 2.0 ** (-8.0 / count)
        return [start ** (i + 1) for i in range(count)]

    power = 2 ** int(math.log2(heads))
    return powers(power) + powers(2 * power)[0::2][: heads - power]


def score_bias(
    length: int, device: "torch.device | str", documents: "Tensor | None" = None, window: int = 0, alibi_heads: int = 0
) -> "Tensor | None":
    """float32 [rows or 1, heads or 1, length, length] to add to scores; None where being causal says it all.

    documents: int [rows, length], the document of each token: none sees another. window: as `attend` has it;
    alibi_heads: heads of a model with ALiBi, else 0.
    """
    import torch

    if documents is None and not window and not alibi_heads:
        return None
    at = torch.arange(length, device=device)
    distance = at[None, :] - at[:, None]  # [queries, keys], at most 0 where a key is seen
    visible = distance <= 0
    if window:
        visible &= distance > -window
    visible = visible[None, None]
    if documents is not None:
        visible = visible & (documents[:, None, :, None] == documents[:, None, None, :])
    bias = torch.zeros(visible.shape, device=device)
    if alibi_heads:
        slopes = torch.tensor(alibi_slopes(alibi_heads), device=device)
        bias = bias + slopes[None, :, None, None] * distance
    return bias.masked_fill(~visible, -math.inf)


def attend_rows(
    q: "Tensor", rows: Rows, heads: int, scale: float, soft_cap: float, sinks: "Tensor | None" = None
) -> "Tensor":
    """`attend` on Rows, whose bias has window, documents and ALiBi in it; q [tokens, heads * head_dim]."""
    assert rows.k is not None
    assert rows.v is not None
    queries = q.view(rows.count, rows.length, heads, -1).transpose(1, 2)
    heads_per_group = heads // rows.kv_heads
    k, v = (t.repeat_interleave(heads_per_group, 1) if heads_per_group > 1 else t for t in (rows.k, rows.v))
    if soft_cap or sinks is not None:
        out = plain_attention(queries, k, v, rows.bias, scale, soft_cap, sinks)
    else:
        out = (rows.attend or fused_attention)(queries, k, v, rows.bias, scale)
    return out.transpose(1, 2).reshape(q.shape)


def plain_attention(
    q: "Tensor",
    k: "Tensor",
    v: "Tensor",
    bias: "Tensor | None",
    scale: float,
    soft_cap: float,
    sinks: "Tensor | None",
) -> "Tensor":
    """As `fused_attention`, of scores that are capped before the bias (0: they are not), and beside which heads have
    sinks [heads]; torch's own cannot, so all scores are kept."""
    import torch

    scores = (q @ k.transpose(-1, -2)).float() * scale
    scores = soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores
    if bias is None:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    else:
        scores = scores + bias
    return softmax(scores, sinks).to(q.dtype) @ v


def softmax(scores: "Tensor", sinks: "Tensor | None") -> "Tensor":
    """The softmax of scores [..., heads, queries, context] over the context, and over a head's sink where there are
    some: the result leaves that part out."""
    import torch

    if sinks is None:
        return torch.softmax(scores, dim=-1)
    beside = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, beside], dim=-1), dim=-1)[..., :-1]


def fused_attention(q: "Tensor", k: "Tensor", v: "Tensor", bias: "Tensor | None", scale: float) -> "Tensor":
    """torch's, of q, k, v [count, heads, length, head_dim], causal where there is no bias; as q."""
    from torch.nn.functional import scaled_dot_product_attention

    bias = None if bias is None else bias.to(q.dtype)
    return scaled_dot_product_attention(q, k, v, bias, is_causal=bias is None, scale=scale)
