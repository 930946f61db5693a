"""One owner of a run: nobody else trains in its folder, or in the place of its checkpoints, while it does.

In a folder the owner has a lock of the operating system on OWNER, which ends with its process. A bucket knows no locks:
there the owner writes the object anew every BEAT seconds, and one that was not written for STALE seconds is forsaken.
"""

import fcntl
import getpass
import json
import os
import secrets
import socket
import threading
import time
from contextlib import ExitStack, closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from roofline.common import log
from roofline.common.errors import ConfigError
from roofline.common.files import cause_of, text_of
from roofline.common.json_types import JsonMapping, JsonObject
from roofline.train.config.schema import TrainConfig
from roofline.train.parallel.processes import World
from roofline.train.run_folder import COMMAND, OWNER, checkpoints_of, folder_of
from roofline.train.storage.bucket import ObjectStore
from roofline.train.storage.open import open_store
from roofline.train.storage.store import LISTING_SECONDS, MissingError, StoreError, unlisted

BEAT, STALE = 15.0, 60.0  # seconds
_POLL = 2.0  # seconds between two looks at an owner that may be gone

_log = log.get("train")


class Ownership:
    """What a run owns, from its start to `close`; rank 0 of a run owns it for all.

    Raises ConfigError, on all ranks, if another run owns the folder or the place of the checkpoints.
    """

    def __init__(self, config: TrainConfig, world: World) -> None:
        self._stack = ExitStack()
        self._leases: list[Lease] = []
        refusal: ConfigError | None = None
        if world.rank == 0:
            try:
                self._take(folder_of(config), checkpoints_of(config))
            except ConfigError as error:
                self.close()
                refusal = error
        refusal = world.share(refusal)
        if refusal is not None:
            raise refusal

    def check(self) -> None:
        """Raise ConfigError if this run has lost the place of its checkpoints."""
        for lease in self._leases:
            lease.check()

    def close(self) -> None:
        """Give everything back."""
        self._stack.close()

    def _take(self, folder: Path, checkpoints: str) -> None:
        owner = _this_process()
        self._stack.enter_context(closing(FolderLock(folder, owner)))
        store = open_store(checkpoints)
        if isinstance(store, ObjectStore):
            self._leases.append(self._stack.enter_context(closing(Lease(store, owner))))
        elif (place := Path(store.url).resolve()) != folder.resolve():
            self._stack.enter_context(closing(FolderLock(place, owner)))


