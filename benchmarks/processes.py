"""Engines as child processes that answer one request a line, and what can go wrong with them."""

import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

STARTS = 2  # how often an engine that died is started again within a group
# Run by a shell: its input ends when we die, however that happens; a line says that the engine has ended.
GUARD = 'read line || kill -s KILL -- "-$1"'


class Missing(Exception):
    """An engine that cannot be asked, and why."""


class Worker:
    """A child process, started when first asked, and again when it died; `close` ends it.

    Between its turns it is stopped with all that it started, so that no pool of threads spins beside the next engine.
    A stopped engine cannot see the end of its input. A second small process, the guard, kills it when we die: the
    kernel itself wakes the stopped groups of a dead parent, but not one whose stop has been sent and has not arrived.

    Args:
        log: file for everything it prints.
        start_timeout, timeout: seconds until its first line, and for an answer.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        start_timeout: float = 300,
        timeout: float = 300,
    ) -> None:
        self.name, self.command, self.log = name, command, log
        self.env = {**os.environ, **(env or {})}
        self.start_timeout, self.timeout = start_timeout, timeout
        self.head: dict[str, Any] = {}
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._why = ""

    def start(self) -> dict[str, Any]:
        """Start it if it does not run; what it said first. Raises Missing."""
        if self._process is not None:
            return self.head
        if self.starts >= STARTS:
            raise Missing(self._why)
        if not Path(self.command[0]).exists():
            raise Missing("its environment is not set up")
        if not Path(self.command[-1]).exists():
            raise Missing(f"there is no {Path(self.command[-1]).name}")
        self.starts += 1
        self._rest = b""
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self.env,
                process_group=0,
            )
        guard = ["/bin/sh", "-c", GUARD, "guard", str(self._process.pid)]
        # Before the first stop, and in a session of its own: what ends our group must not end the guard.
        self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)
        self.head = self._read(self.start_timeout)
        self._signal(signal.SIGSTOP)
        return self.head

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request, one answer. Raises Missing when it cannot start, dies, or takes too long."""
        self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write((json.dumps(request) + "\n").encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail("it ended")
        answer = self._read(self.timeout)
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """End it: by the end of its input, and after ten seconds by force, with all that it started."""
        if self._process is None:
            return
        self._signal(signal.SIGCONT)
        process, self._process = self._process, None
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it started and left behind
        process.wait()
        if self._guard is not None:
            self._guard.communicate(b"\n")
            self._guard = None

    def _signal(self, number: signal.Signals) -> None:
        """To the whole group, which is its own."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read(self, timeout: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        end = time.monotonic() + timeout
        while b"\n" not in self._rest:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                self._fail(f"no answer within {timeout:.0f} s")
            part = os.read(self._process.stdout.fileno(), 65536)
            if not part:
                self._fail("it ended")
            self._rest += part
        line, self._rest = self._rest.split(b"\n", 1)
        return dict(json.loads(line))

    def _fail(self, what: str) -> None:
        assert self._process is not None
        if what.startswith("no answer"):
            self._signal(signal.SIGKILL)
        self.close()
        said = last_line(self.log)
        self._why = f"{what}: {said}" if said else what
        raise Missing(self._why)


def last_line(log: Path, most: int = 200) -> str:
    """The last line of a log that says something, files by their names alone: a record is read on other machines."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return re.sub(r"(?<![\w:/])/(?:[^\s/]+/)+", "", said)[:most]
