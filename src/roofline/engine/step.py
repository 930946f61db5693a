"""Steps 4 to 7 in the life of a request: schedule, fill, forward and sample, commit."""

from collections.abc import Callable

from roofline.backends.base import Executable
from roofline.backends.sampling import Sampled
from roofline.common import log
from roofline.engine import scheduler
from roofline.engine.events import Event, FinishReason, TokenLogprob
from roofline.engine.fill import BatchFiller
from roofline.engine.rows import RowBuilder
from roofline.engine.scheduler import State, StepPlan
from roofline.engine.sequence import Sequence
from roofline.engine.stats import Meter


class Stepper:
    """Runs one executable over one scheduling state."""

    def __init__(
        self, executable: Executable, state: State, schedule: Callable[[State], StepPlan], meter: Meter, measure: bool
    ) -> None:
        self.executable, self.state, self.schedule = executable, state, schedule
        self.meter, self.measure = meter, measure
        self._filler, self._rows = BatchFiller(executable.batch), RowBuilder()

    def step(self) -> list[Event]:
        """One step and its events; [] when nothing can run. A failing backend ends the sequences of this step only."""
        executable, clock = self.executable, self.executable.clock
        started = clock.now()
        plan = self.schedule(self.state)
        if not plan.sequences:
            return []
        try:
            self._filler.fill(plan)
            rows = self._rows.build(plan.sampled)
            called = clock.now()
            executable.forward()
            sampled = executable.sample(rows) if plan.sampled else None
            returned = clock.now()
            ids = self._checked(sampled)
            cost = executable.step_cost() if self.measure else None
        except Exception as error:  # whatever a backend raises, other requests live on
            return self._fail(plan, error)
        scheduler.commit(self.state, plan, ids)
        for sequence, token in zip(plan.sampled, ids, strict=True):
            if sequence.sampling.history is not None and token >= 0:
                sequence.sampling.history.add(token)
        events = [_event(s, token, row, sampled) for row, (s, token) in enumerate(zip(plan.sampled, ids, strict=True))]
        for sequence in plan.sampled:
            if sequence.finished is not None:
                self.meter.ended(sequence.finished)
        self.meter.step(plan, clock.now() - started, returned - called, cost)
        return events

    def _checked(self, sampled: Sampled | None) -> list[int]:
        """The sampled ids, FAILED where one is outside the vocabulary: that row's sequence ends, the others go on."""
        ids: list[int] = sampled.ids.tolist() if sampled is not None else []
        size = self.executable.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < size:
            ids = [token if 0 <= token < size else scheduler.FAILED for token in ids]
        return ids

    def _fail(self, plan: StepPlan, error: Exception) -> list[Event]:
        log.get("engine").error("a step of %d sequences failed", len(plan.sequences), exc_info=error)
        return self.end(plan.sequences, "error", f"{type(error).__name__}: {error}")

    def end(self, sequences: list[Sequence], reason: FinishReason, error: str | None = None) -> list[Event]:
        """End sequences from outside, free their pages, and return the last event of each that had not ended."""
        ended = scheduler.finish(self.state, sequences, reason)
        for _ in ended:
            self.meter.ended(reason)
        return [Event(s.request.id, s.index, [], None, reason, None, error, s.usage()) for s in ended]


def _event(sequence: Sequence, token: int, row: int, sampled: Sampled | None) -> Event:
    request = sequence.request
    if sequence.finished == "error":
        error = "no id could be sampled: the logits are not numbers"
        return Event(request.id, sequence.index, [], None, "error", None, error, sequence.usage())
    logprobs = None
    if request.params.logprobs is not None and sampled is not None:
        count = request.params.logprobs
        top = zip(sampled.top_ids[row, :count].tolist(), sampled.top_logprobs[row, :count].tolist(), strict=True)
        logprobs = [TokenLogprob(token, float(sampled.logprob[row]), tuple(top))]
    if sequence.finished is None:
        return Event(request.id, sequence.index, [token], logprobs)
    stop_id = token if sequence.finished == "stop" else None
    return Event(request.id, sequence.index, [token], logprobs, sequence.finished, stop_id, None, sequence.usage())
