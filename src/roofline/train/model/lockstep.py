"""Keeps a rank whose memory has ended in step with the collectives of the others, so that all give up a step together.

The others wait for it in the collective that comes next, and cannot be told before. So it computes its microbatch once
more on a short row: the collectives that it has behind it are left out, and it takes part in those that follow, with
values that nobody uses. At the end of the step all ranks learn of it, in an exchange that each step has anyway.
"""

from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import _functional_collectives as functional_collectives

T = TypeVar("T")
_COLLECTIVES = (dist.distributed_c10d.__file__, functional_collectives.__file__)


class Lockstep:
    """Counts the collectives of a microbatch, which are the same on all ranks, in the same order.

    Attributes:
        count: of the collectives of the microbatch so far. summed: the sharded modules whose gradients have been summed
            over the copies of the model. tokens: of the microbatch, while a short row is computed in its place.
        is_complete: every collective is counted; those inside compiled code are not.
    """

    def __init__(self) -> None:
        self.count, self._behind = 0, 0
        self.summed: set[int] = set()
        self.tokens: int | None = None
        self.is_complete = True

    def begin(self, behind: int = 0, tokens: int | None = None) -> None:
        """Begin a microbatch. behind: collectives that this rank has been in already; tokens: where it computes a short
        row in place of so many."""
        self.count, self._behind, self.tokens = 0, behind, tokens
        self.summed.clear()

    def call(self, collective: Callable[[], T], substitute: Callable[[], T]) -> T:
        """The result of the next collective; that of `substitute` where this rank has been in it already."""
        result = (collective if self.count >= self._behind else substitute)()
        self.count += 1
        return result


def is_in_collective(error: BaseException) -> bool:
    """Whether an error was raised inside a collective: how much of that the other ranks have seen is not known."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in _COLLECTIVES:
            return True
        trace = trace.tb_next
    return False
