"""Starting the other ranks of a model on this machine, and knowing how they are."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING

from roofline.backends.parallel.ranks import RankError
from roofline.common import log
from roofline.common.processes import describe_end, die_with_parent, is_stopped

if TYPE_CHECKING:
    from torch.distributed import Store

JOIN_SECONDS = 120.0  # for a process to start and import torch
LOST = 3  # exit status of a rank that ended because it lost another
STOPPED_LOOKS = 15  # in a row at a rank that a signal has stopped, behind which it is ended
_LOOK = 1.0  # seconds between two of them
_POLL = 0.02  # seconds


def store_of(file: int) -> "Store":
    """The store where ranks find each other, in a file without a name (`new_file`) that this process has open as
    `file`. No socket leads to it, so nobody but the ranks can read what they say there, or write."""
    from torch.distributed import FileStore

    store = FileStore(f"/proc/self/fd/{file}")
    store.set_timeout(timedelta(seconds=JOIN_SECONDS))
    return store


def new_file() -> int:
    """Open a file in memory for `store_of`; processes that inherit the number share it.

    It stays open until the process ends: torch writes to it when the last of its objects lets go of the store, and
    another file would have the number by then.
    """
    return os.memfd_create("roofline-ranks")


def run_rank(rank: int, file: int, parent: int, work: Callable[["Store", Callable[[str], None]], None]) -> int:
    """What a launched process does; its exit status.

    file: of the store. parent: rank 0's process, with which this one ends, even if it is stopped.
    work: called with the store and a function that tells rank 0 how far this one is ("here", "ready"). What it raises
    is told too, unless it is the loss of another rank.
    """
    die_with_parent(parent)
    store = store_of(file)
    try:
        work(store, lambda word: store.set(f"{word}/{rank}", ""))
    except RankError as error:
        log.get("backends").error("%s", error)
        return LOST
    except Exception as error:  # whatever it is, rank 0 is to name it
        log.get("backends").exception("rank %d failed", rank)
        with contextlib.suppress(RuntimeError):  # rank 0 is gone as well
            store.set(f"failed/{rank}", f"{type(error).__name__}: {error}")
        return 1
    return 0


class Launched:
    """Processes of ranks 1 to size - 1: `python -m MODULE JSON`, the JSON being `options` with what `run_rank` takes.

    They leave their terminal's session, so that Ctrl-C there is rank 0's business alone, and die with this process.
    One that a signal has stopped is ended if nobody continues it: the others would wait for it as long as for a slow
    one. Looks are counted, not seconds: while this process itself was stopped there were none.
    """

    def __init__(self, size: int, module: str, options: Mapping[str, object]) -> None:
        self.size = size
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._stopped: dict[int, int] = {}  # looks in a row at which each rank was stopped
        self._ended = set[int]()  # ranks that were ended for it
        self._file, self._closed = new_file(), threading.Event()
        try:
            self.store = store_of(self._file)
            self._start(module, {**options, "file": self._file, "parent": os.getpid()})
        except BaseException:
            self.close(0.0)
            raise

    def _start(self, module: str, options: Mapping[str, object]) -> None:
        """Start the processes from a thread that lives until `close`: the kernel ends them with the thread that started
        them, and whoever loads a model may do so in one that ends before."""
        started: Future[None] = Future()

        def start() -> None:
            try:
                for rank in range(1, self.size):
                    command = [sys.executable, "-m", module, json.dumps({**options, "rank": rank})]
                    self._processes[rank] = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True, pass_fds=[self._file]
                    )
                started.set_result(None)
            except BaseException as error:
                started.set_exception(error)
            while not self._closed.wait(_LOOK):
                self._end_stopped()

        threading.Thread(target=start, name="ranks", daemon=True).start()
        started.result()

    def wait(self, word: str, seconds: float | None = None) -> None:
        """Until all ranks have told `word`. Raises RankError when one ends or fails before, or after `seconds`."""
        start = time.monotonic()
        while not self.store.check([f"{word}/{rank}" for rank in self._processes]):
            late = seconds is not None and time.monotonic() - start > seconds
            if reason := self.lost() or (f"a rank is not {word} after {seconds:.0f} s" if late else None):
                raise RankError(reason)
            time.sleep(_POLL)

    def reason(self) -> str | None:
        """What is known of a rank that is gone; a process that ends now is given a second to be seen."""
        for _ in range(int(1 / _POLL)):
            if reason := self.lost():
                return reason
            time.sleep(_POLL)
        return None

    def close(self, wait: float) -> None:
        """End the processes, by force after `wait` seconds."""
        end = time.monotonic() + wait
        for process in self._processes.values():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._closed.set()

    def _end_stopped(self) -> None:
        """End the ranks that were stopped at enough looks in a row, this one included."""
        for rank, process in self._processes.items():
            if process.poll() is None:
                self._stopped[rank] = self._stopped.get(rank, 0) + 1 if is_stopped(process.pid) else 0
                if self._stopped[rank] == STOPPED_LOOKS:
                    self._ended.add(rank)
                    process.kill()

    def lost(self) -> str | None:
        """The rank that failed or ended; those that ended because they lost it do not count."""
        for rank, process in self._processes.items():
            if self.store.check([f"failed/{rank}"]):
                return f"rank {rank} of {self.size} failed: {self.store.get(f'failed/{rank}').decode()}"
            status = process.poll()
            if status not in (None, LOST):
                stopped = rank in self._ended
                cause = "it was stopped by a signal and not continued" if stopped else describe_end(status)
                return f"rank {rank} of {self.size} ended ({cause})"
        return None
