"""Ranks as threads of this process: what a Program for several ranks computes, without the time processes take."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from roofline.common.errors import UnsupportedError


class Threads:
    """What the ranks share: a place for each one's tensor, and a barrier.

    in_turn: only one rank computes at a time, for code that threads cannot share.
    """

    def __init__(self, size: int, in_turn: bool = False) -> None:
        self.size, self.places = size, [None] * size
        self.barrier = threading.Barrier(size, timeout=60)
        self.turn = threading.Lock() if in_turn else None

    def exchange(self, rank: int, x: Any) -> list[Any]:
        """Everybody's x."""
        self.places[rank] = x.clone()  # whoever goes on first may write its result there
        self._meet()
        found = list(self.places)
        self._meet()
        return found

    def _meet(self) -> None:
        if self.turn is not None:
            self.turn.release()
        try:
            self.barrier.wait()
        finally:
            if self.turn is not None:
                self.turn.acquire()

    def run(self, work: "Callable[[Member], Any]") -> list[Any]:
        """work(member) on a thread for each rank; a rank that fails takes the others with it."""

        def one(rank: int) -> Any:
            try:
                with self.turn or contextlib.nullcontext():
                    return work(Member(self, rank))
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            found = [pool.submit(one, rank) for rank in range(self.size)]
            errors = [e for f in found if (e := f.exception()) and not isinstance(e, threading.BrokenBarrierError)]
            if errors:
                raise errors[0]
            return [f.result() for f in found]


class Member:
    """The Group of ops.collectives that one rank sees; where no order is asked for, it adds from the last rank on."""

    def __init__(self, threads: Threads, rank: int) -> None:
        self.threads, self.rank, self.size = threads, rank, threads.size

    def sum(self, x: Any, order: str) -> Any:
        if order not in ("", "rank"):
            raise UnsupportedError(f"order {order!r}", "a test has two")
        parts = self.threads.exchange(self.rank, x)
        first, *others = [part.float() for part in (parts if order == "rank" else parts[::-1])]
        for other in others:
            first = first + other
        return first.to(x.dtype)

    def gather(self, x: Any, widths: Sequence[int]) -> list[Any]:
        parts = self.threads.exchange(self.rank, x)
        assert [part.shape[1] for part in parts] == list(widths)
        return parts
