"""Starting the other ranks of a model on this machine, and knowing how they are."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from roofline.backends.parallel.ranks import RankError
from roofline.common import log
from roofline.common.processes import describe_end

if TYPE_CHECKING:
    from torch.distributed import Store

HOST = "127.0.0.1"
JOIN_SECONDS = 120.0  # for a process to start and import torch
LOST = 3  # exit status of a rank that ended because it lost another
_POLL = 0.02  # seconds


def store_of(port: int | None = None) -> "Store":
    """The store where ranks find each other: rank 0's own at a free port, or that at `port`."""
    from torch.distributed import TCPStore

    wait = timedelta(seconds=JOIN_SECONDS)
    if port is None:
        return TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=wait)
    return TCPStore(HOST, port, is_master=False, timeout=wait)


def run_rank(rank: int, port: int, work: Callable[["Store", Callable[[str], None]], None]) -> int:
    """What a launched process does; its exit status.

    work: called with the store and a function that tells rank 0 how far this one is ("here", "ready"). What it raises
    is told too, unless it is the loss of another rank.
    """
    store = store_of(port)
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
    """Processes of ranks 1 to size - 1: `python -m MODULE JSON`, the JSON being `options` with rank and port.

    They leave their terminal's session, so that Ctrl-C there is rank 0's business alone.
    """

    def __init__(self, size: int, module: str, options: Mapping[str, object]) -> None:
        self.store, self.size = store_of(), size
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for rank in range(1, size):
            argument = json.dumps({**options, "rank": rank, "port": self.store.port})  # type: ignore[attr-defined]
            self._processes[rank] = subprocess.Popen(
                [sys.executable, "-m", module, argument], stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
            )

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

    def lost(self) -> str | None:
        """The rank that failed or ended; those that ended because they lost it do not count."""
        for rank, process in self._processes.items():
            if self.store.check([f"failed/{rank}"]):
                return f"rank {rank} of {self.size} failed: {self.store.get(f'failed/{rank}').decode()}"
            status = process.poll()
            if status not in (None, LOST):
                return f"rank {rank} of {self.size} ended ({describe_end(status)})"
        return None
