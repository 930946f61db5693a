"""GGUF models in several files, NAME-00001-of-00003.gguf, as `gguf-split` of llama.cpp writes them.

The first file has all of the model's metadata, the others only their number, how many there are and how many tensors
the model has. Each file is a GGUF file by itself, with some of the tensors.
"""

import os
import re
from pathlib import Path

import numpy as np

from roofline.common.fields import Fields, refuse, shorten
from roofline.weights.files.gguf import GGUFFile, GgufMetadata
from roofline.weights.files.mapped import TensorInfo

_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class GGUFModel:
    """A model of one GGUF file, or of all files that it is split into, as if they were one.

    Args:
        path: the file, or any of its parts.

    Attributes: path, metadata and tensors as those of GGUFFile.

    Raises ConfigError naming file and field for a part that is missing, damaged or of another model, besides what
    GGUFFile raises. Parts of two models with the same names, shapes and counts cannot be told apart.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        file = GGUFFile(self.path)
        count = Fields(self.path, file.metadata).get("split.count", int, 0)
        parts = [file]
        if count > 1:
            names = _names(self.path, count)
            parts = [file if name == self.path else GGUFFile(name) for name in names]
            _check(parts)
        self.metadata: GgufMetadata = parts[0].metadata
        self._file_of: dict[str, GGUFFile] = {}
        for part in parts:
            for name in part.tensors:
                if (other := self._file_of.get(name)) is not None:
                    reason = f"is in {other.path.name} too: the parts are of different models"
                    refuse(part.path, f"tensor {shorten(name)!r}", reason)
                self._file_of[name] = part
        self.tensors: dict[str, TensorInfo] = {name: part.tensors[name] for name, part in self._file_of.items()}
        if count > 1:
            expected = Fields(parts[0].path, parts[0].metadata).need("split.tensors.count", int)
            if len(self.tensors) != expected:
                reason = f"the model has {expected} tensors, its parts have {len(self.tensors)}"
                refuse(parts[0].path, "split.tensors.count", reason)

    def read(self, name: str) -> np.ndarray:
        """uint8 [nbytes], a view of the mapped file. Raises ConfigError for an unknown name."""
        if name not in self._file_of:
            refuse(self.path, f"tensor {shorten(name)!r}", "is not there")
        return self._file_of[name].read(name)


def part_names(path: Path) -> list[Path]:
    """The files of a model of which `path` is one, by its name: `path` alone unless it is named as a part is."""
    match = _NAME.fullmatch(path.name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return [path]
    return [path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf") for number in range(1, int(match[3]) + 1)]


def _names(path: Path, count: int) -> list[Path]:
    """The files of a model in `count` parts, all of which exist."""
    names = part_names(path)
    if len(names) != count:
        ending = f"-NNNNN-of-{count:05d}.gguf"
        reason = f"it is one of {count} parts, so its name must end in {ending} for the others to be found"
        refuse(path, "split.count", reason)
    missing = [name.name for name in names if not os.path.lexists(name)]
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        refuse(path, "split.count", f"parts of the model are missing beside it: {', '.join(missing[:8])}{more}")
    return names


def _check(parts: list[GGUFFile]) -> None:
    """Each part says that it is the one its name says, and all agree on what they are parts of."""
    first = parts[0].metadata
    for number, part in enumerate(parts):
        fields = Fields(part.path, part.metadata)
        count, part_number = fields.need("split.count", int), fields.need("split.no", int)
        if count != len(parts):
            fields.refuse("split.count", f"is {count}, but its name and {parts[0].path.name} say {len(parts)}")
        if part_number != number:
            fields.refuse("split.no", f"is {part_number}, but by its name this is part {number} (counted from 0)")
        for key in part.metadata.keys() & first.keys():
            if key != "split.no" and part.metadata[key] != first[key]:
                reason = f"differs from that of {parts[0].path.name}: the parts are of different models"
                fields.refuse(shorten(key), reason)
