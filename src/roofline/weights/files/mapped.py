"""What the readers of weight files share: mapped files and `TensorInfo`."""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roofline.common.errors import ConfigError
from roofline.common.fields import refuse
from roofline.common.files import open_regular

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


def map_file(path: Path) -> mmap.mmap:
    """The whole file, read-only. Raises ConfigError when it is missing, unreadable, empty or not a file."""
    with open_regular(path) as stream:
        try:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            refuse(path, "file", "it is empty; get the file again")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be mapped: {error.strerror or error}") from error


def as_bytes(mapped: mmap.mmap) -> "np.ndarray":
    """uint8 view of a mapping; the mapping lives as long as the view."""
    import numpy as np

    return np.frombuffer(mapped, np.uint8)


def forget(view: "np.ndarray") -> None:
    """Tell the system that the pages of a mapped file under this view will not be read again soon, so that a program
    that reads a file once has little of it in memory. Nothing happens to arrays that are not mapped."""
    import numpy as np

    owner: object = view
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    if not isinstance(owner, mmap.mmap) or not view.nbytes:
        return
    start = view.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    owner.madvise(mmap.MADV_DONTNEED, first, start + view.nbytes - first)
