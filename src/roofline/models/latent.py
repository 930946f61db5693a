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
from roofline.models.config import KvShape, ModelConfig
from roofline.models.family import ForwardBatch
from roofline.models.spec import Param, Weights
from roofline.ops.symbol import Value

ROW_EPS = 1e-6  # of the norms of compressed rows, whatever norm_eps is

_BY_HEAD = ("k_up", "v_up")  # a matrix of each head, one below the other

Pair = tuple[Value, Value]
embed, head = llama.embed, llama.head


@dataclass(frozen=True)
class Config(ModelConfig):
    """head_dim is of q and k, of which rope turns the last rotary_dim.

    kv_rank: of the compressed row of keys and values; q_rank: of that of queries, 0: they are not compressed;
    value_dim: of a head of v.

    latent: the cache holds the compressed rows, and heads of q and of what attention gives are taken there and back by
    matrices of their own (`k_up` [kv_rank, plain_dim] and `v_up` [value_dim, kv_rank] of each head, one below the
    other); else keys and values of all heads, which one matrix makes of the rows (`kv_up`). Files have the matrices of
    either; `weights.latent_form` makes those of the other.
    """

    kv_rank: int = 0
    q_rank: int = 0
    value_dim: int = 0
    latent: bool = False

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

    def kv_shape(self, layer: int) -> KvShape:
        """Of a token's rows, that of keys and values and the turned part of the key, which stands before it."""
        if not self.latent:
            return super().kv_shape(layer)
        return KvShape(1, self.kv_rank + int(self.rotary_dim or 0), self.kv_rank)

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
    remaining = [param for param in spec_table if not param.name.startswith(within)]
    return (*remaining[:place], *_attention_params(cfg), *remaining[place:])


def _attention_params(cfg: Config) -> list[Param]:
    heads, rank, columns, plain = cfg.heads, cfg.kv_rank, "served_column", "replicate"
    table: dict[str, tuple[tuple[int, ...], str]] = {"q": ((cfg.q_width, cfg.width), columns)}
    if cfg.q_rank:
        table = {"q_down": ((cfg.q_rank, cfg.width), plain), "q_norm": ((cfg.q_rank,), plain)}
        table["q_up"] = ((cfg.q_width, cfg.q_rank), columns)
    table |= {"kv_down": ((rank + int(cfg.rotary_dim or 0), cfg.width), plain), "kv_norm": ((rank,), plain)}
    if cfg.latent:
        table |= {"k_up": ((heads * rank, cfg.plain_dim), columns), "v_up": ((heads * cfg.value_dim, rank), columns)}
    else:
        table["kv_up"] = ((heads * (cfg.plain_dim + cfg.value_dim), rank), columns)
    table["o"] = ((cfg.width, heads * cfg.value_dim), "served_row")
    return [
        Param(f"layers.{{layer}}.attn.{name}.weight", shape, split, experts=heads if name in _BY_HEAD else 0)
        for name, (shape, split) in table.items()
    ]


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    x = x + attention(cfg, w.attn, ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps), layer, batch)
    return x + llama.mlp(w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps))


def attention(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """Causal attention over keys and values that are made of a compressed row. Files have the turned dimensions of a
    head last, rope turns the first ones: scores are sums over both, in any order."""
    heads, plain, table = cfg.heads, cfg.plain_dim, cfg.rope
    q = ops.linear(x, w.q_down.weight if cfg.q_rank else w.q.weight)
    down = ops.linear(x, w.kv_down.weight)  # [tokens, kv_rank + rotary_dim]
    if cfg.q_rank:
        q = ops.linear(ops.rms_norm(q, w.q_norm.weight, ROW_EPS), w.q_up.weight)
    row = ops.rms_norm(ops.cut_heads(down, 1, 0, cfg.kv_rank), w.kv_norm.weight, ROW_EPS)
    turned = ops.cut_heads(down, 1, cfg.kv_rank, cfg.kv_rank + table.dim)  # [tokens, rotary_dim], of all heads
    q_turned, q_plain = ops.cut_heads(q, heads, plain, cfg.head_dim), ops.cut_heads(q, heads, 0, plain)
    attended = _over_rows if cfg.latent else _over_heads
    return ops.linear(attended(cfg, w, (q_turned, q_plain), (turned, row), layer, batch), w.o.weight)


def _over_rows(cfg: Config, w: Weights, q: Pair, rows: Pair, layer: int, batch: ForwardBatch) -> Value:
    """What all heads see, [tokens, heads * value_dim], in the rows themselves. A query is taken to where they are by
    the matrix that would make keys of them, and what it sees is made its head's values. q, rows: the turned part and
    the other."""
    heads, place = cfg.heads, cfg.cache_index(layer)
    queries = ops.join_heads(q[0], ops.head_linear(q[1], w.k_up.weight, heads), heads)
    turned, key = _turned(cfg, queries, ops.join_heads(*rows, 1), 1, layer, batch)
    batch.cache = ops.latent_write(batch.cache, key, place)
    rows_of_heads = ops.attend(turned, batch.cache, place, heads, cfg.attention_scale, value_dim=cfg.kv_rank)
    return ops.head_linear(rows_of_heads, w.v_up.weight, heads)


def _over_heads(cfg: Config, w: Weights, q: Pair, rows: Pair, layer: int, batch: ForwardBatch) -> Value:
    """The same in keys and values of all heads, which are made of the rows."""
    heads, plain, place = cfg.heads, cfg.plain_dim, cfg.cache_index(layer)
    kv = ops.linear(rows[1], w.kv_up.weight)  # [tokens, heads * (plain + value_dim)]
    keys = ops.join_heads(rows[0], ops.cut_heads(kv, heads, 0, plain), heads, shared=True)  # [tokens, heads * head_dim]
    v = ops.cut_heads(kv, heads, plain, plain + cfg.head_dim)  # zeros behind value_dim: k and v are of one size
    queries, k = _turned(cfg, ops.join_heads(*q, heads), keys, heads, layer, batch)
    batch.cache = ops.kv_write(batch.cache, k, v, place)
    out = ops.attend(queries, batch.cache, place, heads, cfg.attention_scale)
    return ops.cut_heads(out, heads, 0, cfg.value_dim)


def _turned(cfg: Config, q: Value, k: Value, kv_heads: int, layer: int, batch: ForwardBatch) -> Pair:
    """q and k by their positions."""
    table, factors = cfg.rope, cfg.query_factors(layer)
    q, k = ops.rope(q, batch.positions, table, cfg.heads), ops.rope(k, batch.positions, table, kv_heads)
    if factors is None:
        return q, k
    return ops.scale_by_position(q, batch.positions, factors.beta, factors.context, factors.offset), k
