"""The folder of a fleet, by which commands find it: its state, its sockets, its logs."""

import fcntl
import json
import os
import stat
from io import TextIOWrapper
from pathlib import Path

from roofline.common import env
from roofline.common.errors import ConfigError
from roofline.common.files import entries, write_atomically
from roofline.common.json_types import JsonObject
from roofline.deploy.options import check_fleet_name

MAX_PATH_BYTES = 70  # of a folder: the path of a socket has 107 bytes at most, and HAProxy adds some to its own
MAX_STATE_BYTES = 1 << 20


class FleetFolder:
    """Where a fleet of a name keeps its files: only this user can look into it."""

    def __init__(self, name: str, base: Path | None = None) -> None:
        check_fleet_name(name)
        self.name = name
        self.path = (env.home() / "fleets" if base is None else base) / name
        self._lock: TextIOWrapper | None = None

    @property
    def control(self) -> Path:
        """The socket on which the supervisor takes commands."""
        return self.path / "control.sock"

    @property
    def state_file(self) -> Path:
        """What the supervisor last wrote of its fleet."""
        return self.path / "state.json"

    def acquire(self) -> None:
        """Make the folder this process's own until it ends, and remove what a killed supervisor left behind. Raises
        ConfigError where another process runs a fleet of this name, or the path is too long for sockets."""
        self._make()
        lock = (self.path / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise self._taken_error() from None
        self._lock = lock
        for entry in entries(self.path):
            if stat.S_ISSOCK(entry.lstat().st_mode):
                entry.unlink()
        self.state_file.unlink(missing_ok=True)

    def check_free(self) -> None:
        """Make the folder. Raises ConfigError as `acquire`."""
        self._make()
        if self.is_running():
            raise self._taken_error()

    def _make(self) -> None:
        if len(os.fsencode(self.path)) > MAX_PATH_BYTES:
            reason = f"sockets need a path of at most {MAX_PATH_BYTES} bytes"
            raise ConfigError(f"{self.path}: {reason}; set ROOFLINE_HOME to a shorter folder")
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = self.path.stat()
        if status.st_uid != os.getuid():
            raise ConfigError(f"{self.path}: belongs to another user; set ROOFLINE_HOME to a folder of this one's")
        self.path.chmod(0o700)

    def _taken_error(self) -> ConfigError:
        process = self.read_state().get("pid")
        remedy = "end it by `roofline down`, or give another --name"
        return ConfigError(f"a fleet named {self.name!r} runs already, in process {process}: {remedy}")

    def release(self) -> None:
        """Leave the folder: its state and its sockets are gone, its logs stay."""
        for entry in entries(self.path):
            if stat.S_ISSOCK(entry.lstat().st_mode):
                entry.unlink()
        self.state_file.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()

    def is_running(self) -> bool:
        """Whether a supervisor lives that holds the folder: the kernel drops its lock when it dies."""
        try:
            with (self.path / "lock").open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def write_state(self, state: JsonObject) -> None:
        """Keep what commands are shown, in one piece."""
        write_atomically(self.state_file, json.dumps(state, indent=1))

    def read_state(self) -> JsonObject:
        """Return what the supervisor last wrote; empty where nothing can be read."""
        try:
            with self.state_file.open("rb") as stream:
                content = json.loads(stream.read(MAX_STATE_BYTES))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}
