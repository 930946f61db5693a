"""Granite with experts, and one beside them that every token goes to: a mixture with Granite's multipliers.

Source: the configurations published with Granite 3.0 and 3.1.
"""

from dataclasses import dataclass
from typing import ClassVar

from roofline import ops
from roofline.models import granite, llama, moe
from roofline.models.family import ForwardBatch
from roofline.models.spec import Weights
from roofline.ops.symbol import Value

check, spec, embed, head = llama.check_rope, moe.spec, granite.embed, granite.head


@dataclass(frozen=True)
class Config(granite.Config, moe.Config):
    """The multipliers of the one, the experts of the other."""

    scales_shared: ClassVar[bool] = False


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    attended = llama.attention(cfg, w.attn, ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps), layer, batch)
    x = x + granite.times(attended, cfg.residual_multiplier)
    chosen = moe.mlp(cfg, w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps))
    return x + granite.times(chosen, cfg.residual_multiplier)
