"""Ranks as threads of this process: what a Program for several ranks computes, without the time processes take."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from roofline.common.errors import UnsupportedError


class Threads:
    """What the ranks share: a place for each one's tensor, and a barrier."""

    def __init__(self, size: int) -> None:
        self.size, self.places = size, [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def exchange(self, rank: int, x: Any) -> list[Any]:
        """Everybody's x."""
        self.places[rank] = x
        self.barrier.wait()
        found = list(self.places)
        self.barrier.wait()
        return found

    def run(self, work: "Callable[[Member], Any]") -> list[Any]:
        """work(member) on a thread for each rank; a rank that fails takes the others with it."""

        def one(rank: int) -> Any:
            try:
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
    """The Group of ops.collectives that one rank sees. reverse: adds from the last rank to the first."""

    def __init__(self, threads: Threads, rank: int, reverse: bool = False) -> None:
        self.threads, self.rank, self.size, self.reverse = threads, rank, threads.size, reverse

    def sum(self, x: Any, order: str) -> Any:
        if order not in ("", "rank"):
            raise UnsupportedError(f"order {order!r}", "a test has two")
        parts = self.threads.exchange(self.rank, x)
        total = 0.0
        for part in parts if order == "rank" else parts[::-1]:
            total = total + part
        return total

    def gather(self, x: Any, widths: Sequence[int]) -> list[Any]:
        parts = self.threads.exchange(self.rank, x)
        assert [part.shape[1] for part in parts] == list(widths)
        return parts
