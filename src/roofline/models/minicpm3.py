"""MiniCPM3: DeepSeek's attention in Llama's layers, with multipliers. Source: the configurations published with the
weights."""

from dataclasses import dataclass

from roofline import ops
from roofline.common.errors import ConfigError
from roofline.models import latent, llama
from roofline.models.family import ForwardBatch
from roofline.models.spec import Weights
from roofline.ops.symbol import Value

check, spec = latent.check, latent.spec


@dataclass(frozen=True)
class Config(latent.Config):
    """What embeddings and the branches of a layer are multiplied by, and what the head reads is divided by."""

    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    head_divisor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("embedding_multiplier", "residual_multiplier", "head_divisor"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"model config: {name}={getattr(self, name)} must be above 0")


def embed(cfg: Config, w: Weights, batch: ForwardBatch) -> Value:
    """ids [tokens] -> x [tokens, width]."""
    return ops.scale(llama.embed(cfg, w, batch), cfg.embedding_multiplier)


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    normed = ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps)
    x = x + ops.scale(latent.attention(cfg, w.attn, normed, layer, batch), cfg.residual_multiplier)
    mlp = llama.mlp(w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps))
    return x + ops.scale(mlp, cfg.residual_multiplier)


def head(cfg: Config, w: Weights, x: Value, batch: ForwardBatch) -> Value:
    """x [tokens, width] -> logits [rows, vocab] of the rows that want them."""
    return ops.scale(llama.head(cfg, w, x, batch), 1.0 / cfg.head_divisor)
