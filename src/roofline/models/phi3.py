"""Phi-3 and Phi-4: q, k and v in one matrix, gate and up in one, and heads of which a part is turned.

Sources: Abdin et al. 2024a (Phi-3) and b (Phi-4), and the configurations published with the weights.
"""

from roofline import ops
from roofline.models import llama
from roofline.models.config import ModelConfig
from roofline.models.family import ForwardBatch
from roofline.models.spec import Param, Weights
from roofline.ops.symbol import Value

embed, head = llama.embed, llama.head


def check(cfg: ModelConfig) -> None:
    """Raises UnsupportedError on what this family does not have."""
    llama.check(cfg)
    llama.check_biases(cfg)


def spec(cfg: ModelConfig) -> tuple[Param, ...]:
    """The parameters, in the order of use."""
    width, q, kv = cfg.width, cfg.q_width, cfg.kv_width
    return (
        Param("embed.weight", (cfg.vocab, width), "vocab"),
        Param("layers.{layer}.attn_norm.weight", (width,), "replicate"),
        Param("layers.{layer}.attn.qkv.weight", (q + 2 * kv, width), "column", parts=(q, kv, kv)),
        Param("layers.{layer}.attn.o.weight", (width, q), "row"),
        Param("layers.{layer}.mlp_norm.weight", (width,), "replicate"),
        *gate_up_params(cfg),
        Param("final_norm.weight", (width,), "replicate"),
        Param("head.weight", (cfg.vocab, width), "vocab", tied_to="embed.weight" if cfg.tied else None),
    )


def gate_up_params(cfg: ModelConfig) -> tuple[Param, Param]:
    """The MLP's matrices where gate and up are one."""
    return (
        Param("layers.{layer}.mlp.gate_up.weight", (2 * cfg.ffn, cfg.width), "column", parts=(cfg.ffn, cfg.ffn)),
        Param("layers.{layer}.mlp.down.weight", (cfg.width, cfg.ffn), "row"),
    )


def block(cfg: ModelConfig, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    x = x + attention(cfg, w.attn, ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps), layer, batch)
    return x + gate_up_mlp(w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps))


def attention(cfg: ModelConfig, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """Causal grouped-query attention with rotary positions; q, k and v come from one product."""
    qkv = ops.linear(x, w.qkv.weight, w.qkv.bias)  # [tokens, q_width + 2 * kv_width]
    q_end, k_end = cfg.q_width, cfg.q_width + cfg.kv_width
    q, k, v = ops.split(qkv, 0, q_end), ops.split(qkv, q_end, k_end), ops.split(qkv, k_end, k_end + cfg.kv_width)
    q = ops.rope(q, batch.positions, cfg.rope, cfg.heads)
    k = ops.rope(k, batch.positions, cfg.rope, cfg.kv_heads)
    batch.cache = ops.kv_write(batch.cache, k, v, layer)
    out = ops.attend(q, batch.cache, layer, cfg.heads, cfg.attention_scale, window=cfg.window(layer))
    return ops.linear(out, w.o.weight, w.o.bias)


def gate_up_mlp(w: Weights, x: Value) -> Value:
    """SwiGLU, gate and up from one product."""
    return ops.linear(ops.silu_mul(ops.linear(x, w.gate_up.weight)), w.down.weight)
