"""Qwen3-Next and Qwen3.5: gated DeltaNet in most layers, gated attention in the others, with or without experts.

Sources: Yang et al. 2024 (the gated delta rule), and the configurations published with the weights.
"""

from dataclasses import dataclass, replace

from roofline import ops
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.models import llama, moe, qwen
from roofline.models.config import ModelConfig
from roofline.models.family import ForwardBatch
from roofline.models.recurrent import RecurrentConfig
from roofline.models.spec import Param, Weights
from roofline.ops.state import COLUMNS, MATRIX, StateParts
from roofline.ops.symbol import Value

embed, head = llama.embed, llama.head


@dataclass(frozen=True)
class Config(RecurrentConfig, moe.Config):
    """experts: 0 where each layer has an MLP of ffn. recurrent: of each layer, whether it is one of gated DeltaNet;
    the others attend.

    Of the former: key_heads of key_dim, value_heads of value_dim; consecutive value heads share a key head, or those
    that lie key_heads apart (tiled); taps: tokens that its convolution sees.
    """

    renormalise: bool = True
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    taps: int = 4
    tiled: bool = False

    def __post_init__(self) -> None:
        if self.experts:
            super().__post_init__()
        else:
            ModelConfig.__post_init__(self)
            if self.experts_per_token or self.shared_ffn:
                raise ConfigError("model config: experts_per_token or shared_ffn in a model without experts")
        for name, least in {"key_heads": 1, "value_heads": 1, "key_dim": 1, "value_dim": 1, "taps": 2}.items():
            if getattr(self, name) < least:
                raise ConfigError(f"model config: {name}={getattr(self, name)} is not at least {least}")
        if self.value_heads % self.key_heads:
            raise ConfigError(f"model config: value_heads={self.value_heads} is no multiple of key_heads")
        if len(self.recurrent) != self.layers:
            raise ConfigError(f"model config: recurrent has {len(self.recurrent)} values for {self.layers} layers")

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v of all heads."""
        return 2 * self.key_width + self.value_width

    @property
    def state_parts(self) -> StateParts:
        matrix = (self.value_heads, self.key_dim, self.value_dim)
        return ((COLUMNS, (self.taps - 1, self.channels)), (MATRIX, matrix)) if any(self.recurrent) else ()


def check(cfg: Config) -> None:
    """Raises UnsupportedError on what this family does not have."""
    llama.check_rope(cfg)
    if not cfg.qk_norm or cfg.mlp_bias or cfg.sliding_window or cfg.layer_windows:
        feature = f"no qk_norm, mlp_bias or a window in a {cfg.family} model"
        raise UnsupportedError(feature, "its attention has norms of q and k and sees everything, its MLP has no biases")
    if all(cfg.recurrent):
        raise UnsupportedError(f"a {cfg.family} model without attention", "we serve those with a layer of it")


def guessing(cfg: Config) -> Config:
    """The configuration of a layer that guesses (`models.mtp`): it attends."""
    return replace(cfg, layers=1, recurrent=(False,))


def spec(cfg: Config) -> tuple[Param, ...]:
    """The parameters, in the order of use; q of attention gives query and gate of a head after the other."""
    attending = tuple(layer for layer in range(cfg.layers) if not cfg.recurrent[layer])
    table = []
    for param in (moe if cfg.experts else qwen).spec(cfg):
        if ".attn." in param.name and param.name.split(".")[3] == "q":
            param = replace(param, shape=(2 * cfg.q_width, *param.shape[1:]))
        table.append(replace(param, layers=attending) if ".attn." in param.name else param)
        if param.name == "layers.{layer}.attn_norm.weight":
            table += linear_params(cfg)
    return tuple(table)


def linear_params(cfg: Config) -> list[Param]:
    """The parameters of a layer of gated DeltaNet."""
    layers = tuple(layer for layer in range(cfg.layers) if cfg.recurrent[layer])
    parts = (cfg.key_width, cfg.key_width, cfg.value_width)
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "qkv": ((cfg.channels, cfg.width), "column"),
        "z": ((cfg.value_width, cfg.width), "column"),
        "b": ((cfg.value_heads, cfg.width), "column"),
        "a": ((cfg.value_heads, cfg.width), "column"),
        "conv": ((cfg.channels, cfg.taps), "column"),
        "a_log": ((cfg.value_heads,), "column"),
        "dt_bias": ((cfg.value_heads,), "column"),
        "norm": ((cfg.value_dim,), "shared"),
        "o": ((cfg.width, cfg.value_width), "row"),
    }
    return [
        Param(
            f"layers.{{layer}}.linear.{name}.weight",
            shape,
            split,
            parts=parts if name in ("qkv", "conv") else (),
            layers=layers,
        )
        for name, (shape, split) in shapes.items()
        if layers
    ]


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache, or its state into batch.state."""
    normed = ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps)
    if cfg.recurrent[layer]:
        x = x + linear_attention(cfg, w.linear, normed, layer, batch)
    else:
        x = x + attention(cfg, w.attn, normed, layer, batch)
    normed = ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps)
    return x + (moe.mlp(cfg, w.mlp, normed) if cfg.experts else llama.mlp(w.mlp, normed))


def attention(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """Grouped-query attention, each element of whose result a sigmoid scales."""
    packed = ops.linear(x, w.q.weight, w.q.bias)  # [tokens, heads * 2 * head_dim]
    q = ops.cut_heads(packed, cfg.heads, 0, cfg.head_dim)
    gate = ops.cut_heads(packed, cfg.heads, cfg.head_dim, 2 * cfg.head_dim)
    out = llama.attended(cfg, w, x, q, layer, batch)
    return ops.linear(ops.sigmoid_mul(gate, out), w.o.weight, w.o.bias)


def linear_attention(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """Gated DeltaNet: a short convolution of q, k and v, the gated delta rule, a norm of each head and a gate."""
    place, heads = cfg.state_index(layer), {"key_heads": cfg.key_heads, "value_heads": cfg.value_heads}
    qkv, z = ops.linear(x, w.qkv.weight), ops.linear(x, w.z.weight)
    b, a = ops.linear(x, w.b.weight), ops.linear(x, w.a.weight)  # [tokens, value_heads]
    qkv, batch.state = ops.causal_conv(qkv, batch.state, w.conv.weight, layer=place, silu=True)
    out, batch.state = ops.delta_rule(
        *(qkv, a, b, batch.state, w.a_log.weight, w.dt_bias.weight),
        layer=place,
        key_dim=cfg.key_dim,
        tiled=cfg.tiled,
        **heads,
    )
    normed = ops.rms_norm(out, w.norm.weight, cfg.norm_eps, cfg.value_heads)
    return ops.linear(ops.silu_mul(z, normed), w.o.weight)
