"""Defers Ctrl-C to the end of a step, so that no step is left half done."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Hold back SIGINT until the block ends, then let the previous handler have it.

    A KeyboardInterrupt raised inside commit would leave pages and sequences in disagreement. In other threads than
    the main one there is nothing to do: Python delivers signals to the main thread alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        # None: a handler that was not set from Python and cannot be set again from here.
        signal.signal(signal.SIGINT, previous if previous is not None else signal.SIG_DFL)
    if arrived and callable(previous):
        previous(*arrived[0])
