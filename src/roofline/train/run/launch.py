"""Starts the processes of one run on this machine, and ends them with this one."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from roofline.common.processes import describe_end
from roofline.hardware.detect import cores_allowed, cpu_quota, usable_cores
from roofline.train.run.signals import receiving

GRACE = 10.0  # seconds that the others have to end by themselves after one has failed: some wait for it for ever
_POLL = 0.05  # seconds


def launch(count: int, config: Path, changes: Sequence[str], out: int | None = None) -> int:
    """Start `count` processes and wait; returns the exit status, 128 + the signal if one ended the run.

    SIGTERM and Ctrl-C go to all of them, which then save a checkpoint; the second one ends them at once. They die with
    this process, whatever ends it. If one fails, the others are ended.

    out: the file descriptor for their standard output; None: that of this process.
    """
    options = [f"--set={change}" for change in changes]
    threads = str(threads_of(count))
    with tempfile.TemporaryDirectory(prefix="roofline-train-") as folder, _Workers() as workers:
        words = ["--parent", str(os.getpid()), "--store", str(Path(folder, "store")), *options]
        for rank in range(count):
            if workers.signal:
                break
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            environment = {"OMP_NUM_THREADS": threads} | dict(os.environ) | {k: str(v) for k, v in place.items()}
            # A session of its own: Ctrl-C reaches it once, through this process.
            workers.add([sys.executable, "-m", "roofline.train", str(config), *words], environment, out)
        return workers.wait()


def threads_of(count: int) -> int:
    """Threads of each of so many processes on this machine, which share the cores that they may use."""
    return max(1, usable_cores(cores_allowed(), cpu_quota()) // count)


class _Workers:
    """The processes of a run. signal: the first one that this process got, which went on to them."""

    def __init__(self) -> None:
        self.signal = 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()

    def __enter__(self) -> "_Workers":
        self._stack.enter_context(receiving(self._forward))
        return self

    def __exit__(self, *error: object) -> None:
        self._kill()
        for process in self._processes:
            process.wait()
        self._stack.close()

    def add(self, command: list[str], environment: dict[str, str], out: int | None) -> None:
        self._processes.append(subprocess.Popen(command, env=environment, stdout=out, start_new_session=True))
        if self.signal:  # it came while the process was started
            self._processes[-1].send_signal(self.signal)

    def wait(self) -> int:
        """Until all have ended: the exit status of the run."""
        deadline = None
        while None in (statuses := [process.poll() for process in self._processes]):
            if deadline is None and any(self._is_failure(status) for status in statuses):
                deadline = time.monotonic() + GRACE
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(_POLL)
        if any(self._is_failure(status) for status in statuses) and not self.signal:
            return self._failure()
        return 128 + self.signal if self.signal else 0

    def _is_failure(self, status: int | None) -> bool:
        """Whether a process has neither done its work nor saved a checkpoint because of the signal."""
        return bool(status) and status != 128 + self.signal

    def _failure(self) -> int:
        """The status of a process that has failed; one that could not speak for itself is named."""
        statuses = [process.poll() for process in self._processes]
        for rank, status in enumerate(statuses):
            if status is not None and status < 0:
                end = f"was ended by {describe_end(status)}"
                print(f"roofline: process {rank} of {len(statuses)} {end}", file=sys.stderr)
                return 128 - status
        return next(status for status in statuses if status)

    def _forward(self, number: int, _: FrameType | None) -> None:
        if self.signal:
            self._kill()
            return
        self.signal = number
        for process in self._processes:
            process.send_signal(number)  # does nothing if it has ended

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
