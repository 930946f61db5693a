"""Steps 4 to 7 in the life of a request: (draft,) schedule, fill, forward and sample, commit."""

from collections.abc import Callable

from roofline.backends.base import Executable, LostError
from roofline.backends.sampling import Sampled
from roofline.common import log
from roofline.engine import scheduler
from roofline.engine.events import Event, FinishReason, TokenLogprob
from roofline.engine.fill import BatchFiller
from roofline.engine.rows import RowBuilder
from roofline.engine.scheduler import State, StepPlan
from roofline.engine.sequence import Sequence
from roofline.engine.speculation import Speculator
from roofline.engine.stats import Meter


class Stepper:
    """Runs one executable over one scheduling state."""

    def __init__(
        self,
        executable: Executable,
        state: State,
        schedule: Callable[[State], StepPlan],
        meter: Meter,
        measure: bool,
        speculator: Speculator | None = None,
    ) -> None:
        self.executable, self.state, self.schedule = executable, state, schedule
        self.meter, self.measure, self.speculator = meter, measure, speculator
        self.lost: LostError | None = None  # why no step can succeed any more
        self._filler, self._rows = BatchFiller(executable.batch), RowBuilder()

    def step(self) -> list[Event]:
        """One step and its events; [] when nothing can run. A failing backend ends the sequences of this step only."""
        executable, clock = self.executable, self.executable.clock
        started = clock.now()
        if self.speculator is not None:
            self.speculator.draft(self.state)
        plan = self.schedule(self.state)
        if not plan.sequences:
            return []
        planned = clock.now()
        drafted = [len(s.draft) for s in plan.sampled]
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
        fresh = scheduler.commit(self.state, plan, ids)
        events: list[Event] = []
        row = 0
        for sequence, tokens, count in zip(plan.sampled, fresh, drafted, strict=True):
            if sequence.sampling.history is not None:
                for token in tokens:
                    sequence.sampling.history.add(token)
            events += _events(sequence, tokens, row, sampled)
            row += count + 1
            if sequence.finished is not None:
                self.meter.ended(sequence.finished)
        if self.speculator is not None:
            self.speculator.learn(plan, drafted, fresh, clock.now() - planned)
            self.speculator.keep(self.state.running)
        self.meter.step(
            plan, drafted, [len(tokens) for tokens in fresh], clock.now() - started, returned - called, cost
        )
        return events

    def _checked(self, sampled: Sampled | None) -> list[int]:
        """The sampled ids, FAILED where one is outside the vocabulary: that row's sequence ends, the others go on."""
        ids: list[int] = sampled.ids.tolist() if sampled is not None else []
        size = self.executable.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < size:
            ids = [token if 0 <= token < size else scheduler.FAILED for token in ids]
        return ids

    def _fail(self, plan: StepPlan, error: Exception) -> list[Event]:
        if isinstance(error, LostError):
            self.lost = error
        log.get("engine").error("a step of %d sequences failed", len(plan.sequences), exc_info=error)
        return self.end(plan.sequences, "error", f"{type(error).__name__}: {error}")

    def end(self, sequences: list[Sequence], reason: FinishReason, error: str | None = None) -> list[Event]:
        """End sequences from outside, free their pages, and return the last event of each that had not ended."""
        ended = scheduler.finish(self.state, sequences, reason)
        for _ in ended:
            self.meter.ended(reason)
        if ended and self.speculator is not None:
            self.speculator.keep(self.state.running)
        return [Event(s.request.id, s.index, [], None, reason, None, error, s.usage()) for s in ended]


def _events(sequence: Sequence, tokens: list[int], row: int, sampled: Sampled | None) -> list[Event]:
    """What a sequence tells of a step: its new ids, of the logit rows from `row` on, and whether and why it ended."""
    request = sequence.request
    logprobs = None
    if request.params.logprobs is not None and sampled is not None:
        count = request.params.logprobs
        logprobs = [_logprob(token, at, count, sampled) for at, token in enumerate(tokens, row)]
    if sequence.finished is None:
        return [Event(request.id, sequence.index, tokens, logprobs)]
    if sequence.finished == "error":
        error = "no id could be sampled: the logits are not numbers"
        last = Event(request.id, sequence.index, [], None, "error", None, error, sequence.usage())
        return [Event(request.id, sequence.index, tokens, logprobs), last] if tokens else [last]
    stop_id = tokens[-1] if sequence.finished == "stop" else None
    return [Event(request.id, sequence.index, tokens, logprobs, sequence.finished, stop_id, None, sequence.usage())]


def _logprob(token: int, row: int, count: int, sampled: Sampled) -> TokenLogprob:
    top = zip(sampled.top_ids[row, :count].tolist(), sampled.top_logprobs[row, :count].tolist(), strict=True)
    return TokenLogprob(token, float(sampled.logprob[row]), tuple(top))
