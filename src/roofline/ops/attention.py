"""rope, kv_write, attend: the only ops that know positions and the cache.

A cache, for the references, is any object with
    segments: sequence of (start, stop, first_position), the rows of each segment in this step;
    write(layer, k, v) -> cache: k, v [tokens, kv_heads, head_dim]; the result holds them, the argument stays valid;
    read(layer, index) -> (k, v): each [context, kv_heads, head_dim], float32, of one segment including this step.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.ops.cost import Affine
from roofline.ops.elementwise import per_element
from roofline.ops.registry import Call, op
from roofline.ops.rope_tables import RopeTable, frequencies
from roofline.ops.rows import Rows, TurnedPositions, alibi_slopes, attend_rows, softmax
from roofline.ops.symbol import FLOAT8, Type, kv_head_bytes
from roofline.ops.traits import Trait

if TYPE_CHECKING:
    from torch import Tensor


class KvCache(Protocol):
    """What kv_write and attend need of a cache."""

    @property
    def kv_heads(self) -> int: ...

    @property
    def segments(self) -> Sequence[tuple[int, int, int]]: ...

    def write(self, layer: int, k: "Tensor", v: "Tensor") -> "KvCache": ...

    def read(self, layer: int, index: int) -> "tuple[Tensor, Tensor]": ...


def _rope_type(call: Call) -> Type:
    if call.x.width % call.heads:
        raise ConfigError(f"rope: width {call.x.width} is not {call.heads} heads")
    return call.x


def rotate(x: "Tensor", cos: "Tensor", sin: "Tensor", heads: int, style: str) -> "Tensor":
    """Turn pairs of dimensions: (a*cos - b*sin, b*cos + a*sin), each product and sum rounded by itself.

    x [tokens, heads * head_dim]; cos, sin [tokens, dim / 2]; dimensions beyond dim pass through.
    """
    import torch

    parts = x.view(x.shape[0], heads, -1).float()  # also in a 16-bit run: cosines of 8 bits lose distant positions
    dim = 2 * cos.shape[1]
    turned, unturned = parts[..., :dim], parts[..., dim:]
    cos, sin = cos[:, None, :], sin[:, None, :]
    if style == "half":
        a, b = turned[..., : dim // 2], turned[..., dim // 2 :]
        out = torch.cat([a * cos - b * sin, b * cos + a * sin, unturned], dim=-1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1)
        out = torch.cat([pairs.flatten(-2), unturned], dim=-1)
    return out.reshape(x.shape).to(x.dtype)


_ROPE = (Trait.ROW_WISE, Trait.BY_HEAD, Trait.ROUNDED, Trait.READS_WIDE)


@op(values=("x", "positions"), infer=_rope_type, traits=_ROPE, flops=per_element(3))
def rope(x: "Tensor", positions: "Tensor", table: RopeTable, heads: int) -> "Tensor":
    """Rotary embedding of x [tokens, heads * head_dim] at absolute positions int [tokens]; angles in float64."""
    return rotate(x, *rope_angles(positions, table), heads, table.style)


def rope_angles(positions: "Tensor", table: RopeTable) -> "tuple[Tensor, Tensor]":
    """cos and sin, float32 [tokens, dim / 2], of positions int [tokens] (TurnedPositions have theirs)."""
    import torch

    if isinstance(positions, TurnedPositions):
        return positions.cos, positions.sin
    inverse, factor = frequencies(table)
    angles = positions.double()[:, None] * torch.from_numpy(inverse).to(positions.device)[None, :]
    return (angles.cos() * factor).float(), (angles.sin() * factor).float()


def split_heads(qkv: "Tensor", heads: int, kv_heads: int) -> "tuple[Tensor, ...]":
    """q, k and v, which lie side by side: [tokens, (heads + 2 * kv_heads) * head_dim] -> three views."""
    dim = qkv.shape[1] // (heads + 2 * kv_heads)
    return qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)


def _kv_write_type(call: Call) -> Type:
    if call.k != call.v or call.k.width != call.cache.width:
        raise ConfigError(f"kv_write: k {call.k}, v {call.v} for a cache of {call.cache.trailing}")
    return call.cache


def _cached_token_bytes(call: Call) -> int:
    kv_heads, head_dim = call.cache.trailing
    return 2 * kv_heads * kv_head_bytes(call.kv_dtype, head_dim)


def kv_write_bytes(call: Call) -> Affine:
    """K and V of every token, written once."""
    return Affine(tokens=_cached_token_bytes(call))


@op(values=("cache", "k", "v"), infer=_kv_write_type, kv_bytes=kv_write_bytes)
def kv_write(cache: KvCache, k: "Tensor", v: "Tensor", layer: int, kv_dtype: str = "f32") -> KvCache:
    """The cache with this step's k and v [tokens, kv_heads * head_dim] in it, rounded to kv_dtype."""
    kv_heads = cache.kv_heads
    k, v = (round_to(t.reshape(t.shape[0], kv_heads, -1), kv_dtype) for t in (k, v))
    return cache.write(layer, k, v)


