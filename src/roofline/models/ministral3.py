"""Ministral 3: Llama whose queries grow with the position. Source: the configurations published with the weights."""

from dataclasses import dataclass

from roofline.common.errors import ConfigError
from roofline.models import llama
from roofline.models.config import ModelConfig
from roofline.ops.position_factors import PositionFactors

check, spec, embed, block, head = llama.check, llama.spec, llama.embed, llama.block, llama.head


@dataclass(frozen=True)
class Config(ModelConfig):
    """query_beta, query_context: queries are multiplied by 1 + query_beta * ln(1 + floor(position / query_context))."""

    query_beta: float = 0.1
    query_context: int = 16384

    def __post_init__(self) -> None:
        super().__post_init__()
        self.query_factors(0)  # refuses the impossible
        original = (self.rope_scaling or {}).get("original_max_position_embeddings", self.query_context)
        if original != self.query_context:
            reason = f"is not the {original:g} that rope is scaled from: files have one number for both"
            raise ConfigError(f"model config: query_context={self.query_context} {reason}")

    def query_factors(self, layer: int) -> PositionFactors | None:
        return PositionFactors(self.query_beta, self.query_context)
