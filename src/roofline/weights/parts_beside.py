"""What a model that reads more than text has beside its text part."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Self

from roofline.common.json_types import JsonMapping
from roofline.common.units import human_bytes


@dataclass(frozen=True)
class PartsBeside:
    """What a model has beside its text part, and is not used.

    kind: its model_type; modules: their names; tensors: how many they have, of `nbytes` bytes in the files; media: an
    id that stands for a picture or for sound, or encloses one, and that no prompt may have -> its key in config.json.
    """

    kind: str
    modules: Sequence[str]
    tensors: int
    nbytes: int
    media: Mapping[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """What is read and what is not, in a sentence."""
        says = f"the text part of a {self.kind} model, which reads text alone here"
        if not self.tensors:
            return says
        size = f"{self.tensors:,} tensors, {human_bytes(self.nbytes)}"
        return f"{says}; not used: {' and '.join(self.modules)} ({size})"

    def as_json(self) -> JsonMapping:
        """Plain values, of which `of` makes it again."""
        return asdict(self) | {"modules": list(self.modules), "media": {str(i): key for i, key in self.media.items()}}

    @classmethod
    def of(cls, values: JsonMapping) -> Self:
        """The inverse of `as_json`."""
        return cls(**{**values, "media": {int(i): key for i, key in values["media"].items()}})
