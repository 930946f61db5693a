"""Notices an engine process that answers nothing any more: one that was stopped, or waits for what never comes.

A step may take long, on a slow machine or where kernels are compiled in it, so silence alone proves nothing. But
whoever computes uses the processor: silence without any is short, silence with it may last.
"""

import time
from collections.abc import Callable
from pathlib import Path

IDLE_TICKS = 3  # without an answer and without processor time
BUSY_TICKS = 120  # without an answer


class Watchdog:
    """Told of every message (`heard`) and of the passing of time (`tick`).

    It counts ticks, not seconds: while this process itself was stopped there were none.

    processor_time: what the engine's processes used so far, in any unit; None where that is not known.
    is_stopped: whether a signal has stopped the engine's own process: its ranks, which wait for it, use some.
    """

    def __init__(
        self,
        tick_seconds: float,
        processor_time: Callable[[], int | None],
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.tick_seconds = tick_seconds
        self._processor_time, self._is_stopped = processor_time, is_stopped
        self.heard()

    def heard(self) -> None:
        """The engine has sent something."""
        self.silent = self._idle = 0
        self._used: int | None = None

    def tick(self) -> str | None:
        """Why the process should be ended, None: it should not. The first silent tick is the time to send a Ping."""
        self.silent += 1
        used = self._processor_time()
        computed = (used is None or used != self._used) and not self._is_stopped()
        self._idle = 0 if computed else self._idle + 1
        self._used = used
        if self._idle >= IDLE_TICKS:
            return f"the engine process answered nothing for {self._seconds:g} s and computed nothing, so it was ended"
        if self.silent >= BUSY_TICKS:
            return f"the engine process answered nothing for {self._seconds:g} s, so it was ended"
        return None

    @property
    def _seconds(self) -> float:
        return self.silent * self.tick_seconds


class Stall:
    """Since when an engine has been asked for something, be it tokens or a sign of life, without showing any progress.

    What counts as progress of an engine with requests is a step alone: one that answers pings may compute nothing.
    """

    def __init__(self) -> None:
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """0 while nothing waits."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    def asked(self) -> None:
        """Something was sent that wants an answer."""
        if self._since is None:
            self._since = time.monotonic()

    def computed(self) -> None:
        """The engine took a step; what still waits does so from now on."""
        if self._since is not None:
            self._since = time.monotonic()

    def settled(self) -> None:
        """Nothing waits any more."""
        self._since = None


def tree_time(pid: int | None) -> int | None:
    """Processor time of a process and its descendants (ranks), in clock ticks; None where it is not known."""
    if pid is None:
        return None
    times: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_bytes().rpartition(b")")[2].split()  # a name may be no UTF-8
        except OSError:  # it has ended meanwhile
            continue
        times[int(stat.parent.name)] = int(fields[11]) + int(fields[12])
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    if pid not in times:
        return None
    tree = [pid]
    for each in tree:  # grows meanwhile
        tree += children.get(each, ())
    return sum(times[pid] for pid in tree)
