"""What families have in common whose layers with a window turn q and k by a table of their own: Gemma 3, OLMo 3."""

from dataclasses import dataclass

from roofline.common.errors import ConfigError
from roofline.models.config import ModelConfig
from roofline.ops.rope_tables import RopeTable


@dataclass(frozen=True)
class LocalRopeConfig(ModelConfig):
    """local_theta: of layers with a window, which have no rope_scaling; None: all layers turn alike."""

    local_theta: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local_theta is not None and not self.local_theta > 0:
            raise ConfigError(f"model config: local_theta={self.local_theta} must be above 0")

    def rope_of(self, layer: int) -> RopeTable | None:
        """Layers with a window have a theta of their own."""
        if self.local_theta is None or not self.window(layer):
            return self.rope
        return RopeTable.of(self.head_dim, self.local_theta, self.rope_style, None)
