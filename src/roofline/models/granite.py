"""Granite: Llama with multipliers. Source: Granite Team 2024, and the configurations published with the weights."""

from dataclasses import dataclass

from roofline import ops
from roofline.common.errors import ConfigError
from roofline.models import llama
from roofline.models.config import ModelConfig
from roofline.models.family import ForwardBatch
from roofline.models.spec import Weights
from roofline.ops.symbol import Value

check, spec = llama.check, llama.spec


@dataclass(frozen=True)
class Config(ModelConfig):
    """What embeddings, the branches of a layer and scores are multiplied by, and logits are divided by."""

    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    logits_scaling: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"model config: {name}={getattr(self, name)} must be above 0")

    @property
    def attention_scale(self) -> float:
        return float(self.attention_multiplier)


def embed(cfg: Config, w: Weights, batch: ForwardBatch) -> Value:
    """ids [tokens] -> x [tokens, width]."""
    return times(llama.embed(cfg, w, batch), cfg.embedding_multiplier)


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    attended = llama.attention(cfg, w.attn, ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps), layer, batch)
    x = x + times(attended, cfg.residual_multiplier)
    return x + times(llama.mlp(w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps)), cfg.residual_multiplier)


def head(cfg: Config, w: Weights, x: Value, batch: ForwardBatch) -> Value:
    """x [tokens, width] -> logits [rows, vocab] of the rows that want them."""
    return times(llama.head(cfg, w, x, batch), 1.0 / cfg.logits_scaling)


def times(x: Value, factor: float) -> Value:
    """x * factor."""
    return x if factor == 1 else ops.scale(x, factor)
