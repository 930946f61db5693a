"""MPT as MosaicML benchmarked it (learned positions, biases), as it released it (ALiBi, no biases), and with what LLM
Foundry switches on besides: rotary positions, grouped queries, a gated MLP, RMS norms.

Sources: LLM Foundry's pretraining configurations (2023), the configuration of MPT-7B; Press et al. 2021 for ALiBi,
Su et al. 2021 for rotary positions, Ainslie et al. 2023 for grouped queries, Shazeer 2020 for gated MLPs.
"""

from roofline import ops
from roofline.common.errors import UnsupportedError
from roofline.models.config import ModelConfig
from roofline.models.family import ForwardBatch
from roofline.models.spec import Param, Weights
from roofline.ops.symbol import Value


def check(cfg: ModelConfig) -> None:
    """Raises UnsupportedError on what this family does not have."""
    if cfg.qk_norm or cfg.sliding_window is not None or cfg.attention_bias:
        what = "qk_norm, sliding_window or attention_bias in an mpt model"
        raise UnsupportedError(what, "its attention is plain, and its biases are everywhere or nowhere", ["bias"])
    if cfg.activation == "relu_squared" and cfg.family == "mpt":
        raise UnsupportedError("relu_squared in an mpt model", "LLM Foundry does not have it", ["family arcee"])
    if cfg.gated and cfg.activation == "relu":
        raise UnsupportedError("a gate with relu", "gates are of gelu or silu")


def spec(cfg: ModelConfig) -> tuple[Param, ...]:
    """The parameters, in the order of use."""
    width, ffn, q, kv = cfg.width, cfg.ffn, cfg.q_width, cfg.kv_width
    table = Param("positions.weight", (cfg.max_position, width), "replicate")
    return (
        Param("embed.weight", (cfg.vocab, width), "vocab"),
        *((table,) if cfg.positions == "learned" else ()),
        *_norm_pair(cfg, "layers.{layer}.attn_norm"),
        *pair("layers.{layer}.attn.qkv", (q + 2 * kv, width), "column", cfg.bias, (q, kv, kv)),
        *pair("layers.{layer}.attn.o", (width, q), "row", cfg.bias),
        *_norm_pair(cfg, "layers.{layer}.mlp_norm"),
        *(pair("layers.{layer}.mlp.gate", (ffn, width), "column", cfg.bias) if cfg.gated else ()),
        *mlp_params(cfg),
        *_norm_pair(cfg, "final_norm"),
        Param("head.weight", (cfg.vocab, width), "vocab", tied_to="embed.weight" if cfg.tied else None),
    )


def mlp_params(cfg: ModelConfig) -> tuple[Param, ...]:
    """Up and down of a layer, with their biases where there are any."""
    return (
        *pair("layers.{layer}.mlp.up", (cfg.ffn, cfg.width), "column", cfg.bias),
        *pair("layers.{layer}.mlp.down", (cfg.width, cfg.ffn), "row", cfg.bias),
    )


def pair(
    name: str, shape: tuple[int, ...], split: str, biased: bool = True, parts: tuple[int, ...] = ()
) -> tuple[Param, ...]:
    """A weight and, where it has one, its bias: of a row split it is whole on each rank, added after the sum."""
    bias = Param(f"{name}.bias", shape[:1], split if split == "column" else "replicate", parts=parts)
    return (Param(f"{name}.weight", shape, split, parts=parts), *((bias,) if biased else ()))


def _norm_pair(cfg: ModelConfig, name: str) -> tuple[Param, ...]:
    return pair(name, (cfg.width,), "replicate", cfg.bias and not cfg.rms)


def embed(cfg: ModelConfig, w: Weights, batch: ForwardBatch) -> Value:
    """ids [tokens] -> x [tokens, width]."""
    x = ops.embed(batch.ids, w.embed.weight)
    return ops.add(x, ops.embed(batch.positions, w.positions.weight)) if cfg.positions == "learned" else x


def block(cfg: ModelConfig, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    x = x + attention(cfg, w.attn, norm(cfg, x, w.attn_norm), layer, batch)
    return x + mlp(cfg, w.mlp, norm(cfg, x, w.mlp_norm))


def attention(cfg: ModelConfig, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """Causal grouped-query attention; q, k and v come from one product."""
    qkv = ops.linear(x, w.qkv.weight, w.qkv.bias)  # [tokens, q_width + 2 * kv_width]
    q_end, k_end = cfg.q_width, cfg.q_width + cfg.kv_width
    k, v = ops.split(qkv, q_end, k_end), ops.split(qkv, k_end, k_end + cfg.kv_width)
    turned, alibi = cfg.positions == "rope", cfg.positions == "alibi"
    k = ops.rope(k, batch.positions, cfg.rope, cfg.kv_heads) if turned else k
    batch.cache = ops.kv_write(batch.cache, k, v, layer)
    q = ops.split(qkv, 0, q_end)
    q = ops.rope(q, batch.positions, cfg.rope, cfg.heads) if turned else q
    out = ops.attend(q, batch.cache, layer, cfg.heads, cfg.attention_scale, alibi=alibi)
    return ops.linear(out, w.o.weight, w.o.bias)


def mlp(cfg: ModelConfig, w: Weights, x: Value) -> Value:
    """The activation between two layers; gated, it is that of the gate, and the upper layer is multiplied by it."""
    first = w.gate if cfg.gated else w.up
    inner: Value = ops.linear(x, first.weight, first.bias)
    if cfg.gated:
        up, silu = ops.linear(x, w.up.weight, w.up.bias), cfg.activation == "silu"
        inner = ops.silu_mul(inner, up) if silu else ops.gelu_mul(inner, up, tanh=cfg.activation == "gelu_tanh")
    else:
        inner = activated(cfg, inner)
    return ops.linear(inner, w.down.weight, w.down.bias)


def activated(cfg: ModelConfig, x: Value) -> Value:
    """The model's activation of each element, without a gate."""
    if cfg.activation in ("relu", "relu_squared"):
        return ops.relu(x, squared=cfg.activation == "relu_squared")
    return ops.silu(x) if cfg.activation == "silu" else ops.gelu(x, tanh=cfg.activation == "gelu_tanh")


def head(cfg: ModelConfig, w: Weights, x: Value, batch: ForwardBatch) -> Value:
    """x [tokens, width] -> logits [rows, vocab] of the rows that want them."""
    return ops.linear(norm(cfg, ops.take_rows(x, batch.logit_rows), w.final_norm), w.head.weight)


def norm(cfg: ModelConfig, x: Value, w: Weights) -> Value:
    """The model's kind of norm over each row of x [rows, width]."""
    if cfg.rms:
        return ops.rms_norm(x, w.weight, cfg.norm_eps)
    return ops.layer_norm(x, w.weight, w.bias, eps=cfg.norm_eps)
