"""Llama 2 and 3, Mistral, SmolLM2. Sources: Touvron et al. 2023, Grattafiori et al. 2024, Jiang et al. 2023."""

from roofline import ops
from roofline.common.errors import UnsupportedError
from roofline.models.config import ModelConfig
from roofline.models.family import ForwardBatch
from roofline.models.spec import Param, Weights
from roofline.ops.symbol import Value


def check(cfg: ModelConfig) -> None:
    """Raises UnsupportedError on what this family does not have."""
    if cfg.qk_norm:
        raise UnsupportedError("qk_norm in a llama model", "its attention has no norm of q and k", ["family qwen"])
    check_rope(cfg)


def check_rope(cfg: ModelConfig) -> None:
    """Raises UnsupportedError on what MPT has and these families do not."""
    if cfg.positions != "rope" or cfg.bias:
        what = f"positions={cfg.positions!r}, bias={cfg.bias} in a {cfg.family} model"
        raise UnsupportedError(what, "it turns q and k, and only q, k, v can have biases", ["family mpt"])
    if cfg.rms or cfg.gated or cfg.activation != "gelu":
        what = f"rms, gated or activation in a {cfg.family} model"
        raise UnsupportedError(what, "its norms are RMS norms and its MLP is SwiGLU", ["family mpt"])


def spec(cfg: ModelConfig) -> tuple[Param, ...]:
    """The parameters, in the order of use."""
    bias = [Param(f"layers.{{layer}}.attn.{n}.bias", (w,), "column") for n, w in _qkv_widths(cfg)]
    return (
        Param("embed.weight", (cfg.vocab, cfg.width), "vocab"),
        Param("layers.{layer}.attn_norm.weight", (cfg.width,), "replicate"),
        *(Param(f"layers.{{layer}}.attn.{n}.weight", (w, cfg.width), "column") for n, w in _qkv_widths(cfg)),
        *(bias if cfg.attention_bias else ()),
        Param("layers.{layer}.attn.o.weight", (cfg.width, cfg.q_width), "row"),
        Param("layers.{layer}.mlp_norm.weight", (cfg.width,), "replicate"),
        Param("layers.{layer}.mlp.gate.weight", (cfg.ffn, cfg.width), "column"),
        Param("layers.{layer}.mlp.up.weight", (cfg.ffn, cfg.width), "column"),
        Param("layers.{layer}.mlp.down.weight", (cfg.width, cfg.ffn), "row"),
        Param("final_norm.weight", (cfg.width,), "replicate"),
        Param("head.weight", (cfg.vocab, cfg.width), "vocab", tied_to="embed.weight" if cfg.tied else None),
    )


def _qkv_widths(cfg: ModelConfig) -> tuple[tuple[str, int], ...]:
    return (("q", cfg.q_width), ("k", cfg.kv_width), ("v", cfg.kv_width))


def embed(cfg: ModelConfig, w: Weights, batch: ForwardBatch) -> Value:
    """ids [tokens] -> x [tokens, width]."""
    return ops.embed(batch.ids, w.embed.weight)


def block(cfg: ModelConfig, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    x = x + attention(cfg, w.attn, ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps), layer, batch)
    return x + mlp(w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps))


def attention(cfg: ModelConfig, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """Causal grouped-query attention with rotary positions; with qk_norm each head of q and k is normed first."""
    q = ops.linear(x, w.q.weight, w.q.bias)  # [tokens, heads * head_dim]
    k = ops.linear(x, w.k.weight, w.k.bias)  # [tokens, kv_heads * head_dim]
    v = ops.linear(x, w.v.weight, w.v.bias)
    if cfg.qk_norm:
        q = ops.rms_norm(q, w.q_norm.weight, cfg.norm_eps, cfg.heads)
        k = ops.rms_norm(k, w.k_norm.weight, cfg.norm_eps, cfg.kv_heads)
    q = ops.rope(q, batch.positions, cfg.rope, cfg.heads)
    k = ops.rope(k, batch.positions, cfg.rope, cfg.kv_heads)
    batch.cache = ops.kv_write(batch.cache, k, v, layer)
    out = ops.attend(q, batch.cache, layer, cfg.heads, cfg.attention_scale, window=cfg.sliding_window or 0)
    return ops.linear(out, w.o.weight)


def mlp(w: Weights, x: Value) -> Value:
    """SwiGLU."""
    return ops.linear(ops.silu_mul(ops.linear(x, w.gate.weight), ops.linear(x, w.up.weight)), w.down.weight)


def head(cfg: ModelConfig, w: Weights, x: Value, batch: ForwardBatch) -> Value:
    """x [tokens, width] -> logits [rows, vocab] of the rows that want them."""
    x = ops.take_rows(x, batch.logit_rows)
    return ops.linear(ops.rms_norm(x, w.final_norm.weight, cfg.norm_eps), w.head.weight)
