"""An Executable that computes nothing: a step moves its clock by what the step would take on the simulated devices."""

import hashlib
from collections.abc import Callable

import numpy as np

from roofline.backends.base import Clock, StepCost
from roofline.backends.capacity import Capacity
from roofline.backends.sampling import MAX_LOGPROBS, Sampled, SampleRows
from roofline.backends.simulated.clock import VirtualClock
from roofline.backends.simulated.step_times import SimulatedStepTimes
from roofline.common.errors import UnsupportedError
from roofline.ops.batch import Batch

FIRST_ID = 5  # ids below are control tokens of most vocabularies


class SimulatedExecutable:
    """See `backends.base.Executable`. Its ids count on from the position they stand at and the request's noise.

    Args:
        page_bytes: of a page of the cache, on the device that has the most.
        name: of model and devices, for the fingerprint.

    watch: called after each step with its batch and its seconds, where somebody counts them.
    """

    exact = True
    computes_nothing = True

    def __init__(
        self, times: SimulatedStepTimes, capacity: Capacity, page_bytes: int, vocab_size: int, name: str
    ) -> None:
        self.times, self.limits, self.num_pages = times, capacity.limits, capacity.num_pages
        self.max_context, self.page_bytes, self.vocab_size = capacity.max_context, page_bytes, vocab_size
        self.fingerprint = hashlib.sha256(f"simulated {name}".encode()).hexdigest()
        self.virtual = VirtualClock()
        self.clock: Clock = self.virtual
        self.watch: Callable[[Batch, float], None] | None = None
        self.batch = Batch(self.limits)
        self._cost = StepCost(0.0, 0.0, 0.0, None)
        rows = self.limits.rows
        nothing = np.full((rows, MAX_LOGPROBS), np.nan, np.float32)
        self._empty = Sampled(np.zeros(rows, np.int32), nothing[:, 0], np.full((rows, MAX_LOGPROBS), -1), nothing)

    def forward(self) -> None:
        seconds, self._cost = self.times.of(self.batch)
        self.virtual.advance(seconds)
        if self.watch is not None:
            self.watch(self.batch, seconds)

    def logits(self) -> np.ndarray:
        raise UnsupportedError("logits of a simulated model", "nothing is computed", ("backend=cpu",))

    def sample(self, rows: SampleRows) -> Sampled:
        if rows.mask is not None or (rows.logprobs >= 0).any():
            what = "a form of the answer" if rows.mask is not None else "log-probabilities"
            raise UnsupportedError(f"{what} of a simulated model", "nothing is computed", ("backend=cpu",))
        count = rows.rows
        at = rows.position + rows.seed.astype(np.int64) + rows.sample_index
        ids = (FIRST_ID + at % (self.vocab_size - FIRST_ID)).astype(np.int32)
        empty = self._empty
        return Sampled(ids, empty.logprob[:count], empty.top_ids[:count], empty.top_logprobs[:count])

    def step_cost(self) -> StepCost:
        """Return the cost of the last `forward`."""
        return self._cost

    def close(self) -> None:
        """There is nothing to free."""
