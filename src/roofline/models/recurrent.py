"""What configurations say alike of models in which some layers keep recurrent state and the others attend."""

from dataclasses import dataclass

from roofline.models.config import ModelConfig
from roofline.ops.rope_tables import RopeTable


@dataclass(frozen=True)
class RecurrentConfig(ModelConfig):
    """recurrent: of each layer, whether it keeps state; such a layer neither attends nor turns anything."""

    recurrent: tuple[bool, ...] = ()

    def attends(self, layer: int) -> bool:
        return not self.recurrent[layer]

    def keeps_state(self, layer: int) -> bool:
        return self.recurrent[layer]

    def rope_of(self, layer: int) -> RopeTable | None:
        return None if self.recurrent[layer] else super().rope_of(layer)
