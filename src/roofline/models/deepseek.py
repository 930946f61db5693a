"""DeepSeek-V2 and V3, Kimi K2, GLM-4.7-Flash, Mistral 4: attention over compressed keys and values, experts beside
shared ones behind first dense layers.

Sources: DeepSeek-AI 2024 (V2, V3), and the configurations published with the weights.
"""

from dataclasses import dataclass
from typing import ClassVar

from roofline import ops
from roofline.models import latent, llama, moe, routed
from roofline.models.family import ForwardBatch
from roofline.models.spec import Param, Weights
from roofline.ops.experts import routes_by_logits
from roofline.ops.position_factors import PositionFactors
from roofline.ops.symbol import Value

check, embed, head = latent.check, latent.embed, latent.head


@dataclass(frozen=True)
class Config(latent.Config, routed.Config):
    """ffn is of each expert, shared_ffn of all shared ones together.

    query_beta, query_context: queries are multiplied as those of Ministral 3, 0:
    they are not.
    """

    scales_shared: ClassVar[bool] = False
    query_beta: float = 0.0
    query_context: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.query_factors(0)  # refuses the impossible

    def query_factors(self, layer: int) -> PositionFactors | None:
        return PositionFactors(self.query_beta, self.query_context) if self.query_beta else None


guessing = routed.guessing


def spec(cfg: Config) -> tuple[Param, ...]:
    """The parameters, in the order of use."""
    return latent.with_attention(cfg, routed.spec(cfg))


def block(cfg: Config, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
    """One layer on x [tokens, width]; the step's k and v go into batch.cache."""
    x = x + latent.attention(cfg, w.attn, ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps), layer, batch)
    normed = ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps)
    if layer in cfg.dense:
        return x + llama.mlp(w.mlp, normed)
    if routes_by_logits(cfg.score, cfg.groups, 1.0, cfg.choice_bias):  # a factor stands behind the sum of the experts
        return x + moe.mlp(cfg, w.mlp, normed, cfg.routed_scale)
    return x + moe.mlp(cfg, w.mlp, normed, choose=routed.choose)
