"""LFM2: short convolutions between gates in most layers, attention in the others, with or without experts.

Sources: Liquid AI 2025 (LFM2), and the configurations published with the weights.
"""

from dataclasses import dataclass
from typing import ClassVar

from roofline import ops
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.models import llama, moe, qwen, routed
from roofline.models.family import ForwardBatch
from roofline.models.recurrent import RecurrentConfig
from roofline.models.spec import Param, Weights, hybrid_table
from roofline.ops.state import COLUMNS, StateParts
from roofline.ops.symbol import Value

embed, head = llama.embed, llama.head


@dataclass(frozen=True)
class Config(RecurrentConfig, routed.Config):
    """experts: 0 where each layer has an MLP of ffn. recurrent: of each layer, whether it is a convolution; the others
    attend. taps: tokens that a convolution sees; conv_bias: whether it and the matrices beside it have biases."""

    needs_experts: ClassVar[bool] = False
    taps: int = 3
    conv_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.taps < 2:
            raise ConfigError(f"model config: taps={self.taps} is not at least 2")
        if len(self.recurrent) != self.layers:
            raise ConfigError(f"model config: recurrent has {len(self.recurrent)} values for {self.layers} layers")

    @property
    def state_parts(self) -> StateParts:
        return ((COLUMNS, (self.taps - 1, self.width)),) if any(self.recurrent) else ()


def check(cfg: Config) -> None:
    """Raises UnsupportedError on what this family does not have."""
    llama.check_rope(cfg)
    if not cfg.qk_norm or cfg.mlp_bias or cfg.sliding_window or cfg.layer_windows:
        feature = f"no qk_norm, mlp_bias or a window in a {cfg.family} model"
        raise UnsupportedError(feature, "its attention has norms of q and k and sees everything, its MLP has no biases")
    if all(cfg.recurrent):
        raise UnsupportedError(f"a {cfg.family} model without attention", "we serve those with a layer of it")


def spec(cfg: Config) -> tuple[Param, ...]:
    """The parameters, in the order of use."""
    table = routed.spec(cfg) if cfg.experts else qwen.spec(cfg)
    return hybrid_table(table, cfg.recurrent, conv_params(cfg) if any(cfg.recurrent) else ())


def conv_params(cfg: Config) -> list[Param]:
    """The parameters of a convolution; the matrix before it gives the gate before it, the one behind, and its input."""
    layers, width = tuple(layer for layer in range(cfg.layers) if cfg.recurrent[layer]), cfg.width
    parts = (width, width, width)
    table = [
        Param("layers.{layer}.short.bcx.weight", (3 * width, width), "column", parts=parts, layers=layers),
        Param("layers.{layer}.short.conv.weight", (width, cfg.taps), "column", layers=layers),
        Param("layers.{layer}.short.out.weight", (width, width), "row", layers=layers),
    ]
    biases = [
        Param("layers.{layer}.short.bcx.bias", (3 * width,), "column", parts=parts, layers=layers),
        Param("layers.{layer}.short.conv.bias", (width,), "column", layers=layers),
        Param("layers.{layer}.short.out.bias", (width,), "replicate", layers=layers),
    ]
    return table + (biases if cfg.conv_bias else [])


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache, or its columns into batch.state."""
    normed = ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps)
    if cfg.recurrent[layer]:
        x = x + short_convolution(cfg, w.short, normed, layer, batch)
    else:
        x = x + llama.attention(cfg, w.attn, normed, layer, batch)
    normed = ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps)
    if not cfg.experts or layer in cfg.dense:
        return x + llama.mlp(w.mlp, normed)
    return x + moe.mlp(cfg, w.mlp, normed, choose=routed.choose)


def short_convolution(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """C * conv(B * x) between two matrices."""
    width = cfg.width
    packed = ops.linear(x, w.bcx.weight, w.bcx.bias)  # [tokens, 3 * width]
    before, behind, wide = (ops.split(packed, at * width, (at + 1) * width) for at in range(3))
    mixed, batch.state = ops.causal_conv(
        ops.mul(before, wide), batch.state, w.conv.weight, w.conv.bias, layer=cfg.state_index(layer)
    )
    return ops.linear(ops.mul(behind, mixed), w.out.weight, w.out.bias)