def round_to(x: "Tensor", dtype: str) -> "Tensor":
    """x rounded to "bf16" or "f16", or to "int8" with a scale for each row of the last dimension, and widened again.

    "e4m3fn", "e4m3fnuz" (OCP's 8-bit float, and MI300's): to nearest even, what is beyond the largest (448, 240)
    becomes it, NaN stays; no scale. "f32" leaves it.
    """
    if dtype == "int8":
        q, scale = quantize_heads(x)
        return (q * scale[..., None]).to(x.dtype)
    if dtype in FLOAT8:
        import torch

        kind = getattr(torch, f"float8_{dtype}")
        top = torch.finfo(kind).max
        return x.float().clamp(-top, top).to(kind).to(x.dtype)
    if dtype == "f16":
        return x.half().to(x.dtype)
    return x if dtype == "f32" else x.bfloat16().to(x.dtype)


def quantize_heads(x: "Tensor") -> "tuple[Tensor, Tensor]":
    """x [..., head_dim] as whole numbers (float32 [..., head_dim], -127 to 127) and scales (float32 [...]): x is about
    their product.

    scale = max |x| / 127, 0 where that is below the smallest normal number, which cores flush to 0; q =
    round-half-even(x * (127 / max |x|)), 0 where the scale is; each step rounded to float32. A head that holds NaN or
    infinity has the scale NaN and q = 0.
    """
    import torch

    x = x.float()
    finite = torch.isfinite(x).all(dim=-1)
    amax = torch.where(finite, x.abs().amax(dim=-1), 0.0)
    scale = flushed(amax / 127.0)
    inverse = torch.where(scale > 0, torch.full_like(amax, 127.0) / amax, 0.0)  # 127 / amax would round twice
    q = torch.round(torch.where(finite[..., None], x, 0.0) * inverse[..., None])
    return q, torch.where(finite, scale, torch.nan)


def flushed(x: "Tensor") -> "Tensor":
    """float32 with 0 for what is smaller than the smallest normal number."""
    import torch

    return torch.where(x.abs() < torch.finfo(torch.float32).tiny, 0.0, x)


def _attend_type(call: Call) -> Type:
    kv_heads, head_dim = call.cache.trailing
    if call.q.width != call.heads * head_dim or call.heads % kv_heads:
        raise ConfigError(
            f"attend: q of width {call.q.width} for {call.heads} heads on a cache of {call.cache.trailing}"
        )
    if not 0 <= call.value_dim <= head_dim:
        raise ConfigError(f"attend: values of {call.value_dim} dimensions in keys of {head_dim}")
    if not call.causal and (call.window or call.alibi or call.sinks is not None):
        raise ConfigError("attend: causal=False goes with no window, ALiBi or sinks")
    if call.sinks is not None and call.sinks.shape != (call.heads,):
        raise ConfigError(f"attend: sinks of shape {call.sinks.shape} for {call.heads} heads")
    q: Type = call.q
    return Type(q.dtype, q.leading, (call.heads * call.value_dim,)) if call.value_dim else q


def _attend_flops(call: Call) -> Affine:
    flops = 2 * (call.q.width + call.heads * (call.value_dim or call.cache.trailing[1]))  # of a query and a key
    # Both ways a prompt of n tokens, which is one step, has n^2 pairs: twice those of causal attention less n.
    return Affine(pairs=flops) if call.causal else Affine(pairs=2 * flops, tokens=-flops)


