"""Files of clients in a folder: FOLDER/files/ID.data, and ID.json, which is there first: a file exists once both do.
What a file is called by its client is a label in there, and never a path."""

import os
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from roofline.common import log
from roofline.common.errors import ConfigError, RequestError
from roofline.common.files import cause_of, write_atomically
from roofline.server.limits import Limits

LOG = log.get("server")
NAME_CHARACTERS = 255
DATA, FACTS = ".data", ".json"
STORED = re.compile(r"file-[0-9a-f]{32}\.(data|json)")
# An upload, and facts that are being written: what such a name has is removed by the next server.
UNFINISHED = re.compile(r"[0-9a-f]{32}\.part|file-[0-9a-f]{32}\.json\.[0-9]+(?:\.[0-9]+)?\.part")
Item = TypeVar("Item")


class StoredFile(msgspec.Struct, frozen=True):
    """What is known of a file. owner: the name of the key that it belongs to, "" where the server has no keys."""

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int


class Files:
    """The files of all keys. One process has the folder at a time; any of its threads may call any method.

    Raises ConfigError for a folder that cannot be used, or that another server has.
    """

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.folder, self._limits = folder / "files", limits
        self._files: dict[str, StoredFile] = {}
        self._used: Counter[str] = Counter()  # bytes by owner, those of answers that are being written too
        self._uploads: Counter[str] = Counter()  # that are under way, by owner
        self._books = threading.Lock()  # around each use of the three above
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = lock_folder(folder)
            self._read()
        except OSError as error:
            raise ConfigError(f"{error.filename or folder}: cannot be used for batches: {cause_of(error)}") from error

    def close(self) -> None:
        """Let another server have the folder."""
        self._lock.close()

    def path(self, file: StoredFile) -> Path:
        """Where its bytes are."""
        return self.folder / (file.id + DATA)

    def get(self, owner: str, file_id: str, field: str | None = None) -> StoredFile:
        """A file of this owner's. Raises RequestError 404 for others', as where there is none."""
        with self._books:
            file = self._files.get(file_id)
        if file is None or file.owner != owner:
            raise RequestError(404, "file_not_found", f"There is no file {file_id[:100]!r}.", param=field)
        return file

    def has(self, file_id: str) -> bool:
        """Whether there is such a file, whoever owns it."""
        with self._books:
            return file_id in self._files

    def of(self, owner: str) -> list[StoredFile]:
        """All files of an owner, the oldest first."""
        with self._books:
            files = list(self._files.values())
        return [file for file in files if file.owner == owner]

    def charge(self, owner: str, size: int) -> None:
        """Count bytes that are being stored. Raises RequestError 413 where an owner has no room for them."""
        most = self._limits.key_file_bytes
        with self._books:
            if not size or self._used[owner] + size <= most:
                self._used[owner] += size
                return
        message = f"The files of this key would have more than {most} bytes together. Delete some."
        raise RequestError(413, "storage_full", message)

    def count(self, owner: str, size: int) -> None:
        """Count bytes of answers, whether or not there is room for them; negative: they are counted no more."""
        with self._books:
            self._used[owner] += size

    def full(self, owner: str) -> bool:
        """Whether an owner has no room at all."""
        with self._books:
            return self._used[owner] >= self._limits.key_file_bytes

    def receive(self, owner: str) -> "Receiving":
        """A file that is to be stored, to be written to. Raises RequestError where the owner may have no more."""
        most = self._limits.key_files
        with self._books:
            room = sum(file.owner == owner for file in self._files.values()) + self._uploads[owner] < most
            if room:
                self._uploads[owner] += 1
        if not room:
            raise RequestError(413, "too_many_files", f"This key has {most} files, and may have no more. Delete some.")
        return Receiving(self, owner)

    def received(self, owner: str, size: int) -> None:
        """A file that came in is no upload any more, and its bytes are not counted as those of one."""
        with self._books:
            self._uploads[owner] -= 1
            self._used[owner] -= size

    def keep(self, part: Path, owner: str, filename: str, purpose: str, file_id: str | None = None) -> StoredFile:
        """Make a complete file on the same disk one of this owner's. Where this is interrupted, `part` still is there
        or the file is. Raises OSError."""
        file_id, size = file_id or new_id(), part.stat().st_size
        file = StoredFile(
            id=file_id,
            owner=owner,
            filename=filename[:NAME_CHARACTERS],
            purpose=purpose,
            bytes=size,
            created_at=int(time.time()),
        )
        write_atomically(self.folder / (file_id + FACTS), msgspec.json.encode(file))
        os.replace(part, self.path(file))
        with self._books:
            self._files[file_id] = file
            self._used[owner] += size
        return file

    def delete(self, file: StoredFile) -> None:
        """Remove a file. Raises OSError."""
        (self.folder / (file.id + FACTS)).unlink(missing_ok=True)
        self.path(file).unlink(missing_ok=True)
        with self._books:
            if self._files.pop(file.id, None) is not None:
                self._used[file.owner] -= file.bytes

    def _read(self) -> None:
        """What a server before this one left; what it left unfinished is removed. Files with other names than those
        that are given here are somebody else's, and stay as they are."""
        names = {path.name for path in self.folder.iterdir()}
        own, files = {name for name in names if STORED.fullmatch(name)}, []
        for name in sorted(own):
            path = self.folder / name
            if path.with_suffix(FACTS).name not in own or path.with_suffix(DATA).name not in own:
                path.unlink()
            elif path.suffix == FACTS:
                files += self._read_facts(path)
        for file in sorted(files, key=lambda file: (file.created_at, file.id)):
            self._files[file.id] = file
            self._used[file.owner] += file.bytes
        for name in names:
            if UNFINISHED.fullmatch(name):
                (self.folder / name).unlink()

    def _read_facts(self, path: Path) -> list[StoredFile]:
        """What stands in a file of facts; nothing where it cannot be read."""
        try:
            file = msgspec.json.decode(path.read_bytes(), type=StoredFile)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            file = None
        if file is None or file.id != path.stem:
            LOG.warning("%s cannot be read, so its file is not offered", path)
            return []
        return [file]


