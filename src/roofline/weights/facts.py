"""What a model is, in figures that lists of models show."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class ModelFacts:
    """family: of `models.registry`; parameters: how many numbers the tensors hold; weight_bytes: of the tensors in the
    file, or as they are packed in a bundle; weight_format: of most of them, a name of `ops.formats`; file_kind: as
    `Checkpoint.kind`."""

    family: str
    parameters: int
    weight_bytes: int
    weight_format: str
    file_kind: str


class ShapedTensor(Protocol):
    """What is known of a tensor of a checkpoint, or of one that a bundle was packed from."""

    @property
    def format(self) -> str:
        """A name of `ops.formats`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, cols), or (cols,)."""


def facts_of(tensors: Mapping[str, ShapedTensor], weight_bytes: int, family: str, file_kind: str) -> ModelFacts:
    """The facts of a model with these tensors. The other arguments are fields of its facts."""
    counts = Counter[str]()
    for tensor in tensors.values():
        counts[tensor.format] += math.prod(tensor.shape)
    weight_format = max(counts, key=counts.__getitem__, default="")
    return ModelFacts(family, counts.total(), weight_bytes, weight_format, file_kind)
