"""A store in a local folder, and the atomic writing of files: to a temporary name first, then renamed."""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from roofline.common.errors import ConfigError
from roofline.train.storage.store import ChangedError, Data, Entry, MissingError, StoreError, checked_name

BLOCK = 1 << 20
# A file that is being written. Its writer holds a lock on it, so an unlocked one was left by a killed process.
_PART = re.compile(r"\..+\.[0-9a-f]{8}\.part", re.DOTALL)


class LocalStore:
    """Objects as files of a folder, which is created with the first one. Folders that become empty are removed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def url(self) -> str:
        return str(self._folder)

    def path(self, name: str) -> Path | None:
        path = self._at(name)
        return path if path.is_file() else None

    def get(self, name: str) -> bytes:
        with self._errors(name):
            return self._at(name).read_bytes()

    def get_range(self, name: str, start: int, length: int) -> bytes:
        with self._errors(name), self._at(name).open("rb") as file:
            file.seek(start)
            data = file.read(length)
        if len(data) != length:
            raise StoreError(f"{self._folder / name} ends before byte {start + length:,}: it is cut or another file")
        return data

    def chunks(self, name: str, tag: str | None = None) -> Iterator[bytes]:
        with self._errors(name), self._at(name).open("rb") as file:
            while True:
                data = file.read(BLOCK)
                # Behind each read: a file that is written over is found out before its new bytes are handed on.
                if tag is not None and file_tag(os.fstat(file.fileno())) != tag:
                    raise ChangedError(f"{self._folder / name} has been replaced")
                if not data:
                    return
                yield data

    def put(self, name: str, data: Data) -> None:
        with self._errors(name), atomic_file(self._at(name)) as file:
            file.write(data)

    def list(self, prefix: str = "") -> Sequence[Entry]:
        below = self._folder / checked_name(prefix, "prefix") if prefix else self._folder
        entries = []
        for folder, _, names in os.walk(below):
            for name in names:
                path = Path(folder, name)
                with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                    if not _PART.fullmatch(name):
                        entries.append(Entry(str(path.relative_to(self._folder)), path.stat().st_size))
        return sorted(entries)

    def exists(self, name: str) -> bool:
        return self._at(name).is_file()

    def version(self, name: str) -> str:
        with self._errors(name):
            return file_tag(self._at(name).stat())

    def tag(self, name: str) -> str:
        return self.version(name)

    def tags(self) -> Mapping[str, str]:
        with self._errors("."), os.scandir(self._folder) as files:
            return {file.name: file_tag(file.stat()) for file in files if file.is_file()}

    def delete(self, name: str) -> None:
        path = self._at(name)
        with self._errors(name):
            path.unlink(missing_ok=True)
        self._prune(path.parent)

    def delete_prefix(self, prefix: str) -> None:
        folder = self._folder / checked_name(prefix, "prefix")
        with self._errors(prefix), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            shutil.rmtree(folder)
        self._prune(folder.parent)

    def _at(self, name: str) -> Path:
        path = self._folder / checked_name(name)
        if _PART.fullmatch(path.name):
            raise ConfigError(f"{name!r} is no name of an object: unfinished files are called that way")
        return path

    def _prune(self, folder: Path) -> None:
        with contextlib.suppress(OSError):  # not empty, or gone already
            while folder != self._folder:
                folder.rmdir()
                folder = folder.parent

    def _errors(self, name: str) -> contextlib.AbstractContextManager[None]:
        return store_errors(self._folder / name)


def file_tag(about: os.stat_result) -> str:
    """A text that changes when another file takes a file's name, or when it is written to."""
    return f"{about.st_ino}-{about.st_size}-{about.st_mtime_ns}"


@contextlib.contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Turns errors of the operating system into a StoreError that names `path`."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingError(f"{path} is missing: correct the name, or write it first") from error
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}: {_remedy(error)}") from error


def _remedy(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space there, or choose another place"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "choose a place that this user may use"
    return "choose another place"


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A stream for the new content of `path`, which is complete and on the disk once the block ends without an error.

    Missing folders are created. A link stays, and the file behind it is written. What is no file, such as a pipe or a
    device, is written into.
    """
    if path.exists() and not path.is_file():  # a rename would put a file in its place
        with path.open("wb") as stream:
            yield stream
        return
    path = path.resolve()
    part, file = _part(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    _sync(path.parent)


def _part(path: Path) -> tuple[Path, BinaryIO]:
    for _ in range(100):
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        try:
            _make(path.parent)
            _sweep(path.parent)
            file = part.open("xb")
        except FileNotFoundError:  # another process removed the folder, which was empty
            continue
        with contextlib.suppress(OSError):  # without locks, as on some network file systems, nothing is swept
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return part, file
        file.close()  # swept away before it was locked
    raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))


def _sweep(folder: Path) -> None:
    """Remove the unfinished files that killed processes left in a folder."""
    for entry in os.scandir(folder):
        if not _PART.fullmatch(entry.name):
            continue
        with contextlib.suppress(OSError), open(entry.path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(entry.path)


def _make(folder: Path) -> None:
    if folder.is_dir():
        return
    _make(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        _sync(folder.parent)


def _sync(folder: Path) -> None:
    """Flush a folder's entries to the disk: flushing a file's content does not flush its name."""
    with contextlib.suppress(OSError):  # some file systems refuse it for folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
