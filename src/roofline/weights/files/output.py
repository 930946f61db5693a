"""Large files that are there whole or not at all: written under a temporary name beside their own, then renamed.

The temporary name says which process writes, and a lock on it that the process lives. What a process leaves that was
killed is removed when the same file is written again.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from roofline.common import log
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
    its folder is not there, CapacityError where the disk has not the room. What killed processes left of it, which
    takes room as well, is removed before."""
    if os.path.lexists(path):
        raise ConfigError(f"{path} is there already: name another place, or remove it first")
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} cannot be written: permission is missing in the folder {path.parent}")
    _remove_leftovers(path)
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
    part = _part_of(path)
    with _named_causes(path):
        try:
            with part.open("xb") as stream:
                _lock(stream.fileno())
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
    with staging_folder(path) as part, _named_causes(path):
        yield part
        part.chmod(0o755)
        part.rename(path)


@contextmanager
def staging_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path`, on its disk, for what is to be renamed to it; it is removed at the end of the block, with
    what is in it then, or where this process is killed, when `path` is written again (`check_new`)."""
    part = _part_of(path)
    with _named_causes(path):
        part.mkdir(0o700)
        descriptor = os.open(part, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor)
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)
        os.close(descriptor)


def _part_of(path: Path) -> Path:
    """The name under which this process writes."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def _lock(descriptor: int) -> None:
    """Hold a file or folder as long as this process lives. Where a file system has no locks, leftovers stay there."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_leftovers(path: Path) -> None:
    """Remove what processes that were killed while they wrote `path` have left; one that lives has its part locked."""
    ours = re.compile(re.escape(f".{path.name}.") + r"[0-9]+\.part")
    with suppress(OSError):
        for part in [part for part in path.parent.iterdir() if ours.fullmatch(part.name)]:
            with suppress(OSError):
                _remove_leftover(part, path)


def _remove_leftover(part: Path, path: Path) -> None:
    descriptor = os.open(part, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink()
    finally:
        os.close(descriptor)
    line = "%s was removed: a process that was killed while it wrote %s had left it"
    log.get("weights").warning(line, part, path)


def write_tensor(stream: BinaryIO, info: TensorInfo, pieces: Pieces) -> None:
    """The bytes of a tensor. Another number of them than `info` says is a bug of the caller."""
    written = 0
    for piece in pieces:
        stream.write(piece.data)
        written += piece.nbytes
    assert written == info.nbytes, f"{info.name}: {written} bytes of {info.nbytes}"