def _attend_bytes(call: Call) -> Affine:
    return Affine(context=_cached_token_bytes(call) // (2 if call.value_dim else 1))


def slopes_of(heads: int, first_head: int = 0, all_heads: int = 0) -> list[float]:
    """ALiBi's slopes of `heads` heads from first_head on, of a model with all_heads (0: these are all)."""
    return alibi_slopes(all_heads or heads)[first_head : first_head + heads]


def log2_slopes(heads: int, first_head: int = 0, all_heads: int = 0) -> list[float]:
    """The same for scores in units of log2, as backends round them to float32."""
    return [slope * math.log2(math.e) for slope in slopes_of(heads, first_head, all_heads)]


_ATTEND = (Trait.BY_HEAD, Trait.ROUNDED, Trait.LONG_SUM)


@op(
    values=("q", "cache"),
    weights=("sinks",),
    infer=_attend_type,
    traits=_ATTEND,
    flops=_attend_flops,
    kv_bytes=_attend_bytes,
)
def attend(
    q: "Tensor",
    cache: "KvCache | Rows",
    layer: int,
    heads: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    alibi: bool = False,
    kv_dtype: str = "f32",
    q_dtype: str = "f32",
    p_dtype: str = "f32",
    first_head: int = 0,
    all_heads: int = 0,
    causal: bool = True,
    sinks: "Tensor | None" = None,
    value_dim: int = 0,
) -> "Tensor":
    """Attention of each segment over its own cached keys; q [tokens, heads * head_dim], the same back.

    value_dim: not 0: the cache holds keys alone, whose last value_dim dimensions are the values (`latent_write`):
    [tokens, heads * value_dim].

    heads may be a multiple of the cache's kv_heads (GQA); window > 0: a token sees itself and the window - 1 before it;
    soft_cap > 0: scores become soft_cap * tanh(score / soft_cap); alibi: scores fall linearly with distance.
    q_dtype, p_dtype: what q and the softmax weights are rounded to; kv_dtype: what kv_write rounded k and v to.
    causal: a token sees no later one; False: all keys of its segment, which has a whole sequence then.
    first_head, all_heads: which of the model's heads these are (0 of them: all), for ALiBi alone.
    sinks [heads]: a score of each head beside those of the keys, which takes its part of the softmax and has no value.
    """
    import torch

    if isinstance(cache, Rows):
        if not causal or value_dim:
            what = "an encoder" if not causal else "attention over compressed rows as they are cached"
            raise UnsupportedError(f"training of {what}", "attention of training is causal, over keys and values")
        return attend_rows(q, cache, heads, scale, soft_cap, sinks)
    steps = slopes_of(heads, first_head, all_heads) if alibi else None
    slopes = torch.tensor(steps, dtype=torch.float32, device=q.device) if steps else None
    parts = []
    for index, (start, stop, first) in enumerate(cache.segments):
        k, v = cache.read(layer, index)  # [context, kv_heads, head_dim]
        v = v[..., v.shape[2] - value_dim :] if value_dim else v
        heads_per_group = heads // k.shape[1]
        queries = round_to(q[start:stop].view(stop - start, heads, -1), q_dtype)
        scores = (
            torch.einsum("qhd,khd->hqk", queries, k.repeat_interleave(heads_per_group, 1).to(q.dtype)).float() * scale
        )
        scores = soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores
        at = torch.arange(first, first + stop - start, device=q.device)[:, None]
        keys = torch.arange(k.shape[0], device=q.device)[None, :]
        if slopes is not None:
            scores = scores + slopes[:, None, None] * (keys - at)
        hidden = keys > at if not window else (keys > at) | (keys <= at - window)
        hidden = hidden & causal
        p = round_to(softmax(scores.masked_fill(hidden, -math.inf), sinks), p_dtype).to(q.dtype)
        v = v.repeat_interleave(heads_per_group, 1).to(q.dtype)
        parts.append(torch.einsum("hqk,khd->qhd", p, v).reshape(stop - start, -1))
    return torch.cat(parts)
