"""Writing files atomically, or only where that is possible; locking them; reading small ones that may not exist."""

import errno
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO

from roofline.common import log
from roofline.common.errors import ConfigError

_CAUSES = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the limit on the size of files is reached (ulimit -f)",
    errno.EMFILE: "too many files are open; close some, or raise the limit (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine",
    errno.ENOMEM: "memory is used up",
    errno.EACCES: "permission is missing",
    errno.EPERM: "permission is missing",
    errno.EROFS: "the file system is read-only",
    errno.EEXIST: "a part of the path is a file",
    errno.ENOTDIR: "a part of the path is a file",
    errno.EISDIR: "it is a folder",
    errno.ENOENT: "there is no such file or folder",
}
_not_kept: set[str] = set()  # what this process has said of


def cause_of(error: OSError) -> str:
    """Why a place cannot be read or written, in words."""
    return _CAUSES.get(error.errno or 0, error.strerror or str(error))


@contextmanager
def where_possible(what: str, place: Path) -> Iterator[None]:
    """Around the writing of something that only spares later runs work: where that fails, a warning says so once for
    each `what`, and the program goes on."""
    try:
        yield
    except OSError as error:
        if what not in _not_kept:
            _not_kept.add(what)
            remedy = "set ROOFLINE_HOME to a folder that can be written"
            log.get("common").warning("%s not kept: %s: %s; %s", what, place, cause_of(error), remedy)


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write `path` (text as UTF-8) so that it holds either all of the data or what it held before.

    A link stays, and the file behind it is written. What is no file, such as /dev/stdout or a pipe, is written into.
    """
    content = data.encode() if isinstance(data, str) else data
    if path.exists() and not path.is_file():  # a rename would put a file in its place
        with path.open("wb", buffering=0) as stream:
            write_all(stream, content, path)
        return
    path = path.resolve()
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        with part.open("wb", buffering=0) as stream:
            write_all(stream, content, path)
            os.fsync(stream.fileno())
        os.replace(part, path)
    except OSError as error:
        if error.filename == str(part):
            error.filename = str(path)  # the user never named the other
        raise
    finally:
        part.unlink(missing_ok=True)


def write_all(stream: RawIOBase, content: bytes, path: Path) -> None:
    """Write all of the content to an unbuffered stream. Raises OSError with the name of the file."""
    view = memoryview(content)
    try:
        while view:
            view = view[stream.write(view) or 0 :]
    except OSError as error:
        error.filename = error.filename or str(path)  # what is told names the file
        raise


@contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a lock file; `waiting` is called while another process holds it. The kernel drops it when we die."""
    import fcntl
    import time

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting()
                time.sleep(0.1)
        yield  # closing the file unlocks it


def entries(folder: Path) -> list[Path]:
    """What is in a folder, by name; nothing where it is not there or cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def open_regular(path: Path) -> BinaryIO:
    """A file opened for reading. Raises ConfigError where it cannot be, or is no file: a pipe would be waited for."""
    try:
        regular = stat.S_ISREG(os.stat(path).st_mode)  # to open a device may do something
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) if regular else -1
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {cause_of(error)}") from error
    except ValueError as error:  # a NUL in the path
        raise ConfigError(f"{path!r}: cannot be read: {error}") from error
    if not regular:
        raise ConfigError(f"{path}: cannot be read: it is a folder, a pipe or a device, not a file")
    return open(descriptor, "rb")


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Around the reading of what lies at a path: that it cannot be read becomes a ConfigError with file and cause."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{error.filename or path}: cannot be read: {cause_of(error)}") from error


def check_readable(path: Path) -> None:
    """Raise ConfigError where a path is neither a file nor a folder that can be read."""
    with readable(path):
        if stat.S_ISDIR(path.stat().st_mode):
            os.scandir(path).close()
        else:
            open_regular(path).close()


def read_regular(path: Path, most: int) -> bytes:
    """The bytes of a file. Raises ConfigError where it cannot be read, is no file or has more than `most`."""
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > most:
            raise ConfigError(f"{path}: has {size} bytes, more than the {most} that are allowed in such a file")
        try:
            return stream.read(size)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {cause_of(error)}") from error


def text_of(path: Path) -> str | None:
    """A small file's text without white space around it, None where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def integer(text: str | None) -> int | None:
    """The whole number that `text` spells, None where it spells none."""
    return int(text) if text is not None and re.fullmatch("-?[0-9]+", text) else None
