"""Whether the weights in memory are those that were written, found out while the model serves."""

import hashlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from roofline.common import log

if TYPE_CHECKING:
    from roofline.backends.cpu.memory import Image

DELAY = 5.0  # seconds from loading to the first byte: by then the first answer is under way
SLICE = 256 << 10  # bytes: 0.13 ms of hashing where the chip has instructions for it, 1 ms elsewhere
# Pauses, in multiples of the time that a slice took: a tenth of a core where no step runs, and beside steps so little
# that a pool of threads, which waits for the slowest of them, loses half a percent.
PAUSE_IDLE, PAUSE_BUSY = 9, 200


class StepEdges:
    """Counts the beginnings and ends of an executable's steps, so that the count is odd during a step.

    Apart from the executable, which a thread that looks at it would keep alive.
    """

    def __init__(self) -> None:
        self.count = 0


class WeightsCheck:
    """Hashes an image by a thread of its own, in slices with pauses between them; the GIL is free during a slice.

    Args:
        nbytes, sha256: of the file that the image is of.
        problem: the sentence that is logged, and kept in `self.problem`, where the hash is another one.
        steps: of the executable that computes with the image.
        ended: told that sentence, or None, once the hash is known.

    `pending` is true until the hash is known, or never will be because `stop` was called.
    """

    def __init__(
        self,
        image: "Image",
        nbytes: int,
        sha256: str,
        problem: str,
        steps: StepEdges,
        ended: Callable[[str | None], None],
    ) -> None:
        self.problem: str | None = None
        self.pending = True
        self._sha256, self._sentence, self._steps, self._ended = sha256, problem, steps, ended
        self._stopped = threading.Event()
        weights = image.view()[:nbytes].data  # of the thread alone, so that a closed model's memory is given back
        self._thread = threading.Thread(target=self._work, args=(weights,), name="roofline-weights-check", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Give up, if it still goes on, and wait until its thread has noticed: one that lives when the interpreter ends
        would be unwound in the middle of native code."""
        self._stopped.set()
        self.join()

    def join(self) -> None:
        """Wait until it has ended."""
        if threading.current_thread() is not self._thread:  # which a garbage collection may run in
            self._thread.join()

    def _work(self, weights: memoryview) -> None:
        digest = self._digest(weights)
        if digest is not None:
            self.problem = None if digest == self._sha256 else self._sentence
            if self.problem is not None:
                log.get("backends").error("%s", self.problem)
            self._ended(self.problem)
        self.pending = False

    def _digest(self, weights: memoryview) -> str | None:
        """The hash in hexadecimal; None where it was stopped before."""
        digest, pause = hashlib.sha256(), DELAY
        for at in range(0, len(weights), SLICE):
            edges = self._steps.count
            if self._stopped.wait(pause):
                return None
            start = time.monotonic()
            digest.update(weights[at : at + SLICE])
            idle = self._steps.count == edges and edges % 2 == 0
            pause = (time.monotonic() - start) * (PAUSE_IDLE if idle else PAUSE_BUSY)
        return digest.hexdigest()
