"""FlexOlmo: OLMo 2 with experts. Source: Shi et al. 2025."""

from roofline import ops
from roofline.models import llama, moe, olmo2, routed
from roofline.models.family import ForwardBatch
from roofline.models.spec import Param, Weights
from roofline.ops.symbol import Value

Config, check, embed, head = routed.Config, routed.check, llama.embed, llama.head


def spec(cfg: routed.Config) -> tuple[Param, ...]:
    """The table of routed models with its norms behind attention and experts."""
    table = routed.spec(cfg)
    return (
        *olmo2.post_normed(table, cfg),
        *(param for param in table if ".attn." in param.name and "_norm." in param.name),
    )


def block(cfg: routed.Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    attended = llama.attention(cfg, w.attn, x, layer, batch)
    x = x + ops.rms_norm(attended, w.attn_post_norm.weight, cfg.norm_eps)
    out = moe.mlp(cfg, w.mlp, x, choose=routed.choose)
    return x + ops.rms_norm(out, w.mlp_post_norm.weight, cfg.norm_eps)
