"""SmolLM3: Llama with layers that turn nothing. Sources: Bakouch et al. 2025; Yang et al. 2025 for such layers."""

from dataclasses import dataclass

from roofline.common.errors import ConfigError
from roofline.models import llama
from roofline.models.config import ModelConfig
from roofline.ops.rope_tables import RopeTable

check, spec, embed, block, head = llama.check, llama.spec, llama.embed, llama.block, llama.head


@dataclass(frozen=True)
class Config(ModelConfig):
    """turning: for each layer whether it turns q and k."""

    turning: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.turning) < self.layers:
            reason = f"has no value for each of {self.layers} layers"
            raise ConfigError(f"model config: turning={list(self.turning)} {reason}")

    def rope_of(self, layer: int) -> RopeTable | None:
        return self.rope if self.turning[layer] else None
