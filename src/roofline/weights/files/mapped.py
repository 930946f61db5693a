"""What the readers of weight files share: mapped files, `TensorInfo`, and errors that name file and field."""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from roofline.common.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

JsonObject = Mapping[str, Any]  # config.json, or the metadata of a GGUF file: values are checked where they are read


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a file.

    Attributes:
        name: the name it goes by (a file's own in the readers, the canonical one in a Checkpoint).
        format: a name of `ops.formats`.
        shape: (rows, cols), or (cols,) for vectors; the last dimension is contiguous.
        nbytes: bytes in the file.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    nbytes: int


def refuse(path: Path, field: str, reason: str) -> NoReturn:
    """Raise the ConfigError that names file and field."""
    raise ConfigError(f"{path}: {field}: {reason}")


def shorten(text: str) -> str:
    """A name from an untrusted file, fit for an error message: printable and at most 80 characters."""
    start = "".join(c if c.isprintable() else "?" for c in text[:80])
    return start + "..." if len(text) > 80 else start


def map_file(path: Path) -> mmap.mmap:
    """The whole file, read-only. Raises ConfigError when it is missing, unreadable, empty or not a file."""
    try:
        with path.open("rb") as stream:
            if path.stat().st_size == 0:
                refuse(path, "file", "it is empty")
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # e.g. a NUL in the path, a device
        raise ConfigError(f"{path}: cannot be mapped: {error}") from error


def as_bytes(mapped: mmap.mmap) -> "np.ndarray":
    """uint8 view of a mapping; the mapping lives as long as the view."""
    import numpy as np

    return np.frombuffer(mapped, np.uint8)
