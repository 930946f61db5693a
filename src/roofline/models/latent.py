"""Attention over compressed keys and values, in Llama's layers: Youtu, and what DeepSeek's models share.

Of a token, attention needs one compressed row and a part of the key that rope turns, which all heads share. Source:
DeepSeek-AI 2024 (DeepSeek-V2).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from roofline import ops
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.models import llama
from roofline.models.config import ModelConfig
from roofline.models.family import ForwardBatch
from roofline.models.spec import Param, Weights
from roofline.ops.symbol import Value

ROW_EPS = 1e-6  # of the norms of compressed rows, whatever norm_eps is

embed, head = llama.embed, llama.head


@dataclass(frozen=True)
class Config(ModelConfig):
    """head_dim is of q and k, of which rope turns the last rotary_dim.

    kv_rank: of the compressed row of keys and values; q_rank: of that of queries, 0: they are not compressed;
    value_dim: of a head of v.
    """

    kv_rank: int = 0
    q_rank: int = 0
    value_dim: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, bound in {"kv_rank": 1, "q_rank": 0, "value_dim": 1}.items():
            if getattr(self, name) < bound:
                raise ConfigError(f"model config: {name}={getattr(self, name)} is not at least {bound}")
        if self.value_dim > self.head_dim:
            raise ConfigError(f"model config: value_dim={self.value_dim} is above head_dim={self.head_dim}")
        if self.rotary_dim is None or self.rotary_dim == self.head_dim:
            raise ConfigError(f"model config: rotary_dim={self.rotary_dim} leaves nothing of {self.head_dim} unturned")
        if self.kv_heads != self.heads:
            raise ConfigError(f"model config: kv_heads={self.kv_heads} is not heads={self.heads}")

    @property
    def plain_dim(self) -> int:
        """The first dimensions of q and k, which rope leaves alone."""
        return self.head_dim - int(self.rotary_dim or 0)

    @property
    def attention_scale(self) -> float:
        """YaRN's mscale_all_dim sharpens the softmax."""
        scaling = self.rope_scaling or {}
        sharper = 0.1 * scaling.get("mscale_all_dim", 0.0) * math.log(max(1.0, scaling.get("factor", 1.0))) + 1.0
        return float(self.head_dim**-0.5 * sharper * sharper)


def check(cfg: Config) -> None:
    """Raises UnsupportedError on what such attention does not have."""
    llama.check_rope(cfg)
    llama.check_biases(cfg)
    if cfg.qk_norm or cfg.sliding_window or cfg.layer_windows:
        what = f"qk_norm or a window in a {cfg.family} model"
        raise UnsupportedError(what, "its attention has neither norms of heads nor windows")


def spec(cfg: Config) -> tuple[Param, ...]:
    """Llama's table with this attention."""
    return with_attention(cfg, llama.spec(cfg))


def with_attention(cfg: Config, table: Iterable[Param]) -> tuple[Param, ...]:
    """A table with the parameters of this attention in place of others."""
    within, spec_table = "layers.{layer}.attn.", tuple(table)
    place = next(n for n, param in enumerate(spec_table) if param.name.startswith(within))
    left = [param for param in spec_table if not param.name.startswith(within)]
    return (*left[:place], *_attention_params(cfg), *left[place:])


def _attention_params(cfg: Config) -> list[Param]:
    kv_columns = cfg.heads * (cfg.plain_dim + cfg.value_dim)
    shapes: dict[str, tuple[int, ...]] = {"q": (cfg.q_width, cfg.width)}
    if cfg.q_rank:
        shapes = {"q_down": (cfg.q_rank, cfg.width), "q_norm": (cfg.q_rank,), "q_up": (cfg.q_width, cfg.q_rank)}
    shapes |= {"kv_down": (cfg.kv_rank + int(cfg.rotary_dim or 0), cfg.width), "kv_norm": (cfg.kv_rank,)}
    shapes |= {"kv_up": (kv_columns, cfg.kv_rank), "o": (cfg.width, cfg.heads * cfg.value_dim)}
    return [Param(f"layers.{{layer}}.attn.{name}.weight", shape, "replicate") for name, shape in shapes.items()]


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    x = x + attention(cfg, w.attn, ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps), layer, batch)
    return x + llama.mlp(w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps))


def attention(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """Causal attention over keys and values that are made of a compressed row. Files have the turned dimensions of a
    head last, rope turns the first ones: scores are sums over both, in any order."""
    heads, plain, table, factors = cfg.heads, cfg.plain_dim, cfg.rope, cfg.query_factors(layer)
    place = cfg.cache_index(layer)
    q = ops.linear(x, w.q_down.weight if cfg.q_rank else w.q.weight)
    down = ops.linear(x, w.kv_down.weight)  # [tokens, kv_rank + rotary_dim]
    if cfg.q_rank:
        q = ops.linear(ops.rms_norm(q, w.q_norm.weight, ROW_EPS), w.q_up.weight)
    row = ops.rms_norm(ops.cut_heads(down, 1, 0, cfg.kv_rank), w.kv_norm.weight, ROW_EPS)
    kv = ops.linear(row, w.kv_up.weight)  # [tokens, heads * (plain + value_dim)]
    q = ops.join_heads(ops.cut_heads(q, heads, plain, cfg.head_dim), ops.cut_heads(q, heads, 0, plain), heads)
    turned = ops.cut_heads(down, 1, cfg.kv_rank, cfg.kv_rank + table.dim)  # [tokens, rotary_dim], of all heads
    k = ops.join_heads(turned, ops.cut_heads(kv, heads, 0, plain), heads, shared=True)  # [tokens, heads * head_dim]
    v = ops.cut_heads(kv, heads, plain, plain + cfg.head_dim)  # zeros behind value_dim: k and v are of one size
    q, k = ops.rope(q, batch.positions, table, heads), ops.rope(k, batch.positions, table, heads)
    if factors is not None:
        q = ops.scale_by_position(q, batch.positions, factors.beta, factors.context, factors.offset)
    batch.cache = ops.kv_write(batch.cache, k, v, place)
    out = ops.attend(q, batch.cache, place, heads, cfg.attention_scale)
    return ops.linear(ops.cut_heads(out, heads, 0, cfg.value_dim), w.o.weight)
