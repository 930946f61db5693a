"""Gemma (the first): Llama with GeGLU, and with embeddings scaled by the root of the width. Source: Gemma Team 2024."""

from roofline import ops
from roofline.models import gemma, llama
from roofline.models.config import ModelConfig
from roofline.models.family import ForwardBatch
from roofline.models.spec import Weights
from roofline.ops.symbol import Value

check, spec, head = llama.check, llama.spec, llama.head


def embed(cfg: ModelConfig, w: Weights, batch: ForwardBatch) -> Value:
    """ids [tokens] -> x [tokens, width]."""
    return ops.scale(llama.embed(cfg, w, batch), float(cfg.width**0.5))


def block(cfg: ModelConfig, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    x = x + llama.attention(cfg, w.attn, ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps), layer, batch)
    return x + gemma.mlp(w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps))
