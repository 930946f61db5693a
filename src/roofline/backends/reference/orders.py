"""The orders of the arithmetic, written the slow way: what a kernel that declares one must equal.

Every step is rounded to float32 where the order says so; an FMA rounds once. Denormals are kept here;
kernels flush them.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roofline.backends.reference.unpack import Groups
from roofline.ops.exp2 import LOG2E, exp2_falling, exp2_signed, fma
from roofline.ops.matmul import Q8Rows
from roofline.ops.normal_tail import normal_tail
from roofline.ops.norms import LEAST_SQUARE

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 64  # keys whose softmax state is updated at once, at absolute positions 0-63, 64-127, ...
SPLIT = 512  # keys that have a state of their own, merged left to right
LANES = 16
SWIGLU = float.fromhex("0x1.3a4cbep+1")  # SWIGLU_SLOPE * log2(e)
# Of the tanh form of gelu: -2 * log2(e) * sqrt(2 / pi), and that times 0.044715, each rounded to float32.
GELU_TANH = float.fromhex("-0x1.26aec2p+1"), float.fromhex("-0x1.a5a7d0p-4")


def linear_integers(x: Q8Rows, w: Groups) -> "Tensor":
    """Orders "q8g32" and "q15g32": x [rows, in] times w [out, in] -> float32 [rows, out].

    Groups ascend; in each the dot of integers is exact and rounded to float32 once, then
    acc = fma(w_scale * x_scale, dot, acc), and where the
    format has minima acc = fma(w_min, x_sum, acc) with x_sum = x_scale * sum of the group's q.
    """
    import torch

    rows, width = x.q.shape
    groups = width // w.group
    # Groups of 16 (Q6_K) share the scale of the 32 inputs they lie in.
    x_scale = x.scale.repeat_interleave(groups // x.scale.shape[1], dim=1)
    q = x.q.double().view(rows, groups, w.group)
    w_q = torch.from_numpy(w.q).view(-1, groups, w.group)
    w_scale = torch.from_numpy(w.scale)
    acc = torch.zeros(rows, w_q.shape[0])
    for g in range(groups):
        dot = (q[:, g] @ w_q[:, g].double().T).float()  # below 2^53: exact until it is rounded
        acc = fma(x_scale[:, g, None] * w_scale[None, :, g], dot, acc)
        if w.minimum is not None:
            x_sum = x_scale[:, g] * q[:, g].sum(dim=1).float()
            acc = fma(torch.from_numpy(w.minimum)[None, :, g], x_sum[:, None], acc)
    return acc


def linear_f32(x: "Tensor", w: "Tensor") -> "Tensor":
    """Order "f32": acc = fma(w[k], x[k], acc) for ascending k."""
    import torch

    acc = torch.zeros(x.shape[0], w.shape[0])
    wide = acc.double()  # `fma` would widen a column of each for every k
    for x_column, w_column in zip(x.double().T[:, :, None], w.double().T.contiguous(), strict=True):
        acc.copy_(wide.addcmul_(x_column, w_column))
        wide.copy_(acc)
    return acc


def adapter_down_lanes16(x: "Tensor", a: "Tensor") -> "Tensor":
    """Order "lanes16": x [rows, in] times a [rank, in]; products go to lane (index mod 16) by FMA, lanes are added as a
    tree."""
    import torch

    pad = -x.shape[1] % LANES
    x, a = (torch.nn.functional.pad(values, (0, pad)) for values in (x, a))
    lanes = torch.zeros(x.shape[0], a.shape[0], LANES)
    for w, v in zip(a.split(LANES, dim=-1), x.split(LANES, dim=-1), strict=True):
        lanes = fma(w[None], v[:, None], lanes)
    return tree16(lanes)


def adapter_up_ranks(y: "Tensor", t: "Tensor", b: "Tensor", scale: float) -> "Tensor":
    """Order "ranks": acc = fma(b[rank], t[rank], acc) for ascending ranks, then fma(scale, acc, y)."""
    import torch

    acc = torch.zeros_like(y)
    for rank in range(b.shape[0]):
        acc = fma(b[rank][None], t[:, rank, None], acc)
    return fma(torch.full_like(y, scale), acc, y)


def tree16(lanes: "Tensor") -> "Tensor":
    """The sum over 16 lanes in the last dimension: lane i += lane i + 8, then + 4, + 2, + 1."""
    for step in (8, 4, 2, 1):
        lanes = lanes[..., :step] + lanes[..., step : 2 * step]
    return lanes[..., 0]


def rms_norm_lanes16(x: "Tensor", w: "Tensor | None", eps: float, heads: int) -> "Tensor":
    """Order "lanes16": squares go to lane (index mod 16) by FMA, lanes are added as a tree, y = (x * inv) * w, without
    a weight x * inv."""
    import torch

    parts = x.view(x.shape[0], heads, x.shape[1] // heads)
    mean = _mean_square(parts) + torch.tensor(eps, dtype=torch.float32)
    inverse = 1.0 / torch.sqrt(mean.double()).float()  # torch's float32 sqrt is not rounded correctly on CPUs
    normed = parts * inverse[..., None]
    return (normed if w is None else normed * w.view(-1, parts.shape[2])).reshape(x.shape)


def _mean_square(x: "Tensor") -> "Tensor":
    """The mean of squares of x [..., size] over its last dimension, added up as rms_norm does."""
    import torch

    lanes = torch.zeros(*x.shape[:-1], LANES)
    for chunk in torch.nn.functional.pad(x, (0, -x.shape[-1] % LANES)).split(LANES, dim=-1):
        lanes = fma(chunk, chunk, lanes)
    return tree16(lanes) / float(x.shape[-1])


def like_norm_lanes16(x: "Tensor", y: "Tensor") -> "Tensor":
    """Order "lanes16": (x * a) / b with a the root of y's mean square, b that of x's, at least 1e-5, added up as
    rms_norm does."""
    import torch

    length = torch.sqrt(_mean_square(y).double()).float()
    divisor = torch.sqrt(_mean_square(x).clamp(min=float(torch.tensor(LEAST_SQUARE))).double()).float()
    return x * length[:, None] / divisor[:, None]


def above_spread_lanes16(x: "Tensor", z: float) -> "Tensor":
    """Order "lanes16": max(0, x - (mean + (deviation * z))), with mean and variance as layer_norm has them."""
    import torch

    mean, _, variance = _around_mean(x)
    spread = torch.sqrt(variance.double()).float() * torch.tensor(z, dtype=torch.float32)
    return torch.clamp(x - (mean + spread)[:, None], min=0.0)


def layer_norm_lanes16(x: "Tensor", w: "Tensor", bias: "Tensor | None", eps: float) -> "Tensor":
    """Order "lanes16": lanes add up the elements, then by FMA the squares of their distance from the mean;
    y = fma((x - mean) * inv, w, bias), without a bias ((x - mean) * inv) * w.
    """
    import torch

    _, centred, variance = _around_mean(x)
    inverse = 1.0 / torch.sqrt((variance + torch.tensor(eps, dtype=torch.float32)).double()).float()
    normed = centred * inverse[:, None]
    return normed * w if bias is None else fma(normed, w.expand_as(normed), bias.expand_as(normed))


def _around_mean(x: "Tensor") -> "tuple[Tensor, Tensor, Tensor]":
    """Of rows x [rows, size] the mean [rows], what is left of x without it, and the variance [rows]."""
    import torch

    size = x.shape[-1]
    lanes = torch.zeros(x.shape[0], LANES)
    for chunk in torch.nn.functional.pad(x, (0, -size % LANES)).split(LANES, dim=-1):
        lanes = lanes + chunk
    mean = tree16(lanes) / float(size)
    centred = x - mean[:, None]
    return mean, centred, _mean_square(centred)


def gelu_exp2(x: "Tensor", tanh: bool) -> "Tensor":
    """Order "exp2": fma(-a, P(X < -a), max(x, 0)) with a = min(|x|, 100) and the tail of `normal_tail`; its tanh form
    x / (1 + 2^(x * fma(x^2, 0.044715 * c, c))) with c = -2 * log2(e) * sqrt(2 / pi).
    """
    import torch

    if tanh:
        linear, cubic = (torch.full_like(x, value) for value in GELU_TANH)
        return x / (1.0 + exp2_signed(x * fma(x * x, cubic, linear)))
    a = x.abs().clamp(max=100.0)
    return fma(0.0 - a, normal_tail(a), torch.where(x < 0, torch.zeros_like(x), x))


def silu_exp2(x: "Tensor") -> "Tensor":
    """Order "exp2": x / (1 + 2^(-x * log2 e))."""
    return x / (1.0 + exp2_signed(-x * LOG2E))


def clamped_swiglu_exp2(gate: "Tensor", up: "Tensor", limit: float) -> "Tensor":
    """Order "exp2": g / (1 + 2^(-g * c)) * (u + 1), with g and u as `ops.clamped_swiglu` has them and
    c = 1.702 * log2(e), rounded to float32."""
    g, u = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return g / (1.0 + exp2_signed(-g * SWIGLU)) * (u + 1.0)


def soft_cap_exp2(x: "Tensor", cap: float) -> "Tensor":
    """Order "exp2": cap * tanh(x / cap), with tanh(u) = 1 - 2 / (2^(2u * log2 e) + 1)."""
    import torch

    rounded = torch.tensor(cap, dtype=torch.float32)
    return rounded * (1.0 - 2.0 / (exp2_signed((2.0 * (x / rounded)) * LOG2E) + 1.0))


@dataclass
class _State:
    """The softmax of one split so far: largest score m, 16 lanes of the sum, weighted values acc."""

    m: "Tensor"  # [queries, heads]
    lanes: "Tensor"  # [queries, heads, 16]
    acc: "Tensor"  # [queries, heads, head_dim]


@dataclass
class SegmentContext:
    """K and V of one segment as a cache stores them: k, v [context, heads, head_dim].

    Order "pages64" stores bf16 values; "pages64.int8" whole numbers, and scales [context, heads].
    """

    k: "Tensor"
    v: "Tensor"
    k_scale: "Tensor | None" = None
    v_scale: "Tensor | None" = None

    def with_values(self, dim: int) -> "SegmentContext":
        """The same whose values are the last dimensions of the keys; 0: they are what they are."""
        return SegmentContext(self.k, self.k[..., self.k.shape[2] - dim :], self.k_scale, self.k_scale) if dim else self

    def for_heads(self, heads: int) -> "SegmentContext":
        """The same with a kv head for each of `heads` query heads."""
        times = heads // self.k.shape[1]
        tensors = (self.k, self.v, self.k_scale, self.v_scale)
        return SegmentContext(*(t if t is None else t.repeat_interleave(times, dim=1) for t in tensors))  # type: ignore[arg-type]


def attend_pages64(
    q: "Tensor",
    context: SegmentContext,
    first: int | None,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    slopes: list[float] | None = None,
    sinks: "Tensor | None" = None,
) -> "Tensor":
    """Order "pages64", one segment: q [queries, heads, head_dim] at positions first.. -> the same shape, or as wide as
    v; first=None: each sees all keys.

    context: with a kv head for each query head. Scales of "pages64.int8" are multiplied into scores (k's), and into
    softmax weights before these are rounded to bf16 (v's). slopes: ALiBi's, in units of log2. sinks
    [heads]: each becomes log2(e) times itself and stands for one key, without a value, in a split that is merged last.

    Scores are in units of log2. A block in which a query sees no key changes nothing for it.
    """
    import torch

    k, v, k_scale, v_scale = context.k, context.v, context.k_scale, context.v_scale
    count = k.shape[0]
    q = (q * torch.tensor(scale * math.log2(math.e), dtype=torch.float32)).bfloat16().float()
    if first is None:
        at = torch.full((q.shape[0], 1), count - 1)
    else:
        at = torch.arange(first, first + q.shape[0])[:, None]
    keys = torch.arange(count)[None, :]
    visible = (keys <= at) & (keys > at - window) if window else keys <= at  # [queries, context]
    scores = _scores(q, k) if k_scale is None else _scores(q, k) * k_scale.T[None]
    scores = _bend(scores, keys - at, soft_cap, slopes)
    scores = scores.masked_fill(~visible[:, None, :], -math.inf)
    factor = torch.ones_like(scores) if v_scale is None else v_scale.T[None].masked_fill(~visible[:, None, :], 0.0)
    total: _State | None = None
    for start in range(0, count, SPLIT):
        stop = min(start + SPLIT, count)
        part = _split(scores[..., start:stop], factor[..., start:stop], v[start:stop], visible[:, start:stop])
        total = part if total is None else _merge(total, part)
    assert total is not None
    if sinks is not None:
        total = _merge(total, _sink(sinks, total))
    return total.acc * (1.0 / tree16(total.lanes))[..., None] + 0.0


def _scores(q: "Tensor", k: "Tensor") -> "Tensor":
    """[queries, heads, context]: a chain over pairs of dimensions, the odd one first, as vdpbf16ps does."""
    import torch

    out = torch.zeros(q.shape[0], q.shape[1], k.shape[0])
    dims = q.shape[2]
    for pair in range(0, dims, 2):
        for dim in (pair + 1, pair) if pair + 1 < dims else (pair,):
            out = fma(q[:, :, None, dim], k[:, :, dim].T[None], out)
    return out


def _bend(scores: "Tensor", distance: "Tensor", soft_cap: float, slopes: list[float] | None) -> "Tensor":
    """Soft cap, then ALiBi, both scaled to units of log2."""
    import torch

    if soft_cap:
        scores = soft_cap_exp2(scores, soft_cap * math.log2(math.e))
    if slopes is not None:
        slope = torch.tensor(slopes, dtype=torch.float32)
        scores = scores + slope[None, :, None] * distance[:, None, :].float()
    return scores


def _split(scores: "Tensor", factor: "Tensor", v: "Tensor", visible: "Tensor") -> _State:
    """The state after all blocks of one split; m stays -inf where a query sees nothing of it."""
    import torch

    queries, heads, count = scores.shape
    pad = -count % BLOCK
    scores = torch.nn.functional.pad(scores, (0, pad), value=-math.inf)
    factor = torch.nn.functional.pad(factor, (0, pad))
    v = torch.nn.functional.pad(v, (0, 0, 0, 0, 0, pad))
    visible = torch.nn.functional.pad(visible, (0, pad))
    state = _State(
        torch.full((queries, heads), -math.inf),
        torch.zeros(queries, heads, LANES),
        torch.zeros(queries, heads, v.shape[2]),
    )
    for start in range(0, count, BLOCK):
        block = slice(start, start + BLOCK)
        state = _block(state, scores[..., block], factor[..., block], v[block], visible[:, block].any(dim=1))
    return state


def _block(state: _State, scores: "Tensor", factor: "Tensor", v: "Tensor", sees: "Tensor") -> _State:
    import torch

    sees = sees[:, None].expand_as(state.m)
    m = torch.where(sees, torch.maximum(state.m, scores.amax(dim=-1)), torch.zeros_like(state.m))
    alpha = exp2_falling(state.m - m)
    p = exp2_falling(scores - m[..., None])  # [queries, heads, 64]
    lanes = state.lanes * alpha[..., None]
    for vector in p.split(LANES, dim=-1):
        lanes = lanes + vector
    acc, rounded = state.acc * alpha[..., None], (p * factor).bfloat16().float()
    for pair in range(0, BLOCK, 2):
        for key in (pair + 1, pair):
            acc = fma(rounded[..., key, None], v[key][None], acc)
    keep = sees[..., None]
    return _State(
        torch.where(sees, m, state.m), torch.where(keep, lanes, state.lanes), torch.where(keep, acc, state.acc)
    )


def _sink(sinks: "Tensor", like: _State) -> _State:
    """The state of a split that holds nothing but each head's sink."""
    import torch

    lanes = torch.zeros_like(like.lanes)
    lanes[..., 0] = 1.0
    return _State((sinks * LOG2E).expand_as(like.m), lanes, torch.zeros_like(like.acc))


def _merge(a: _State, b: _State) -> _State:
    """Two splits as one; a side that saw nothing leaves the other as it is."""
    import torch

    m = torch.maximum(a.m, b.m)
    anything = torch.isfinite(m)
    base = torch.where(anything, m, torch.zeros_like(m))
    a_factor, b_factor = exp2_falling(a.m - base)[..., None], exp2_falling(b.m - base)[..., None]
    in_both = (torch.isfinite(a.m) & torch.isfinite(b.m))[..., None]
    in_b = torch.isfinite(b.m)[..., None]

    def joined(x: "Tensor", y: "Tensor") -> "Tensor":
        return torch.where(in_both, x * a_factor + y * b_factor, torch.where(in_b, y, x))

    return _State(m, joined(a.lanes, b.lanes), joined(a.acc, b.acc))
