"""Hunyuan with experts (A13B): attention of the dense one, and an expert that all tokens go to beside those chosen.

Source: Tencent Hunyuan Team 2025.
"""

from roofline import ops
from roofline.models import hunyuan, llama, moe, routed
from roofline.models.family import ForwardBatch
from roofline.models.spec import Weights
from roofline.ops.symbol import Value

Config, check, spec, embed, head = routed.Config, routed.check, routed.spec, llama.embed, llama.head


def block(cfg: routed.Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    x = x + hunyuan.attention(cfg, w.attn, ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps), layer, batch)
    return x + moe.mlp(cfg, w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps), choose=routed.choose)
