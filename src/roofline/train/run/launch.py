"""Starts the processes of one run on this machine, and ends them with this one."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from roofline.common.processes import describe_end, is_stopped
from roofline.hardware.detect import cores_allowed, cpu_quota, usable_cores
from roofline.train.parallel.stopping import StopNotes
from roofline.train.run.signals import receiving

GRACE = 10.0  # seconds that the others have to end by themselves after one has failed that they had met
_POLL = 0.05  # seconds


def launch(count: int, config: Path, changes: Sequence[str], out: int | None = None) -> int:
    """Start `count` processes and wait; returns the exit status, 128 + the signal if one ended the run.

    SIGTERM and Ctrl-C go to all of them, which then save a checkpoint; the second one ends them at once. So does the
    end of the time that the run allows (`stop_timeout`), if they have not begun to stop by then, or if one was stopped
    and not continued. They die with this process, whatever ends it. If one fails, the others are ended: at once where
    they wait for it still, and have nothing to say.

    out: the file descriptor for their standard output; None: that of this process.
    """
    options = [f"--set={change}" for change in changes]
    threads = str(threads_of(count))
    with (
        tempfile.TemporaryDirectory(prefix="roofline-train-") as folder,
        _Workers(StopNotes(Path(folder))) as workers,
    ):
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

    def __init__(self, notes: StopNotes) -> None:
        self.signal = 0
        self._signalled = 0.0  # when it came
        self._notes = notes
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
                deadline = time.monotonic() + (GRACE if self._notes.met else 0)
            stopped = self._stopped() if self.signal or deadline is not None else []
            if deadline is not None and (time.monotonic() > deadline or len(stopped) == statuses.count(None)):
                break
            if self.signal and self._waits_in_vain(stopped):
                break
            time.sleep(_POLL)
        if any(self._is_failure(status) for status in statuses) and not self.signal:
            return self._failure()
        return 128 + self.signal if self.signal else 0

    def _stopped(self) -> list[int]:
        """The numbers of the processes that a signal has stopped: they end by SIGKILL alone."""
        return [rank for rank, process in enumerate(self._processes) if is_stopped(process.pid)]

    def _waits_in_vain(self, stopped: list[int]) -> bool:
        """Whether the run will not stop by itself, which is then said: its time is over, and a process is stopped, or
        all of them have not agreed to stop. Behind Ctrl-C is a person, who can press it again."""
        seconds = self._notes.allowed
        if time.monotonic() < self._signalled + seconds:
            return False
        if stopped:
            numbers = ", ".join(map(str, stopped))
            cause = f"process {numbers} of {len(self._processes)} was stopped and not continued"
        elif self.signal == signal.SIGTERM and not self._notes.begun:
            cause = "a step takes longer (raise stop_timeout), or a process hangs"
        else:
            return False
        name = signal.Signals(self.signal).name
        print(f"roofline: the run has not stopped {seconds:g} s after {name}, and is ended: {cause}", file=sys.stderr)
        return True

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
        self.signal, self._signalled = number, time.monotonic()
        for process in self._processes:
            process.send_signal(number)  # does nothing if it has ended

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
