"""MiMo-V2-Flash: values narrower than keys, windows with sinks and other kv heads, experts chosen by scores.

Source: LLM-Core Xiaomi 2025, and the configuration published with the weights.
"""

from dataclasses import dataclass, replace

from roofline import ops
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.models import llama, routed
from roofline.models.config import KvShape
from roofline.models.family import ForwardBatch
from roofline.models.spec import Param, Weights
from roofline.ops.rope_tables import RopeTable
from roofline.ops.symbol import Value

embed, head = llama.embed, llama.head


@dataclass(frozen=True)
class Config(routed.Config):
    """window_kv_heads, local_theta: of the layers with a window, whose heads have sinks; value_dim: of a head's values,
    which are multiplied by value_scale."""

    window_kv_heads: int = 0
    local_theta: float = 1e4
    value_dim: int = 0
    value_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.value_dim <= self.head_dim:
            raise ConfigError(f"model config: value_dim={self.value_dim} is not from 1 to head_dim={self.head_dim}")
        if self.window_kv_heads < 1 or self.heads % self.window_kv_heads:
            what = f"window_kv_heads={self.window_kv_heads}"
            raise ConfigError(f"model config: {what} do not divide heads={self.heads}")
        if not self.local_theta > 0:
            raise ConfigError(f"model config: local_theta={self.local_theta} must be above 0")

    def kv_shape(self, layer: int) -> KvShape:
        return KvShape(self.window_kv_heads if self.window(layer) else self.kv_heads, self.head_dim)

    def rope_of(self, layer: int) -> RopeTable | None:
        if not self.window(layer):
            return self.rope
        return RopeTable.of(self.rotary_dim or self.head_dim, self.local_theta, self.rope_style, None)


def check(cfg: Config) -> None:
    """Raises UnsupportedError on what this family does not have."""
    llama.check_rope(cfg)
    if cfg.qk_norm or cfg.output_bias or cfg.turning or cfg.shared_ffn:
        what = f"qk_norm, output_bias, turning or shared_ffn in a {cfg.family} model"
        raise UnsupportedError(what, "its q and k have no norms, o no bias, all layers turn and no expert is shared")


def spec(cfg: Config) -> tuple[Param, ...]:
    """The table of routed experts, v and o of values that are narrower, and a sink for each head under a window."""
    table: list[Param] = []
    for param in routed.spec(cfg):
        if param.name.startswith("layers.{layer}.attn.v."):
            param = replace(param, shape=(param.shape[0] // cfg.head_dim * cfg.value_dim, *param.shape[1:]))
        elif param.name == "layers.{layer}.attn.o.weight":
            param = replace(param, shape=(cfg.width, cfg.heads * cfg.value_dim))
        table.append(param)
    slides = tuple(layer for layer in range(cfg.layers) if cfg.window(layer))
    sinks = Param("layers.{layer}.attn.sinks.weight", (cfg.heads,), "replicate", layers=slides)
    return (*table, sinks) if slides else tuple(table)


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into its group of the cache."""
    x = x + attention(cfg, w.attn, ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps), layer, batch)
    return x + routed.mlp(cfg, w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps), layer)


def attention(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """Grouped-query attention; in the cache values have zeros behind their ends, so that they are as wide as keys."""
    table, window, kv_heads = cfg.rope_of(layer), cfg.window(layer), cfg.kv_shape(layer).kv_heads
    group, place = cfg.kv_group(layer), cfg.cache_index(layer)
    q, k, v = (ops.linear(x, part.weight, part.bias) for part in (w.q, w.k, w.v))
    v = ops.cut_heads(ops.scale(v, cfg.value_scale), kv_heads, 0, cfg.head_dim)
    q, k = ops.rope(q, batch.positions, table, cfg.heads), ops.rope(k, batch.positions, table, kv_heads)
    batch.keep(group, ops.kv_write(batch.cache_of(group), k, v, place))
    sinks = w.sinks.weight if window else None
    out = ops.attend(
        q, batch.cache_of(group), place, cfg.heads, cfg.attention_scale, window=window, sinks=sinks
    )  # [tokens, heads * head_dim]
    return ops.linear(ops.cut_heads(out, cfg.heads, 0, cfg.value_dim), w.o.weight)
