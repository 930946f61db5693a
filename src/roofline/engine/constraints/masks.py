"""Masks: the bits of the ids that rows of a step may choose, made by a thread of their own."""

import contextlib
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from roofline.common import log
from roofline.engine.constraints.matcher import Matcher

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

MASK_SECONDS = 1.0  # of the processor, for one mask; its answer ends with an error beyond
_LOOK_SECONDS = 0.05  # between looks at how long it has taken
_ALL = 0xFFFFFFFF


class _Work:
    """Masks to make, and how far it is. Only the thread that makes them writes to it."""

    def __init__(self, jobs: list[tuple[Matcher, int]], masks: np.ndarray) -> None:
        self.jobs, self.masks = jobs, masks
        self._at = 0
        self._abandoned = False
        self._clock: int | None = None
        self._started: float | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        if hasattr(time, "pthread_getcpuclockid"):  # not on every system
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        for at, (matcher, row) in enumerate(self.jobs):
            with self._lock:
                if self._abandoned:
                    return
                self._at, self._started = at, self._now()
            matcher.fill(self.masks[row])

    def abandon(self) -> int | None:
        """Give it up where its mask takes too long, and say which of the jobs that is; None: it goes on."""
        with self._lock:
            if self._started is None or self._now() - self._started <= MASK_SECONDS:
                return None
            self._abandoned = True
            return self._at

    def _now(self) -> float:
        return time.perf_counter() if self._clock is None else time.clock_gettime(self._clock)


class MaskBuilder:
    """Makes the masks of one step at a time. vocab_size: ids of the model."""

    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // 32)
        self._masks = np.zeros((0, self._words), np.uint32)
        self._pool: ThreadPoolExecutor | None = None
        self._work: tuple[_Work, Future[None]] | None = None

    def start(self, jobs: list[tuple[Matcher, int]], rows: int) -> None:
        """Begin with the masks of a step of so many logit rows: whose mask each is, and its row; at least one.

        All other rows allow everything.
        """
        if len(self._masks) != rows:
            self._masks = np.full((rows, self._words), _ALL, np.uint32)  # [rows, words]
        else:
            self._masks[:] = _ALL
        self._begin(_Work(jobs, self._masks))

    def finish(self) -> np.ndarray:
        """The masks of the step, uint32 [rows, words], valid until the next `start`."""
        while self._work is not None:
            work, future = self._work
            try:
                future.result(_LOOK_SECONDS)
                self._work = None
                return work.masks
            except TimeoutError:
                at = work.abandon()
            except Exception:
                self._work = None
                raise
            if at is None:
                continue
            # Its thread cannot be stopped: it goes on with memory of its own, and another makes what is left.
            log.get("engine").error("the mask of a constrained answer took more than %g s", MASK_SECONDS)
            slow, _ = work.jobs[at]
            slow.fail(f"finding the ids that may come next took more than {MASK_SECONDS:g} s")
            self._masks = work.masks.copy()
            self._close_pool(wait=False)
            self._begin(_Work(work.jobs[at + 1 :], self._masks))
        raise AssertionError("start comes before finish")

    def drop(self) -> None:
        """Forget the masks of a step that failed."""
        if self._work is not None:
            with contextlib.suppress(Exception):  # the step has failed already
                self.finish()

    def close(self) -> None:
        """End the thread."""
        self.drop()
        self._close_pool(wait=True)

    def _begin(self, work: _Work) -> None:
        from concurrent.futures import ThreadPoolExecutor  # 10 ms to import

        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="roofline-masks")
        self._work = work, self._pool.submit(work.run)

    def _close_pool(self, wait: bool) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=wait)
            self._pool = None
