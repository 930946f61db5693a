"""Qwen2, Qwen2.5 (biases on q, k, v) and Qwen3 (norms of q and k). Sources: Yang et al. 2024, 2025."""

from typing import Any

from roofline import ops
from roofline.common.errors import UnsupportedError
from roofline.models import llama
from roofline.models.config import ModelConfig
from roofline.models.spec import Param

embed, head = llama.embed, llama.head


def check(cfg: ModelConfig) -> None:
    """Raises UnsupportedError on what this family does not have."""
    if cfg.sliding_window is not None:
        raise UnsupportedError(
            "a sliding window in a qwen model", "released models switch it off", ["sliding_window = None"]
        )
    llama.check_rope(cfg)


def spec(cfg: ModelConfig) -> tuple[Param, ...]:
    """Llama's table and, with qk_norm, a norm weight for one head of q and one of k."""
    norms = [Param(f"layers.{{layer}}.attn.{n}_norm.weight", (cfg.head_dim,), "shared") for n in "qk"]
    return (*llama.spec(cfg), *(norms if cfg.qk_norm else ()))


def block(cfg: ModelConfig, w: Any, x: Any, layer: int, batch: Any) -> Any:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    x = x + attention(cfg, w.attn, ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps), layer, batch)
    return x + llama.mlp(w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps))


def attention(cfg: ModelConfig, w: Any, x: Any, layer: int, batch: Any) -> Any:
    """Causal grouped-query attention with rotary positions; each head of q and k is normed first in Qwen3."""
    q = ops.linear(x, w.q.weight, w.q.bias)  # [tokens, heads * head_dim]
    k = ops.linear(x, w.k.weight, w.k.bias)  # [tokens, kv_heads * head_dim]
    v = ops.linear(x, w.v.weight, w.v.bias)
    if cfg.qk_norm:
        q = ops.rms_norm(q, w.q_norm.weight, cfg.norm_eps, cfg.heads)
        k = ops.rms_norm(k, w.k_norm.weight, cfg.norm_eps, cfg.kv_heads)
    q = ops.rope(q, batch.positions, cfg.rope, cfg.heads)
    k = ops.rope(k, batch.positions, cfg.rope, cfg.kv_heads)
    batch.cache = ops.kv_write(batch.cache, k, v, layer)
    out = ops.attend(q, batch.cache, layer, cfg.heads, cfg.attention_scale)
    return ops.linear(out, w.o.weight)
