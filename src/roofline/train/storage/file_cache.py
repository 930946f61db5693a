"""A folder of files that are made when first wanted, under a limit of bytes, shared by the processes of a machine.

Locks (flock) say who uses what, because the system gives them back however a process ends: whoever reads a file holds
a shared lock on it, whoever makes one an exclusive lock on its unfinished file, and whoever reserves room or removes
files one on the folder's `lock`. A file is removed only under an exclusive lock, so never one that is read.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from roofline.common.errors import CapacityError, UnsupportedError
from roofline.train.storage.local import explained
from roofline.train.storage.store import StoreError

PATIENCE = 60.0  # seconds without any progress that room is waited for
TICK = 0.02
_UNFINISHED = ".part"
_OWN = "roofline-shards-"  # folders under the system's temporary one, of caches without a folder


class _File(NamedTuple):
    path: Path
    size: int
    used: int  # ns; when it was last opened


class Cache:
    """Files by name, FOLDER/FILE. FOLDER is 32 hexadecimal digits, and only what lies in such folders is ever removed.

    Args:
        folder: None: one of its own, removed by `close`; those of killed processes are removed by the next such cache.
        limit: bytes of all files, the least recently opened ones are removed for a new one; None: no limit.

    Raises StoreError, UnsupportedError (a file system without locks).
    """

    def __init__(self, folder: Path | None, limit: int | None) -> None:
        self.limit = limit
        self._close: Callable[[], object] | None = None
        with explained(folder or Path(tempfile.gettempdir())):
            if folder is None:
                self.folder, alive = _own_folder()
                self._close = weakref.finalize(self, _remove, self.folder, alive, os.getpid())
            else:
                self.folder = folder
                folder.mkdir(parents=True, exist_ok=True)
            with self._bookkeeping():
                for file in self._files():
                    if file.path.name.endswith(_UNFINISHED):
                        _remove_unused(file.path)

    def open(self, name: str, size: int, make: Callable[[BinaryIO], None], wait: bool = True) -> tuple[BinaryIO, bool]:
        """The file of that name and size, locked against removal while it, or a map of it, is open; and whether `make`
        has just written it, `size` bytes into the stream it is given.

        wait: for room, while all files are read. Raises CapacityError where there is none, and what `make` raises.
        """
        if self.limit is not None and size > self.limit:
            raise CapacityError(
                f"{name.rpartition('/')[2]} in the cache {self.folder}", size, self.limit, "bytes", "Raise its limit."
            )
        path = self.folder / name
        with explained(path):
            while True:
                found = self._found(path, size)
                if found is not None:
                    return found, False
                made = self._made(path, size, make, wait)
                if made is not None:
                    return made, True

    def have(self, name: str, size: int, make: Callable[[BinaryIO], None]) -> None:
        """Make the file, if it is not there and there is room; others may remove it at once."""
        _release(self.open(name, size, make, wait=False)[0])

    def drop(self, name: str) -> None:
        """Remove a file that is not what it should be; whoever reads it keeps what he has."""
        with self._bookkeeping():
            (self.folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder, if it is the cache's own. In a forked process it does nothing."""
        if self._close is not None:
            self._close()

    def _found(self, path: Path, size: int) -> BinaryIO | None:
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return None
        fcntl.flock(file, fcntl.LOCK_SH)
        about = os.fstat(file.fileno())
        if about.st_nlink and about.st_size == size:
            with contextlib.suppress(PermissionError):  # another user's: it only looks older than it is
                os.utime(file.fileno())
            return file
        _release(file)
        if about.st_nlink:
            self.drop(str(path.relative_to(self.folder)))
        return None

    def _made(self, path: Path, size: int, make: Callable[[BinaryIO], None], wait: bool) -> BinaryIO | None:
        """None: another has made it, or has failed to."""
        part = path.with_name(path.name + _UNFINISHED)
        if self._close is None:  # somebody may have removed it; one of our own goes when it is closed, and stays away
            self.folder.mkdir(parents=True, exist_ok=True)
        with self._bookkeeping():
            if path.exists():
                return None
            path.parent.mkdir(exist_ok=True)
            file = os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
            mine = _locked(file)
        if not mine:
            fcntl.flock(file, fcntl.LOCK_SH)  # until it is made, or its maker is gone
            _release(file)
            return None
        try:
            self._reserve(file, size, path.name, wait)
            make(file)
            if file.tell() != size:
                raise StoreError(f"{path} was made with {file.tell():,} bytes instead of {size:,}")
            file.flush()
            os.fsync(file.fileno())
            with self._bookkeeping():
                os.replace(part, path)
                fcntl.flock(file, fcntl.LOCK_SH)
            return file
        except BaseException:
            # Under the same lock as it is opened under: nobody may lock what has lost its name.
            with contextlib.suppress(OSError), self._bookkeeping():
                part.unlink(missing_ok=True)
            _release(file)
            raise

    def _reserve(self, file: BinaryIO, size: int, name: str, wait: bool) -> None:
        """Give the empty, locked file its size, when there is room for that."""
        until = time.monotonic() + PATIENCE
        while True:
            with self._bookkeeping():
                os.ftruncate(file.fileno(), 0)
                used, busy = self._make_room(size)
                if self.limit is None or used + size <= self.limit:
                    os.ftruncate(file.fileno(), size)
                    return
            if busy:  # what others are fetching will be finished, and can be removed then
                until = time.monotonic() + PATIENCE
            if not wait or time.monotonic() > until:
                raise CapacityError(
                    f"{name} in the cache {self.folder}, all of whose other files are being read,",
                    size, self.limit - used, "bytes",
                    "Raise its limit: each process that reads shards there needs room for two at the very least.",
                )  # fmt: skip
            time.sleep(TICK)

    def _make_room(self, size: int) -> tuple[int, bool]:
        """Remove what is in the way of `size` more bytes: bytes that are left, and whether a file is being made."""
        if self.limit is None:
            return 0, False
        files = sorted(self._files(), key=lambda file: (not file.path.name.endswith(_UNFINISHED), file.used))
        left, busy = sum(file.size for file in files), False
        for file in files:
            unfinished = file.path.name.endswith(_UNFINISHED)
            if left + size <= self.limit and not unfinished:
                continue
            if _remove_unused(file.path):
                left -= file.size
            elif unfinished and file.size:
                busy = True
        return left, busy

    def _files(self) -> list[_File]:
        found = []
        for folder in os.scandir(self.folder):
            if re.fullmatch("[0-9a-f]{32}", folder.name) and folder.is_dir(follow_symlinks=False):
                for entry in os.scandir(folder):
                    with contextlib.suppress(FileNotFoundError):
                        about = entry.stat(follow_symlinks=False)
                        found.append(_File(Path(entry.path), about.st_size, about.st_mtime_ns))
        return found

    @contextlib.contextmanager
    def _bookkeeping(self) -> Iterator[None]:
        """The right to reserve, rename and remove."""
        with open(self.folder / "lock", "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                    raise UnsupportedError(
                        f"a cache in {self.folder}", "its file system has no locks", ["a folder on a local disk"]
                    ) from error
                raise
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)


