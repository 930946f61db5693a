"""Granite 4: Mamba-2 in most layers, attention in the others, between Granite's multipliers, with or without experts.

Source: the configurations published with the weights of Granite 4.0.
"""

from dataclasses import dataclass
from typing import ClassVar

from roofline import ops
from roofline.common.errors import UnsupportedError
from roofline.models import granite, granite_moe, llama, mamba2, moe, qwen
from roofline.models.family import ForwardBatch
from roofline.models.spec import Param, Weights, hybrid_table
from roofline.ops.symbol import Value

embed, head = granite.embed, granite.head


@dataclass(frozen=True)
class Config(granite_moe.Config, mamba2.Mamba2Config):
    """experts: 0 where each layer has an MLP of ffn. positions: "rope" or, as published, "none"."""

    needs_experts: ClassVar[bool] = False


def check(cfg: Config) -> None:
    """Raises UnsupportedError on what this family does not have."""
    if cfg.qk_norm or cfg.mlp_bias or cfg.sliding_window or cfg.layer_windows:
        feature = f"qk_norm, mlp_bias or a window in a {cfg.family} model"
        raise UnsupportedError(feature, "its attention sees everything and has no norms, its MLP has no biases")
    if all(cfg.recurrent):
        raise UnsupportedError(f"a {cfg.family} model without attention", "we serve those with a layer of it")


def spec(cfg: Config) -> tuple[Param, ...]:
    """The parameters, in the order of use."""
    return hybrid_table((moe if cfg.experts else qwen).spec(cfg), cfg.recurrent, mamba2.mixer_params(cfg))


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache, or its state into batch.state."""
    normed = ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps)
    if cfg.recurrent[layer]:
        mixed = mamba2.mixer(cfg, w.ssm, normed, layer, batch)
    else:
        mixed = llama.attention(cfg, w.attn, normed, layer, batch)
    x = x + granite.times(mixed, cfg.residual_multiplier)
    normed = ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps)
    out = moe.mlp(cfg, w.mlp, normed) if cfg.experts else llama.mlp(w.mlp, normed)
    return x + granite.times(out, cfg.residual_multiplier)
