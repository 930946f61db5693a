"""One process of `roofline serve`: started on a socket that it is handed, ready when it says so, ended when told."""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from roofline.deploy.children import ChildCommand, ChildProcess

READY = b"READY=1"
MAX_MESSAGE_BYTES = 4096
MARGIN_SECONDS = 15.0  # a server that drains ends by itself, and is killed only so long after it should have
SERVE_WORDS = (sys.executable, "-m", "roofline", "serve")

_numbers = itertools.count(1)  # of the sockets on which processes say that they are ready


@dataclass(frozen=True, kw_only=True)
class ReplicaCommand:
    """How a replica is started. words: of the whole command line; cores: it keeps to these, none: any; model: that it
    serves, for people."""

    words: Sequence[str]
    model: str
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    cores: Sequence[int] = ()


class ReplicaProcess:
    """A running server. `is_ready` once its model is loaded and it takes connections from the socket."""

    def __init__(self, child: ChildProcess, command: ReplicaCommand, notices: socket.socket, place: Path) -> None:
        self.child, self.command = child, command
        self.is_ready = self.is_draining = False
        self._notices, self._place = notices, place
        self._ready_notice = asyncio.Event()
        asyncio.get_running_loop().add_reader(notices, self._hear)
        self._cleaning = asyncio.create_task(self._clean())

    @classmethod
    async def start(
        cls, command: ReplicaCommand, listening: socket.socket, folder: Path, log_name: str
    ) -> "ReplicaProcess":
        """Start a server on a socket that is bound. folder: for its log and the socket of its notices."""
        place = folder / f"ready-{next(_numbers)}.sock"
        place.unlink(missing_ok=True)
        notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notices.setblocking(False)
        notices.bind(str(place))
        child = await ChildProcess.start(
            ChildCommand(
                words=command.words,
                log=folder / log_name,
                environment={**command.environment, "NOTIFY_SOCKET": str(place)},
                descriptors=(listening.fileno(),),
                cores=command.cores,
            )
        )
        return cls(child, command, notices, place)

    @property
    def ended(self) -> asyncio.Event:
        """Set once the process is gone."""
        return self.child.ended

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.child.pid

    async def wait_ready(self, seconds: float) -> bool:
        """Wait until it is ready; whether it is. It is not where it ends before, or is not ready in time."""
        waits = [asyncio.create_task(self._ready_notice.wait()), asyncio.create_task(self.ended.wait())]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in waits:
                waiting.cancel()
        return self.is_ready and not self.ended.is_set()

    def drain(self) -> None:
        """Have it take no more connections, and end with its last answer."""
        self.is_draining = True
        self.child.send(signal.SIGTERM)

    def hurry(self) -> None:
        """Have it end answers that are open with an error that clients see: SIGINT after SIGTERM says so."""
        self.drain()
        self.child.send(signal.SIGINT)

    def kill(self) -> None:
        """End it at once."""
        self.child.send(signal.SIGKILL)

    async def end(self, seconds: float) -> None:
        """Wait for its end, at most so long; then kill it."""
        await self.child.end(seconds)

    def resident_bytes(self) -> int:
        """Return the memory of the process and of those that it started, as far as the system tells (Linux)."""
        sizes = [_resident(pid) for pid in (self.pid, *_descendants(self.pid))]
        return sum(sizes) * os.sysconf("SC_PAGE_SIZE")

    def _hear(self) -> None:
        with contextlib.suppress(OSError):
            if READY in self._notices.recv(MAX_MESSAGE_BYTES).split(b"\n"):
                self.is_ready = True
                self._ready_notice.set()

    async def _clean(self) -> None:
        await self.ended.wait()
        asyncio.get_running_loop().remove_reader(self._notices)
        self._notices.close()
        self._place.unlink(missing_ok=True)


def _descendants(pid: int) -> list[int]:
    """Return the processes that a process started, and those that they started."""
    children = []
    with contextlib.suppress(OSError):
        for tasks in Path(f"/proc/{pid}/task").iterdir():
            children += [int(word) for word in (tasks / "children").read_text().split()]
    return [*children, *(deeper for child in children for deeper in _descendants(child))]


def _resident(pid: int) -> int:
    """Return the pages of a process that no other process maps, and lie in memory."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/statm").read_text().split()
        return int(fields[1]) - int(fields[2])
    return 0