def _release(file: BinaryIO) -> None:
    """Unlock and close: closing alone leaves the lock to a process that was forked meanwhile and has the file too."""
    with file:
        file.flush()
        fcntl.flock(file, fcntl.LOCK_UN)


def _locked(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_unused(path: Path) -> bool:
    """Whether the file was removed, which nobody used."""
    try:
        # Some file systems of networks want an exclusive lock's file open for writing.
        with open(path, "r+b") as file:
            if not _locked(file):
                return False
            try:
                path.unlink()
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)
    except FileNotFoundError:
        return True
    except PermissionError:
        return False
    with contextlib.suppress(OSError):
        path.parent.rmdir()
    return True


def _own_folder() -> tuple[Path, BinaryIO]:
    """A new temporary folder, and its file `alive`, which is locked as long as a process uses the folder."""
    for left in Path(tempfile.gettempdir()).glob(f"{_OWN}*/alive"):
        with contextlib.suppress(OSError), left.open("r+b") as file:
            if _locked(file):
                shutil.rmtree(left.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_OWN))
    alive = (folder / "alive.new").open("wb")
    if _locked(alive):  # before anyone can see it under its name
        (folder / "alive.new").rename(folder / "alive")
    return folder, alive


def _remove(folder: Path, alive: BinaryIO, process: int) -> None:
    if process == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
    alive.close()
