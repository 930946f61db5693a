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


def check_biases(cfg: ModelConfig) -> None:
    """Raises UnsupportedError on a bias."""
    if cfg.attention_bias or cfg.output_bias or cfg.mlp_bias:
        raise UnsupportedError(f"a bias in a {cfg.family} model", "its linear layers have none", ["family llama"])


def spec(cfg: ModelConfig) -> tuple[Param, ...]:
    """The parameters, in the order of use."""
    widths = qkv_widths(cfg)
    bias = [Param(f"layers.{{layer}}.attn.{n}.bias", (w,), "column", layers=layers) for n, w, layers in widths]
    into = [Param(f"layers.{{layer}}.attn.{n}.weight", (w, cfg.width), "column", layers=on) for n, w, on in widths]
    out = [("layers.{layer}.attn.o.weight", (cfg.width, w), layers) for n, w, layers in widths if n == "q"]
    behind = Param("layers.{layer}.attn.o.bias", (cfg.width,), "replicate")
    return (
        Param("embed.weight", (cfg.vocab, cfg.width), "vocab"),
        Param("layers.{layer}.attn_norm.weight", (cfg.width,), "replicate"),
        *into,
        *(bias if cfg.attention_bias else ()),
        *(Param(name, shape, "row", layers=layers) for name, shape, layers in out),
        *((behind,) if cfg.output_bias else ()),
        Param("layers.{layer}.mlp_norm.weight", (cfg.width,), "replicate"),
        *mlp_params(cfg),
        Param("final_norm.weight", (cfg.width,), "replicate"),
        Param("head.weight", (cfg.vocab, cfg.width), "vocab", tied_to="embed.weight" if cfg.tied else None),
    )


def mlp_params(cfg: ModelConfig) -> tuple[Param, ...]:
    """Gate, up and down of a layer, with their biases where there are any."""
    table: list[Param] = []
    for ffn, layers in cfg.layers_by(cfg.ffn_of).items():
        for n in ("gate", "up"):
            table.append(Param(f"layers.{{layer}}.mlp.{n}.weight", (ffn, cfg.width), "column", layers=layers))
        for n in ("gate", "up") if cfg.mlp_bias else ():
            table.append(Param(f"layers.{{layer}}.mlp.{n}.bias", (ffn,), "column", layers=layers))
        table.append(Param("layers.{layer}.mlp.down.weight", (cfg.width, ffn), "row", layers=layers))
    outer = Param("layers.{layer}.mlp.down.bias", (cfg.width,), "replicate")
    return (*table, outer) if cfg.mlp_bias else tuple(table)


def qkv_widths(cfg: ModelConfig) -> list[tuple[str, int, tuple[int, ...] | None]]:
    """Rows of q, k and v and the layers that have so many, None: all of them. A layer that reads the keys and values of
    another one has q alone."""
    queries, keys = cfg.layers_by(cfg.q_width_of), cfg.writers_by(cfg.kv_width_of)
    return [(name, w, on) for name, by in {"q": queries, "k": keys, "v": keys}.items() for w, on in by.items()]


def embed(cfg: ModelConfig, w: Weights, batch: ForwardBatch) -> Value:
    """ids [tokens] -> x [tokens, width]."""
    return ops.embed(batch.ids, w.embed.weight)


def block(cfg: ModelConfig, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    x = x + attention(cfg, w.attn, ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps), layer, batch)
    return x + mlp(w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps))


def attention(
    cfg: ModelConfig,
    w: Weights,
    x: Value,
    layer: int,
    batch: ForwardBatch,
    soft_cap: float = 0.0,
    sinks: "Value | None" = None,
    causal: bool = True,
) -> Value:
    """Grouped-query attention with rotary positions; with qk_norm each head of q and k is normed first."""
    q = ops.linear(x, w.q.weight, w.q.bias)  # [tokens, heads * head_dim]
    out = attended(cfg, w, x, q, layer, batch, soft_cap=soft_cap, sinks=sinks, causal=causal)
    return ops.linear(out, w.o.weight, w.o.bias)


def attended(
    cfg: ModelConfig, w: Weights, x: Value, q: Value, layer: int, batch: ForwardBatch, **bends: "Value | float | None"
) -> Value:
    """What queries q [tokens, heads * head_dim] see, before the last matrix; bends: attributes of `attend`."""
    table, factors, wide = cfg.rope_of(layer), cfg.query_factors(layer), cfg.wide_qk_norm
    group, place, heads, kv_heads = cfg.kv_group(layer), cfg.cache_index(layer), cfg.heads_of(layer), 0
    k: Value | None = None
    if cfg.kv_source(layer) == layer:  # another layer reads what one before it wrote
        k, kv_heads = ops.linear(x, w.k.weight, w.k.bias), cfg.kv_shape(layer).kv_heads  # [tokens, kv_heads * head_dim]
        v = ops.linear(x, w.v.weight, w.v.bias)
    if cfg.qk_norm:
        q = ops.rms_norm(q, w.q_norm.weight, cfg.norm_eps, 1 if wide else heads)
        k = None if k is None else ops.rms_norm(k, w.k_norm.weight, cfg.norm_eps, 1 if wide else kv_heads)
    if table is not None:
        q = ops.rope(q, batch.positions, table, heads)
        k = None if k is None else ops.rope(k, batch.positions, table, kv_heads)
    if factors is not None:
        q = ops.scale_by_position(q, batch.positions, factors.beta, factors.context, factors.offset)
    if k is not None:
        batch.keep(group, ops.kv_write(batch.cache_of(group), k, v, place))
    scale, window = cfg.attention_scale_of(layer), cfg.window(layer)
    return ops.attend(q, batch.cache_of(group), place, heads, scale, window=window, **bends)


def mlp(w: Weights, x: Value) -> Value:
    """SwiGLU."""
    gate, up = ops.linear(x, w.gate.weight, w.gate.bias), ops.linear(x, w.up.weight, w.up.bias)
    return ops.linear(ops.silu_mul(gate, up), w.down.weight, w.down.bias)


def head(cfg: ModelConfig, w: Weights, x: Value, batch: ForwardBatch) -> Value:
    """x [tokens, width] -> logits [rows, vocab] of the rows that want them."""
    x = ops.take_rows(x, batch.logit_rows)
    return ops.linear(ops.rms_norm(x, w.final_norm.weight, cfg.norm_eps), w.head.weight)
