"""OLMo 2 and 3: norms behind attention and MLP and none before them, and norms of q and k over all heads together; in
OLMo 3 layers that see a window, and turn q and k without the scaling of the others.

Sources: OLMo Team 2025a (OLMo 2) and b (OLMo 3).
"""

from collections.abc import Iterable

from roofline import ops
from roofline.models import llama
from roofline.models.config import ModelConfig
from roofline.models.family import ForwardBatch
from roofline.models.local_rope import LocalRopeConfig
from roofline.models.spec import Param, Weights
from roofline.ops.symbol import Value

Config, embed, head = LocalRopeConfig, llama.embed, llama.head


def check(cfg: ModelConfig) -> None:
    """Raises UnsupportedError on what this family does not have."""
    llama.check(cfg)
    llama.check_biases(cfg)


def spec(cfg: ModelConfig) -> tuple[Param, ...]:
    """Llama's table with its norms elsewhere, and norms of q and k, which no rank can compute from a part."""
    widths = {"q": cfg.q_width, "k": cfg.kv_width}
    norms = [Param(f"layers.{{layer}}.attn.{n}_norm.weight", (w,), "replicate") for n, w in widths.items()]
    return (*post_normed(llama.spec(cfg), cfg), *norms)


def post_normed(table: Iterable[Param], cfg: ModelConfig) -> tuple[Param, ...]:
    """A table without the norms before attention and MLP, and with one behind each."""
    other_params = [param for param in table if not param.name.startswith("layers.") or "_norm" not in param.name]
    behind = [Param(f"layers.{{layer}}.{n}_post_norm.weight", (cfg.width,), "replicate") for n in ("attn", "mlp")]
    return (*other_params, *behind)


def block(cfg: ModelConfig, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    return add_parts(cfg, w, x, attention(cfg, w.attn, x, layer, batch))


def add_parts(cfg: ModelConfig, w: Weights, x: Value, attended: Value) -> Value:
    """x, what its attention gave, and the MLP of both, with the norms behind these."""
    x = x + ops.rms_norm(attended, w.attn_post_norm.weight, cfg.norm_eps)
    return x + ops.rms_norm(llama.mlp(w.mlp, x), w.mlp_post_norm.weight, cfg.norm_eps)


def attention(cfg: ModelConfig, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """Causal grouped-query attention with rotary positions; all of q is normed together, and all of k."""
    q = ops.rms_norm(ops.linear(x, w.q.weight), w.q_norm.weight, cfg.norm_eps)  # [tokens, heads * head_dim]
    k = ops.rms_norm(ops.linear(x, w.k.weight), w.k_norm.weight, cfg.norm_eps)  # [tokens, kv_heads * head_dim]
    v = ops.linear(x, w.v.weight)
    q = ops.rope(q, batch.positions, cfg.rope_of(layer), cfg.heads)
    k = ops.rope(k, batch.positions, cfg.rope_of(layer), cfg.kv_heads)
    batch.cache = ops.kv_write(batch.cache, k, v, layer)
    out = ops.attend(q, batch.cache, layer, cfg.heads, cfg.attention_scale, window=cfg.window(layer))
    return ops.linear(out, w.o.weight)
