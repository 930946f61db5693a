"""Hunyuan (dense): Llama with norms of each head of q and k behind rope. Source: Tencent Hunyuan Team 2025."""

from roofline import ops
from roofline.models import llama, qwen
from roofline.models.config import ModelConfig
from roofline.models.family import ForwardBatch
from roofline.models.spec import Param, Weights
from roofline.ops.symbol import Value

check, embed, head = qwen.check, llama.embed, llama.head


def spec(cfg: ModelConfig) -> tuple[Param, ...]:
    """Llama's table, and a norm weight for one head of q and one of k."""
    return (*llama.spec(cfg), *qwen.head_norms(cfg))


def block(cfg: ModelConfig, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    x = x + attention(cfg, w.attn, ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps), layer, batch)
    return x + llama.mlp(w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps))


def attention(cfg: ModelConfig, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """Causal grouped-query attention with rotary positions; each head of q and k is normed after it was turned."""
    q = ops.rope(ops.linear(x, w.q.weight, w.q.bias), batch.positions, cfg.rope, cfg.heads)
    k = ops.rope(ops.linear(x, w.k.weight, w.k.bias), batch.positions, cfg.rope, cfg.kv_heads)
    q = ops.rms_norm(q, w.q_norm.weight, cfg.norm_eps, cfg.heads)  # [tokens, heads * head_dim]
    k = ops.rms_norm(k, w.k_norm.weight, cfg.norm_eps, cfg.kv_heads)  # [tokens, kv_heads * head_dim]
    batch.cache = ops.kv_write(batch.cache, k, ops.linear(x, w.v.weight, w.v.bias), layer)
    out = ops.attend(q, batch.cache, layer, cfg.heads, cfg.attention_scale, window=cfg.window(layer))
    return ops.linear(out, w.o.weight, w.o.bias)
