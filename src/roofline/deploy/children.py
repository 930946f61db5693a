"""Processes that the supervisor starts: none outlives it, and what each writes goes to a bounded file."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from roofline.common.processes import describe_end

LAUNCHER = Path(__file__).with_name("launcher.py")
MAX_LOG_BYTES = 8 << 20  # of a file; one of that size is kept beside it
SHOWN_LINES, SHOWN_BYTES = 12, 8192  # of a log, in an error


@dataclass(kw_only=True)
class ChildCommand:
    """What to start. descriptors: that it finds from 3 on; cores: it keeps to these, none: any; log: file that is
    appended to."""

    words: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    descriptors: Sequence[int] = ()
    cores: Sequence[int] = ()


class ChildProcess:
    """A process that was started; `ended` is set once it is gone."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process, self.log, self.pid = process, log, process.pid
        self.ended = asyncio.Event()
        self._waiting = asyncio.create_task(self._wait())

    @classmethod
    async def start(cls, command: ChildCommand) -> "ChildProcess":
        """Start a command through the launcher. Call it on the supervisor's main thread: the kernel ends the child with
        the thread that started it."""
        cores = ",".join(map(str, command.cores))
        descriptors = ",".join(map(str, command.descriptors))
        words = [sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid()), cores, descriptors, *command.words]
        with command.log.open("ab", buffering=0) as log:
            process = await asyncio.create_subprocess_exec(
                *words,
                env={**os.environ, **command.environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=tuple(command.descriptors),
                start_new_session=True,  # Ctrl-C in a terminal is the supervisor's alone
            )
        return cls(process, command.log)

    @property
    def status(self) -> int | None:
        """Its exit status, of a signal the negative number; None while it runs."""
        return self._process.returncode

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def end(self, seconds: float) -> None:
        """Wait for its end, at most so long; then kill it."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), seconds)
        if not self.ended.is_set():
            self.send(signal.SIGKILL)
            await self.ended.wait()

    def last_words(self) -> str:
        """Return how it ended, and the last lines that it wrote."""
        return f"{describe_end(self.status)}\n{log_tail(self.log)}"

    async def _wait(self) -> None:
        await self._process.wait()
        self.ended.set()


def log_tail(path: Path) -> str:
    """Return the last lines of a log, as far as it can be read."""
    with contextlib.suppress(OSError), path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - SHOWN_BYTES))
        lines = stream.read().decode(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-SHOWN_LINES:])
    return ""


def bound_log(path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
    """Move what a log holds to PATH.1 where it is larger than `max_bytes`. Processes append to it, so they go on at its
    new end; what they write in this moment may be in neither file."""
    with contextlib.suppress(OSError):
        if path.stat().st_size > max_bytes:
            shutil.copyfile(path, path.with_name(f"{path.name}.1"))
            os.truncate(path, 0)
