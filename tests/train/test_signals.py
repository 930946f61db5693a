"""A signal is lost at no moment, and all processes of a run stop at the same step."""

import os
import signal
from collections.abc import Sequence

from roofline.train.run.signals import Signals


class Processes:
    """Agrees as the processes of a run do; a signal may come when they have spoken and before they hear the others."""

    def __init__(self, other: int = 0) -> None:
        self.other = other
        self.late = 0

    def most(self, numbers: Sequence[float]) -> list[float]:
        if self.late:
            os.kill(os.getpid(), self.late)
            self.late = 0
        return [max(number, self.other) for number in numbers]


def test_a_signal_that_comes_while_the_processes_agree_counts_at_the_next_step() -> None:
    world = Processes()
    with Signals() as signals:
        assert not signals.any(world)  # type: ignore[arg-type]
        world.late = signal.SIGTERM
        assert not signals.any(world)  # type: ignore[arg-type]
        assert signals.number == 0, "the other processes do not know of it"
        assert signals.any(world)  # type: ignore[arg-type]
        assert signals.number == signal.SIGTERM


def test_a_signal_of_another_process_counts_here() -> None:
    with Signals() as signals:
        assert signals.any(Processes(signal.SIGINT))  # type: ignore[arg-type]
        assert signals.number == signal.SIGINT
