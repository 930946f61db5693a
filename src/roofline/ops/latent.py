"""latent_write, rope_latent_write: a cache that holds keys alone, whose last dimensions are the values.

Such are the compressed rows of attention that makes its keys and values of them: one head of k and v for all heads of
q, which have been taken there (`heads.head_linear`). Source: DeepSeek-AI 2024 (DeepSeek-V2).
"""

from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError
from roofline.ops import attention, elementwise
from roofline.ops.cost import Affine
from roofline.ops.registry import Call, op
from roofline.ops.rope_tables import RopeTable
from roofline.ops.symbol import Type, kv_head_bytes

if TYPE_CHECKING:
    from torch import Tensor


def _write_bytes(call: Call) -> Affine:
    kv_heads, head_dim = call.cache.trailing
    return Affine(tokens=kv_heads * kv_head_bytes(call.kv_dtype, head_dim))


def _write_type(call: Call) -> Type:
    if call.k.width != call.cache.width:
        raise ConfigError(f"latent_write: k {call.k} for a cache of {call.cache.trailing}")
    cache: Type = call.cache
    return cache


@op(values=("cache", "k"), infer=_write_type, kv_bytes=_write_bytes)
def latent_write(cache: attention.KvCache, k: "Tensor", layer: int, kv_dtype: str = "f32") -> attention.KvCache:
    """The cache with this step's k [tokens, kv_heads * head_dim] in it, rounded to kv_dtype."""
    rows = attention.round_to(k.reshape(k.shape[0], cache.kv_heads, -1), kv_dtype)
    return cache.write(layer, rows, rows)


def _rope_write_type(call: Call) -> tuple[Type, Type]:
    kv_heads, head_dim = call.cache.trailing
    if call.qk.width != (call.heads + kv_heads) * head_dim:
        raise ConfigError(f"{call.qk.width} columns of q, k for {call.heads} + {kv_heads} heads of {head_dim}")
    return Type(call.qk.dtype, call.qk.leading, (call.heads * head_dim,)), call.cache


def _rope_write_flops(call: Call) -> Affine:
    scaled = call.heads * call.cache.trailing[1] if call.beta else 0
    return Affine.per(call.qk.leading, 3 * call.qk.width + scaled)


@op(
    values=("qk", "positions", "cache"),
    infer=_rope_write_type,
    flops=_rope_write_flops,
    kv_bytes=_write_bytes,
    fuses=("split", "split", "rope", "rope", "latent_write"),
)
def rope_latent_write(
    qk: "Tensor",
    positions: "Tensor",
    cache: attention.KvCache,
    *,
    table: RopeTable,
    heads: int,
    layer: int,
    kv_dtype: str = "f32",
    beta: float = 0.0,
    context: int = 1,
    offset: int = 0,
) -> "tuple[Tensor, attention.KvCache]":
    """q turned, and the cache with k turned in it: qk [tokens, (heads + kv_heads) * head_dim] has q and k side by side.

    beta: not 0: q is then multiplied as scale_by_position says with it, context and offset.
    """
    kv_heads = cache.kv_heads
    dim = qk.shape[1] // (heads + kv_heads)
    q, k = qk.split([heads * dim, kv_heads * dim], dim=1)
    q, k = attention.rope(q, positions, table, heads), attention.rope(k, positions, table, kv_heads)
    q = elementwise.scale_by_position(q, positions, beta, context, offset) if beta else q
    return q, latent_write(cache, k, layer, kv_dtype)
