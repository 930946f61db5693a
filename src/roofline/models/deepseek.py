"""DeepSeek-V2: keys and values made of one compressed row, experts beside shared ones behind a first dense layer.

Of a token, attention needs the compressed row and a part of the key that rope turns, which all heads share. Here the
keys and values of all heads are made of it again before the cache, which holds them as it does those of other models.

Source: DeepSeek-AI 2024.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from roofline import ops
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.models import llama, moe
from roofline.models.family import ForwardBatch
from roofline.models.spec import Param, Weights
from roofline.ops.symbol import Value

ROW_EPS = 1e-6  # of the norms of compressed rows, whatever norm_eps is

embed, head = llama.embed, llama.head


@dataclass(frozen=True)
class Config(moe.Config):
    """head_dim is of q and k, of which rope turns the last rotary_dim; ffn is of each expert, shared_ffn of all shared
    ones together.

    kv_rank: of the compressed row of keys and values; q_rank: of that of queries, 0: they are not compressed;
    value_dim: of a head of v; dense_layers: so many first ones have an MLP of dense_ffn and no experts; routed_scale:
    multiplies what the chosen experts give.
    """

    scales_shared: ClassVar[bool] = False
    kv_rank: int = 0
    q_rank: int = 0
    value_dim: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    routed_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        least = {"kv_rank": 1, "q_rank": 0, "value_dim": 1, "dense_layers": 0, "dense_ffn": int(self.dense_layers > 0)}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ConfigError(f"model config: {name}={getattr(self, name)} is not at least {bound}")
        if self.value_dim > self.head_dim:
            raise ConfigError(f"model config: value_dim={self.value_dim} is above head_dim={self.head_dim}")
        if self.rotary_dim is None or self.rotary_dim == self.head_dim:
            raise ConfigError(f"model config: rotary_dim={self.rotary_dim} leaves nothing of {self.head_dim} unturned")
        if self.kv_heads != self.heads:
            raise ConfigError(f"model config: kv_heads={self.kv_heads} is not heads={self.heads}")
        if not self.routed_scale > 0:
            raise ConfigError(f"model config: routed_scale={self.routed_scale} is not above 0")

    def alike(self, layer: int) -> int:
        """The first layer that computes what this one does, with weights of its own."""
        return self.dense_layers if layer >= self.dense_layers else 0

    def first(self, layers: int) -> "Config":
        """The configuration of a model of which only the first so many layers are left."""
        return replace(super().first(layers), dense_layers=min(self.dense_layers, layers))

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
    """Raises UnsupportedError on what this family does not have."""
    llama.check_rope(cfg)
    llama.check_biases(cfg)
    if cfg.qk_norm or cfg.sliding_window or cfg.layer_windows:
        what = f"qk_norm or a window in a {cfg.family} model"
        raise UnsupportedError(what, "its attention has neither norms of heads nor windows")
    if cfg.renormalise:
        raise UnsupportedError(f"renormalise in a {cfg.family} model", "its weights of experts are parts of all", ())


def spec(cfg: Config) -> tuple[Param, ...]:
    """The parameters, in the order of use."""
    dense, sparse = range(cfg.dense_layers), range(cfg.dense_layers, cfg.layers)
    mlp = [replace(param, layers=dense) for param in llama.mlp_params(replace(cfg, ffn=max(1, cfg.dense_ffn)))]
    experts = [replace(param, layers=sparse) for param in moe.expert_params(cfg)]
    return (
        Param("embed.weight", (cfg.vocab, cfg.width), "vocab"),
        Param("layers.{layer}.attn_norm.weight", (cfg.width,), "replicate"),
        *_attention_params(cfg),
        Param("layers.{layer}.mlp_norm.weight", (cfg.width,), "replicate"),
        *(mlp if dense else ()),
        *(experts if sparse else ()),
        Param("final_norm.weight", (cfg.width,), "replicate"),
        Param("head.weight", (cfg.vocab, cfg.width), "vocab", tied_to="embed.weight" if cfg.tied else None),
    )


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
    normed = ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps)
    dense = layer < cfg.dense_layers
    return x + (llama.mlp(w.mlp, normed) if dense else moe.mlp(cfg, w.mlp, normed, cfg.routed_scale))


def attention(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """Causal attention over keys and values that are made of a compressed row. Files have the turned dimensions of a
    head last, rope turns the first ones: scores are sums over both, in any order."""
    heads, plain, table = cfg.heads, cfg.plain_dim, cfg.rope
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
    batch.cache = ops.kv_write(batch.cache, k, v, layer)
    out = ops.attend(q, batch.cache, layer, heads, cfg.attention_scale)
    return ops.linear(ops.cut_heads(out, heads, 0, cfg.value_dim), w.o.weight)
