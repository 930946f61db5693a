"""SIGTERM and Ctrl-C as a request to stop."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roofline.train.parallel.processes import World

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def receiving(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside the block SIGTERM and SIGINT call `handler`, unless they are ignored here, as behind nohup.

    Only the main thread can change that; in any other one this does nothing.
    """
    main = threading.current_thread() is threading.main_thread()
    # None: a handler that was not set by Python, and could not be put back.
    numbers = [number for number in STOP_SIGNALS if main and signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each)


class Signals:
    """Inside the block the first SIGTERM or SIGINT is only noted; the next one does what it did before.

    number: the signal that all processes of the run have agreed on, 0 if none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._noted = 0  # apart from `number`: a signal may come while the processes agree
        self._stack = ExitStack()

    def __enter__(self) -> "Signals":
        self._stack.enter_context(receiving(self._note))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def any(self, world: "World") -> bool:
        """Whether a process of the run got one; all of them must ask together."""
        self.number = int(world.most([self._noted])[0])
        return self.number != 0

    def _note(self, number: int, _: FrameType | None) -> None:
        self._noted = number
        self._stack.close()
