"""Where a RemoteEngine's engine runs: in a process of its own (`ProcessWorker`) or in a thread (thread.py)."""

import asyncio
import contextlib
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from roofline.engine.process import messages
from roofline.engine.process.messages import EngineSpec


class Worker(Protocol):
    """Runs an engine at the other end of a socket pair; after `end` it can be spawned again."""

    @property
    def pid(self) -> int | None:
        """The process to look at from outside, None when there is none."""

    def spawn(self) -> socket.socket:
        """Start, and return our end of the socket pair. Raises OSError."""

    def kill(self) -> None:
        """End at once, whatever it does, where that is possible."""

    def end(self) -> int | None:
        """Wait for the end, which the closed socket brings; the exit status, negative for a signal. Blocks."""


class ProcessWorker:
    """A fresh Python process that loads what `spec` says."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def spawn(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            command = [sys.executable, "-m", "roofline.engine.process.main", str(theirs.fileno())]
            # A session of its own: Ctrl-C in the terminal reaches us alone. Its standard output is our standard error.
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
            )
            ours.sendall(messages.frame(self.spec))
            undo.pop_all()
        return ours

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def end(self) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        try:
            return process.wait(1.0)  # it ends by itself, and its status then tells why
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


async def ended(worker: Worker) -> int | None:
    """Wait for the end of a worker, on a thread of its own: the loop's threads may all be busy with requests."""
    thread = ThreadPoolExecutor(1, "roofline-reaper")
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, worker.end)
    finally:
        thread.shutdown(wait=False)
