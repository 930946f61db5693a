"""The part of a step that computes hidden rows, and what becomes of them: the vectors of requests with a Pooling."""

from dataclasses import dataclass

import numpy as np

from roofline.backends.base import Executable, GivesHidden, StepCost
from roofline.engine.pooling import Pooling
from roofline.engine.schedule.fill import step_ids
from roofline.engine.schedule.plan import StepPlan
from roofline.engine.schedule.sequence import Sequence
from roofline.ops.batch import Segment


@dataclass(frozen=True)
class HiddenRows:
    """What a step computed of one sequence: its first position there, and float32 [rows, width] of those that its
    vector needs; ends: whether the step has its last token."""

    sequence: Sequence
    first: int
    rows: np.ndarray
    ends: bool


class Pooler:
    """Runs hidden rows beside an executable, on its cache, and sums them up. The model without its head is made when
    the first request needs it."""

    def __init__(self, executable: Executable) -> None:
        self._executable = executable
        self._headless: Executable | None = None

    def prepare(self) -> None:
        """Make the model without its head, unless it is there. Raises UnsupportedError, CapacityError."""
        if self._headless is None:
            assert isinstance(self._executable, GivesHidden), "`check_able` comes before"
            self._headless = self._executable.headless()

    def run(self, plan: StepPlan) -> list[HiddenRows]:
        """Compute a plan whose sequences all need hidden rows, and wait for them."""
        executable = self._headless
        assert executable is not None, "`prepare` comes before"
        segments, result_rows, parts, at = [], list[int](), list[tuple[Sequence, int, bool]](), 0
        for number, (sequence, count) in enumerate(zip(plan.sequences, plan.counts, strict=True)):
            state = plan.moves[number].move if plan.moves else None
            segments.append(Segment(step_ids(sequence, count), sequence.computed, sequence.pages, state=state))
            ends = sequence.computed + count == len(sequence.ids)
            needed, first = _needed(sequence, count)
            result_rows += range(at + first, at + first + needed)
            parts.append((sequence, needed, ends))
            at += count
        executable.batch.fill(segments, result_rows)
        executable.forward()
        rows, row, result = executable.logits(), 0, []
        for sequence, needed, ends in parts:
            # A copy: the next step overwrites what is here.
            result.append(HiddenRows(sequence, sequence.computed, rows[row : row + needed].copy(), ends))
            row += needed
        return result

    def step_cost(self) -> StepCost:
        """The price of what `run` computed last."""
        assert self._headless is not None, "something ran"
        return self._headless.step_cost()

    def close(self) -> None:
        """Free the model without its head."""
        if self._headless is not None:
            self._headless.close()
            self._headless = None


def _needed(sequence: Sequence, count: int) -> tuple[int, int]:
    """Of a step's next `count` tokens: how many rows its sequence needs, and the number of the first of them."""
    if sequence.pools == "mean":
        return count, 0
    if sequence.pools == "first":
        return int(sequence.computed == 0), 0
    return int(sequence.computed + count == len(sequence.ids)), count - 1


def take_rows(part: HiddenRows) -> None:
    """Add a step's rows to the vector of their sequence, which `Sequence.vector` has once they are all there; it is
    None where they are not numbers.

    The sum of a mean is in float64, token after token: it is the same however the prompt was cut into steps.
    """
    sequence, rows = part.sequence, part.rows
    if sequence.pools == "mean":
        if part.first == 0:  # also where a sequence that lost its pages begins anew
            sequence.row_sum = np.zeros(rows.shape[1])  # [width]
        for row in rows:
            sequence.row_sum += row
    if sequence.pools == "first" and part.first == 0:
        sequence.row_sum = rows[0]  # [width]
    if part.ends:
        kinds = {"mean": lambda: sequence.row_sum / len(sequence.ids), "first": lambda: sequence.row_sum}
        sequence.vector = vector_of(kinds.get(sequence.pools, lambda: rows[-1])())


def logits_of(logits: np.ndarray, pooling: Pooling) -> bytes | None:
    """The vector of a request for logits. logits: float32 [vocab], of its prompt's last token."""
    return vector_of(logits[list(pooling.ids)] if pooling.ids else logits)


def vector_of(numbers: np.ndarray) -> bytes | None:
    """The bytes of a vector as float32; None where one of its numbers is none."""
    return numbers.astype("<f4").tobytes() if np.isfinite(numbers).all() else None
