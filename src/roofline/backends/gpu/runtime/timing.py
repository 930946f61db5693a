"""What each launch of a step takes on the device: events between launches that were queued while it was kept busy."""

import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

from roofline.backends.gpu.runtime.lower import Launch
from roofline.backends.gpu.runtime.step import GpuStep

if TYPE_CHECKING:
    import torch

_CYCLES = 2e9  # a second, about: only how long the device waits for the host depends on it
_MOST = 1.0  # seconds that it is made to wait


def timed(walk: Callable[[], Iterable[Launch]], step: GpuStep, device: str) -> list[float]:
    """Run the launches of a walk and return the seconds of each on the device ("cpu": of the clock).

    A host that launches slower than the device computes would be timed in its place. So the list runs twice: once to
    see how long queueing it takes, then behind a kernel that spins for longer than that.
    """
    if device == "cpu":
        return [_clocked(launch, step) for launch in walk()]
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    _marked(walk(), step)
    queueing = time.perf_counter() - start
    torch.cuda.synchronize()
    torch.cuda._sleep(int(_CYCLES * min(_MOST, 2 * queueing)))
    marks = _marked(walk(), step)
    marks[-1].synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]


def _clocked(launch: Launch, step: GpuStep) -> float:
    start = time.perf_counter()
    launch(step)
    return time.perf_counter() - start


def _marked(launches: Iterable[Launch], step: GpuStep) -> "list[torch.cuda.Event]":
    """Queue the launches with an event before, between and after them."""
    import torch

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    marks = [mark()]
    for launch in launches:
        launch(step)
        marks.append(mark())
    return marks
