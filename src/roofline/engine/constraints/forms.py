"""Forms: holds the ids that a step samples to the forms of their answers.

The id with the largest score of all is also the one with the largest score of those that are allowed, if it is allowed
itself. So where the cores that would make masks are those that compute the step, a row is sampled without a mask first,
and the mask is made only where the form refuses the id. That holds for sampling without top-k, top-p and min-p, which
cut off another part of what is allowed than of everything. Elsewhere, for such rows, and where
it is known already that one id alone may come, masks are made while the step is computed.
"""

from typing import TYPE_CHECKING

import numpy as np

from roofline.backends.base import Executable, Queueing, Resamples
from roofline.backends.sampling import Sampled, SampleRows
from roofline.engine.constraints.masks import MaskBuilder
from roofline.engine.params import SamplingParams
from roofline.engine.schedule.plan import StepPlan

if TYPE_CHECKING:
    from roofline.engine.constraints.matcher import Matcher


class Forms:
    """For the steps of one executable, one at a time."""

    def __init__(self, executable: Executable) -> None:
        self._executable = executable
        self._masks = MaskBuilder(executable.vocab_size)
        self._resampling: Resamples | None = None
        if isinstance(executable, Resamples) and not isinstance(executable, Queueing):
            self._resampling = executable
        self._unmasked: list[tuple[Matcher, int]] = []  # whose ids are looked at once they are sampled
        self._started = False

    def start(self, plan: StepPlan) -> bool:
        """Begin with the masks that a step needs to sample at all; False where there are none.

        A sequence with a form has no draft; rows of other sequences allow everything.
        """
        ahead: list[tuple[Matcher, int]] = []
        self._unmasked = []
        row = 0
        unmasked = self._resampling is not None and not plan.scores
        for sequence in plan.sampled:
            matcher = sequence.matcher
            if matcher is not None:
                later = unmasked and not matcher.forced and not _cuts(sequence.request.params)
                (self._unmasked if later else ahead).append((matcher, row))
            row += len(sequence.draft) + 1
        self._started = bool(ahead)
        if ahead:
            self._masks.start(ahead, row)
        return self._started

    def finish(self) -> np.ndarray | None:
        """The masks of `start`, uint32 [rows, words], None where there are none."""
        return self._masks.finish() if self._started else None

    def sample(self, rows: SampleRows) -> Sampled:
        """Choose the ids of the step, none of which its form refuses."""
        sampled = self._executable.sample(rows)
        refused = [(matcher, row) for matcher, row in self._unmasked if not matcher.allows(int(sampled.ids[row]))]
        if not refused:
            return sampled
        assert self._resampling is not None, "all masks were made before"
        self._masks.start(refused, rows.rows)
        rows.mask = self._masks.finish()
        return self._resampling.sample_again(rows, np.array([row for _, row in refused], np.int32))

    def drop(self) -> None:
        """Forget the masks of a step that failed."""
        self._masks.drop()

    def close(self) -> None:
        """End the thread that makes masks."""
        self._masks.close()


def _cuts(params: SamplingParams) -> bool:
    """Whether unlikely ids are cut off before one is chosen."""
    return params.temperature > 0.0 and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
