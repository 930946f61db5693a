"""Large files that are there whole or not at all: written under a temporary name beside their own, then renamed."""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from roofline.common.errors import CapacityError, ConfigError
from roofline.common.files import cause_of
from roofline.common.units import human_bytes
from roofline.weights.files.mapped import TensorInfo

_SPARE = 1 << 20  # bytes of a disk that are left alone
# Bytes of a tensor, in order and in any pieces, each a contiguous uint8 array.
Pieces = Iterable[np.ndarray]


@contextmanager
def _named_causes(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {cause_of(error)}") from error


def check_new(path: Path, nbytes: int) -> None:
    """Raise unless something new of so many bytes can be written at a path: ConfigError where it is there already or
    its folder is not there, CapacityError where the disk has not the room."""
    if os.path.lexists(path):
        raise ConfigError(f"{path} is there already: name another place, or remove it first")
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} cannot be written: permission is missing in the folder {path.parent}")
    free = shutil.disk_usage(path.parent).free
    if free < nbytes + _SPARE:
        remedy = f"Free {human_bytes(nbytes + _SPARE - free)}, or name a place on another disk."
        raise CapacityError(f"{path}", nbytes + _SPARE, free, "bytes of disk", remedy)


@contextmanager
def new_file(path: Path, nbytes: int) -> Iterator[BinaryIO]:
    """A stream whose bytes become the file `path` at the end of the block; nothing stays where the block raises.

    nbytes: what will be written, as far as it is known before. Raises as `check_new`, and ConfigError where the system
    refuses.
    """
    check_new(path, nbytes)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with _named_causes(path):
        try:
            with part.open("xb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path, nbytes: int) -> Iterator[Path]:
    """A folder that becomes `path` at the end of the block; nothing stays where the block raises. As `new_file`."""
    check_new(path, nbytes)
    with _named_causes(path):
        part = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            yield part
            part.chmod(0o755)
            part.rename(path)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise


def write_tensor(stream: BinaryIO, info: TensorInfo, pieces: Pieces) -> None:
    """The bytes of a tensor. Another number of them than `info` says is a bug of the caller."""
    written = 0
    for piece in pieces:
        stream.write(piece.data)
        written += piece.nbytes
    assert written == info.nbytes, f"{info.name}: {written} bytes of {info.nbytes}"