class FolderLock:
    """A folder that no other process can lock. name: of the file that is locked. Raises ConfigError if one has."""

    def __init__(self, folder: Path, owner: JsonMapping, name: str = OWNER) -> None:
        self._path = folder / name
        self._file: IO[str] | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            while self._file is None:
                self._file = _locked(self._path)
            self._file.seek(0)
            self._file.truncate()
            self._file.write(json.dumps(owner) + "\n")
            self._file.flush()
        except BlockingIOError:
            raise _refusal(str(folder), text_of(self._path), name) from None
        except OSError as error:
            raise ConfigError(f"{error.filename or folder}: {cause_of(error)}: choose another folder") from error

    def close(self) -> None:
        """Unlock the folder."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
            with suppress(OSError):  # not empty
                self._path.parent.rmdir()


def reserve(folder: Path) -> FolderLock:
    """The folder of a run for a command that prepares, trains and asks the model there, until it is closed.

    Raises ConfigError where another command, or a run, has it.
    """
    owner = _this_process()
    lock = FolderLock(folder, owner, COMMAND)
    try:
        FolderLock(folder, owner).close()  # the run takes it again
    except ConfigError:
        lock.close()
        raise
    return lock


def _locked(path: Path) -> IO[str] | None:
    """The file, locked; None if its owner removed it meanwhile. Raises BlockingIOError if another process has it."""
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    except OSError as error:  # a file system without locks
        _log.warning("%s cannot be locked (%s): see to it that no other run uses the folder", path, error.strerror)
        return file
    if os.fstat(file.fileno()).st_nlink:
        return file
    file.close()
    return None


class Lease:
    """A place in a bucket that other runs leave alone. Raises ConfigError if one has it, and lives."""

    def __init__(self, store: ObjectStore, owner: JsonMapping) -> None:
        self._store = store
        self._token = secrets.token_hex(8)
        self._owner = {**owner, "token": self._token}
        while not (store.create(OWNER, self._text()) and self._holder().get("token") == self._token):
            self._wait_until_forsaken()
        self._check_listing()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="roofline-lease", daemon=True)
        self._thread.start()

    def _check_listing(self) -> None:
        """Raise StoreError if the store lists nothing of what it takes: only listings lead to checkpoints."""
        until = time.monotonic() + LISTING_SECONDS
        while OWNER not in self._store.tags():
            if time.monotonic() > until:
                with suppress(StoreError):
                    self._store.delete(OWNER)
                raise unlisted(self._store, OWNER)
            time.sleep(0.5)

    def check(self) -> None:
        """Raise ConfigError if another run has taken the place since, which is so after a pause of STALE seconds."""
        holder = self._holder()
        if holder.get("token") != self._token:
            raise _refusal(self._store.url, json.dumps(holder))

    def close(self) -> None:
        """Leave the place to others."""
        self._closed.set()
        self._thread.join()
        with suppress(StoreError):  # then it is forsaken
            if self._holder().get("token") == self._token:
                self._store.delete(OWNER)

    def _text(self) -> bytes:
        return json.dumps(self._owner | {"renewed": _now()}).encode()

    def _holder(self) -> JsonObject:
        try:
            return _parsed(self._store.get(OWNER).decode())
        except MissingError:
            return {}

    def _wait_until_forsaken(self) -> None:
        """Delete a lease whose owner is gone."""
        first, deadline = self._holder(), time.monotonic() + STALE
        alive = _lives(first) if first else False
        if alive is None:
            _log.warning("%s has an owner (%s): waiting for a sign of life", self._store.url, _described(first))
        while alive is None and time.monotonic() < deadline:
            time.sleep(_POLL)
            now = self._holder()
            if now != first:
                alive, first = bool(now), now
        if alive:
            raise _refusal(self._store.url, json.dumps(first))
        self._store.delete(OWNER)

    def _renew(self) -> None:
        while not self._closed.wait(BEAT):
            with suppress(StoreError):  # the next one may succeed
                if self._holder().get("token") == self._token:
                    self._store.put(OWNER, self._text())


def _this_process() -> JsonObject:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in some containers
        user = str(os.getuid())
    identity = {"pid": os.getpid(), "process": _process(os.getpid()), "machine": _machine()}
    return {"user": user, "host": socket.gethostname(), "started": _now(), **identity}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _machine() -> str:
    """What tells this boot of this machine, and this container's processes, from others; empty if not known."""
    with suppress(OSError):
        return f"{text_of(Path('/proc/sys/kernel/random/boot_id'))} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _process(pid: int) -> str:
    """When a process started, in ticks since boot: numbers of processes are used again. Empty if there is none."""
    fields = (text_of(Path(f"/proc/{pid}/stat")) or "").rpartition(")")[2].split()  # from the third field on
    return fields[19] if len(fields) > 19 else ""


def _lives(owner: JsonMapping) -> bool | None:
    """Whether an owner's process runs; None if it is on another machine."""
    if not _machine() or owner.get("machine") != _machine():
        return None
    return owner.get("process") == _process(int(owner.get("pid", 0)))


def _parsed(text: str | None) -> JsonObject:
    with suppress(ValueError):
        value = json.loads(text or "")
        if isinstance(value, dict):
            return value
    return {"host": "an unknown host"}


def _described(owner: JsonMapping) -> str:
    return (
        f"process {owner.get('pid', '?')} of {owner.get('user', '?')} on {owner.get('host', '?')}, "
        f"since {owner.get('started', '?')}"
    )


def _refusal(place: str, text: str | None, name: str = OWNER) -> ConfigError:
    """name: of the file that another process has locked."""
    whose, other = "a run that is training", "another run_folder and save_folder"
    if name == COMMAND:
        whose, other = "a command that is under way", "another run_folder"
    described = _described(_parsed(text))
    return ConfigError(f"{place} belongs to {whose} ({described}): wait for it, end it, or choose {other}")
