"""A cache folder with a size limit, shared by the processes of a machine: files are made when they are first opened.

File locks (flock) tell who uses what, because the system releases them however a process ends. A reader holds a shared
lock on its file, a maker an exclusive lock on its unfinished file, and whoever reserves room or removes files an
exclusive lock on the folder's file `lock`. Removing a file needs an exclusive lock on it, so no file is removed while
it is read.
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
from roofline.train.storage.local import store_errors
from roofline.train.storage.store import StoreError

PATIENCE = 60.0  # seconds to wait for room while nothing changes
TICK = 0.02  # seconds between two looks
_UNFINISHED = ".part"
_OWN = "roofline-shards-"  # prefix of the temporary folders of caches that were given none


class _File(NamedTuple):
    path: Path
    size: int
    used: int  # ns; when it was last opened


class FileCache:
    """Files by name, FOLDER/FILE. FOLDER is 32 hexadecimal digits, and only files in such folders are ever removed.

    Args:
        folder: None: a temporary folder, removed by `close`; if the process is killed, the next such cache removes it.
        limit: bytes of all files; the least recently opened ones are removed to make room. None: no limit.

    Raises StoreError, UnsupportedError (a file system without locks).
    """

    def __init__(self, folder: Path | None, limit: int | None) -> None:
        self.limit = limit
        self._close: Callable[[], object] | None = None
        with store_errors(folder or Path(tempfile.gettempdir())):
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
        """The file of that name and size, and whether this call has just made it.

        The file is locked against removal while it, or a memory map of it, is open. `make` writes `size` bytes to the
        stream that it receives. wait: for room, while all other files are being read. Raises CapacityError if there is
        no room, and whatever `make` raises.
        """
        if self.limit is not None and size > self.limit:
            raise CapacityError(
                f"{name.rpartition('/')[2]} in the cache {self.folder}", size, self.limit, "bytes", "Raise its limit."
            )
        path = self.folder / name
        with store_errors(path):
            while True:
                if (file := self._open_existing(path, size)) is not None:
                    return file, False
                if (file := self._make(path, size, make, wait)) is not None:
                    return file, True

    def have(self, name: str, size: int, make: Callable[[BinaryIO], None]) -> None:
        """Make the file if it does not exist and there is room; other processes may remove it at once."""
        _release(self.open(name, size, make, wait=False)[0])

    def drop(self, name: str) -> None:
        """Remove a damaged file; its present readers keep what they have opened."""
        with self._bookkeeping():
            (self.folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder if it is a temporary one. In a forked process this does nothing."""
        if self._close is not None:
            self._close()

    def _open_existing(self, path: Path, size: int) -> BinaryIO | None:
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return None
        fcntl.flock(file, fcntl.LOCK_SH)
        about = os.fstat(file.fileno())
        if about.st_nlink and about.st_size == size:
            with contextlib.suppress(PermissionError):  # another user's file only looks older than it is
                os.utime(file.fileno())
            return file
        _release(file)
        if about.st_nlink:
            self.drop(str(path.relative_to(self.folder)))
        return None

    def _make(self, path: Path, size: int, make: Callable[[BinaryIO], None], wait: bool) -> BinaryIO | None:
        """The new file; None if another process has made it, or has failed to."""
        part = path.with_name(path.name + _UNFINISHED)
        if self._close is None:  # it may have been removed; a temporary one must not come back after `close`
            self.folder.mkdir(parents=True, exist_ok=True)
        with self._bookkeeping():
            if path.exists():
                return None
            path.parent.mkdir(exist_ok=True)
            file = os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
            is_maker = _try_lock(file)
        if not is_maker:
            fcntl.flock(file, fcntl.LOCK_SH)  # waits until the file is made, or its maker is gone
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
            # Under the lock that guards its opening: nobody may lock a file that has lost its name.
            with contextlib.suppress(OSError), self._bookkeeping():
                part.unlink(missing_ok=True)
            _release(file)
            raise

    def _reserve(self, file: BinaryIO, size: int, name: str, wait: bool) -> None:
        """Give the empty, locked file its size once there is room for it."""
        until = time.monotonic() + PATIENCE
        while True:
            with self._bookkeeping():
                os.ftruncate(file.fileno(), 0)
                used, busy = self._make_room(size)
                if self.limit is None or used + size <= self.limit:
                    os.ftruncate(file.fileno(), size)
                    return
            if busy:  # a file that another process is fetching will be finished, and can be removed then
                until = time.monotonic() + PATIENCE
            if not wait or time.monotonic() > until:
                raise CapacityError(
                    f"{name} in the cache {self.folder}, all of whose other files are being read,",
                    size, self.limit - used, "bytes",
                    "Raise its limit: each process that reads shards there needs room for two at the very least.",
                )  # fmt: skip
            time.sleep(TICK)

    def _make_room(self, size: int) -> tuple[int, bool]:
        """Remove unused files until `size` more bytes fit: the bytes that remain, and whether a file is being made."""
        if self.limit is None:
            return 0, False
        files = sorted(self._files(), key=lambda file: (not file.path.name.endswith(_UNFINISHED), file.used))
        total, busy = sum(file.size for file in files), False
        for file in files:
            unfinished = file.path.name.endswith(_UNFINISHED)
            if total + size <= self.limit and not unfinished:
                continue
            if _remove_unused(file.path):
                total -= file.size
            elif unfinished and file.size:
                busy = True
        return total, busy

    def _files(self) -> list[_File]:
        files = []
        for folder in os.scandir(self.folder):
            if re.fullmatch("[0-9a-f]{32}", folder.name) and folder.is_dir(follow_symlinks=False):
                for entry in os.scandir(folder):
                    with contextlib.suppress(FileNotFoundError):
                        about = entry.stat(follow_symlinks=False)
                        files.append(_File(Path(entry.path), about.st_size, about.st_mtime_ns))
        return files

    @contextlib.contextmanager
    def _bookkeeping(self) -> Iterator[None]:
        """Holds the folder's lock: the right to reserve room and to rename and remove files."""
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
    """Unlock and close: closing alone would leave the lock to a process that was forked meanwhile."""
    with file:
        file.flush()
        fcntl.flock(file, fcntl.LOCK_UN)


def _try_lock(file: BinaryIO) -> bool:
    """Whether this process could lock the file."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_unused(path: Path) -> bool:
    """Remove a file that nobody uses; whether it is gone."""
    try:
        # Some network file systems grant an exclusive lock only on a file that is open for writing.
        with open(path, "r+b") as file:
            if not _try_lock(file):
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
    """A new temporary folder, and its file `alive`, which stays locked while the process uses the folder."""
    for path in Path(tempfile.gettempdir()).glob(f"{_OWN}*/alive"):
        with contextlib.suppress(OSError), path.open("r+b") as file:
            if _try_lock(file):
                shutil.rmtree(path.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_OWN))
    alive = (folder / "alive.new").open("wb")
    if _try_lock(alive):  # before anyone can see it under its name
        (folder / "alive.new").rename(folder / "alive")
    return folder, alive


def _remove(folder: Path, alive: BinaryIO, process: int) -> None:
    if process == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
    alive.close()
