"""The threads that fetch shards ahead: what they fetch, in which order, and how much of it waits to be read."""

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from roofline.train.data.shard_files import THREADS, _Prefetcher

SIZE = 10


class Fetches:
    """A fetch that waits until the test lets it end; shard 13 fails."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.gate = threading.Semaphore(0)

    def __call__(self, at: int, stop: threading.Event) -> None:
        self.begun.append(at)
        assert self.gate.acquire(timeout=60)
        if at == 13:
            raise OSError("there is no 13")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def fetches() -> Iterator[Fetches]:
    made = Fetches()
    yield made
    made.gate.release(1000)


def started(fetches: Fetches, limit: int | None = None) -> _Prefetcher:
    return _Prefetcher(fetches, [SIZE] * 40, limit)


def test_so_many_are_fetched_at_a_time_in_their_order(fetches: Fetches) -> None:
    prefetcher = started(fetches)
    prefetcher.request(range(20))
    until(lambda: len(fetches.begun) == THREADS)
    assert sorted(fetches.begun) == list(range(THREADS))
    assert len(prefetcher._threads) == THREADS
    fetches.gate.release()
    until(lambda: len(fetches.begun) == THREADS + 1)
    assert fetches.begun[-1] == THREADS
    fetches.gate.release(100)
    prefetcher.close()
    assert not any(thread.is_alive() for thread in prefetcher._threads)


def test_there_are_no_more_threads_than_shards(fetches: Fetches) -> None:
    prefetcher = started(fetches)
    prefetcher.request([3])
    until(lambda: fetches.begun == [3])
    assert len(prefetcher._threads) == 1
    prefetcher.request([])
    assert len(prefetcher._threads) == 1


@pytest.mark.parametrize(("limit", "count"), [(4 * SIZE, 2), (4 * SIZE - 1, 1), (1, 1), (None, THREADS)])
def test_what_waits_to_be_read_takes_half_of_the_cache_or_is_one(
    fetches: Fetches, limit: int | None, count: int
) -> None:
    fetches.gate.release(100)
    prefetcher = started(fetches, limit)
    prefetcher.request([7, 8, 9, 10, 11, 12][: max(count + 1, THREADS)])
    until(lambda: len(fetches.begun) >= count)
    if limit is None:
        return
    assert prefetcher._next() is None
    prefetcher.mark_read(7)
    until(lambda: len(fetches.begun) == count + 1)
    assert fetches.begun[-1] == 7 + count
    prefetcher.mark_read(12)
    assert 12 not in prefetcher._queue, "it was read by itself meanwhile"
    prefetcher.close()


def test_a_request_replaces_what_waits(fetches: Fetches) -> None:
    prefetcher = started(fetches, 2 * SIZE)
    prefetcher.request([1, 2, 3])
    until(lambda: fetches.begun == [1])
    prefetcher.request([5, 1, 6])
    assert (prefetcher._queue, prefetcher._unread) == ([5, 6], {1})
    prefetcher.request([5, 6])
    until(lambda: prefetcher._unread == {5})  # nobody will read shard 1 soon, so the next one has its room
    fetches.gate.release(100)
    until(lambda: fetches.begun == [1, 5])


def test_a_shard_that_fails_makes_room_for_the_next(fetches: Fetches) -> None:
    fetches.gate.release(100)
    prefetcher = started(fetches, 2 * SIZE)
    prefetcher.request([13, 14])
    until(lambda: fetches.begun == [13, 14])
    until(lambda: prefetcher._unread == {14})


def test_a_forked_process_begins_anew_and_leaves_its_parents_threads_alone(
    fetches: Fetches, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefetcher = started(fetches)
    prefetcher.request([1])
    until(lambda: fetches.begun == [1])
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        prefetcher.mark_read(1)
        assert prefetcher._unread == {1}
        prefetcher.close()
        assert not prefetcher._stop.is_set()
        old = prefetcher._threads
        prefetcher.request([])
        assert (prefetcher._process, prefetcher._threads, prefetcher._unread) == (-1, [], set())
    fetches.gate.release(100)
    assert len(old) == 1


def test_one_that_is_closed_starts_nothing(fetches: Fetches) -> None:
    prefetcher = started(fetches)
    prefetcher.mark_read(3)
    prefetcher.close()
    prefetcher.request([1])
    assert not prefetcher._threads