class Receiving:
    """A file while it comes in; leave it as a context, and it is gone unless it was kept."""

    def __init__(self, files: Files, owner: str) -> None:
        self._files, self._owner = files, owner
        self._part = files.folder / f"{uuid.uuid4().hex}.part"
        self._stream: BinaryIO | None = None
        self._size = 0

    def __enter__(self) -> "Receiving":
        self._stream = self._part.open("xb")
        return self

    def write(self, data: bytes) -> None:
        """Append bytes. Raises RequestError where the owner has no room for them, OSError."""
        assert self._stream is not None, "it is entered"
        self._files.charge(self._owner, len(data))
        self._size += len(data)
        self._stream.write(data)

    def keep(self, filename: str, purpose: str) -> StoredFile:
        """It is complete. Raises OSError."""
        assert self._stream is not None, "it is entered"
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return self._files.keep(self._part, self._owner, filename, purpose)

    def __exit__(self, *_: object) -> None:
        self._files.received(self._owner, self._size)
        if self._stream is not None:
            self._stream.close()
        self._part.unlink(missing_ok=True)


def new_id() -> str:
    """Of a file."""
    return f"file-{uuid.uuid4().hex}"


def lock_folder(folder: Path) -> BinaryIO:
    """Have a folder of batches for this process until what is returned is closed. Raises ConfigError where another
    server has it, and OSError."""
    import fcntl

    stream = (folder / "lock").open("ab")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        raise ConfigError(f"{folder}: another server has this folder of batches; name another one") from None
    return stream


def page_of(
    items: list[Item], identity: Callable[[Item], str], after: str | None, most: int
) -> tuple[list[Item], bool]:
    """Up to `most` items that follow the one named, and whether there are more. Raises RequestError."""
    begin = 0
    if after is not None:
        places: Iterator[int] = (at for at, item in enumerate(items) if identity(item) == after)
        begin = next(places, -1) + 1
        if begin == 0:
            raise RequestError(400, "invalid_value", f"after: there is no {after[:100]!r}.", param="after")
    return items[begin : begin + most], len(items) > begin + most
