"""Disk of the model store: hashes, free space, and disk errors turned into messages a user can act on."""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from roofline.common.errors import CapacityError, ConfigError
from roofline.common.files import cause_of

_CHUNK = 1 << 20


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's errors on our store into ConfigErrors with a remedy."""
    try:
        yield
    except OSError as error:
        remedy = "Free some space, or set" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Set"
        where = error.filename or path
        raise ConfigError(f"{where}: {cause_of(error)}. {remedy} ROOFLINE_HOME to another folder.") from error


def sha256_of(path: Path, progress: Callable[[int], None]) -> str:
    """Hex SHA-256 of a file; `progress` gets the bytes read so far."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress(done)
    return digest.hexdigest()


def need_space(folder: Path, needed: int, what: str) -> None:
    """Raise CapacityError when the disk of `folder` has fewer than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        remedy = "Free some space, or set ROOFLINE_HOME to a folder on another disk."
        raise CapacityError(f"{what} in {folder}", needed, free, "bytes of disk", remedy)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder that others are changing."""
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total
