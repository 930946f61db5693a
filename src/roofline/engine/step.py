"""Steps 4 to 7 in the life of a request: (draft,) schedule, fill, forward and sample, commit."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from roofline.backends.base import Executable, LostError, Queueing, StepCost
from roofline.backends.sampling import Sampled
from roofline.common import log
from roofline.engine.events import Event, FinishReason, TokenLogprob
from roofline.engine.schedule import continuous as scheduler
from roofline.engine.schedule.continuous import PendingCommit, State, StepPlan
from roofline.engine.schedule.fill import BatchFiller
from roofline.engine.schedule.rows import RowBuilder
from roofline.engine.schedule.sequence import Sequence
from roofline.engine.speculation.speculator import Speculator
from roofline.engine.stats import Meter


@dataclass
class Flight:
    """A step that was launched. drafted: tokens for each of the plan's `sampled`; started, planned: when; sampled: its
    ids, or what waits for them; cost: its price; error: why it failed; host_seconds: of the launch, outside the
    backend; pending: what was counted before its ids were known; counted: whether the next step's rows need them."""

    plan: StepPlan
    drafted: list[int]
    started: float
    planned: float
    sampled: Sampled | Callable[[], Sampled] | None = None
    cost: StepCost | None = None
    error: Exception | None = None
    host_seconds: float = 0.0
    pending: PendingCommit | None = None
    counted: bool = False


class Stepper:
    """Runs one executable over one scheduling state. overlap: launch a step before the ids of the one before are known,
    where the executable can queue and nothing is drafted."""

    def __init__(
        self,
        executable: Executable,
        state: State,
        schedule: Callable[[State], StepPlan],
        meter: Meter,
        measure: bool,
        speculator: Speculator | None = None,
        overlap: bool = False,
    ) -> None:
        self.executable, self.state, self.schedule = executable, state, schedule
        self.meter, self.measure, self.speculator = meter, measure, speculator
        self.lost: LostError | None = None  # why no step can succeed any more
        self._filler, self._rows = BatchFiller(executable.batch), RowBuilder()
        self._queueing = executable if overlap and isinstance(executable, Queueing) else None
        self._flying: Flight | None = None
        self._landed = -math.inf

    @property
    def flying(self) -> bool:
        """Whether a step is under way whose ids nobody has been told."""
        return self._awaited() is not None

    def step(self) -> list[Event]:
        """One step and its events; [] when nothing can run. A failing backend ends the sequences of this step only.

        Where the executable can queue, the step's events come with the next call, which first launches the step after
        it: the device goes on while the host is at work. Unless that needs the ids: penalties count them.
        """
        before, self._flying = self._awaited(), None
        events: list[Event] = []
        if before is not None and before.counted:
            events, before = self._land(before), None
        flight = self._launch()
        if before is not None:
            events += self._land(before)
        if flight is not None and flight.pending is not None:
            self._flying = flight
        elif flight is not None:
            events += self._land(flight)
        return events

    def _awaited(self) -> Flight | None:
        """The step under way, if anybody waits for its ids: not where all of its sequences have ended meanwhile."""
        flight = self._flying
        return flight if flight is not None and any(s.finished is None for s in flight.plan.sequences) else None

    def _launch(self) -> Flight | None:
        """Schedule a step and start it; None where nothing can run."""
        executable, clock = self.executable, self.executable.clock
        queueing = self._queueing if self.speculator is None else None
        started = clock.now()
        if self.speculator is not None:
            self.speculator.draft(self.state)
        plan = self.schedule(self.state)
        if not plan.sequences:
            return None
        flight = Flight(plan, [len(s.draft) for s in plan.sampled], started, clock.now())
        try:
            self._filler.fill(plan)
            rows = self._rows.build(plan.sampled)
            called = clock.now()
            executable.forward()
            if plan.sampled:
                flight.sampled = (queueing.queue_sample if queueing is not None else executable.sample)(rows)
            returned = clock.now()
            flight.cost = executable.step_cost() if self.measure else None
        except Exception as error:  # whatever a backend raises, other requests live on
            flight.error = error
            return flight
        if queueing is not None:
            flight.counted = self._rows.histories
            flight.pending = scheduler.advance(plan)
        flight.host_seconds = clock.now() - started - (returned - called)
        return flight

    def _land(self, flight: Flight) -> list[Event]:
        """Wait for a step's ids, commit it, and return its events."""
        plan, clock = flight.plan, self.executable.clock
        try:
            if flight.error is not None:
                raise flight.error
            sampled = flight.sampled() if callable(flight.sampled) else flight.sampled
            ids = self._checked(sampled)
        except Exception as error:
            return self._fail(plan, error)
        landed = clock.now()
        alive = [sequence.finished is None for sequence in plan.sampled]
        if flight.pending is None:
            fresh = scheduler.commit(self.state, plan, ids)
        else:
            fresh = scheduler.settle(self.state, plan, flight.pending, ids)
        events: list[Event] = []
        row = 0
        for sequence, lives, tokens, count in zip(plan.sampled, alive, fresh, flight.drafted, strict=True):
            if sequence.sampling.history is not None:
                for token in tokens:
                    sequence.sampling.history.add(token)
            if lives:
                events += _events(sequence, tokens, row, sampled)
                if sequence.finished is not None:
                    self.meter.ended(sequence.finished)
            row += count + 1
        if self.speculator is not None:
            self.speculator.learn(plan, flight.drafted, fresh, clock.now() - flight.planned)
            self.speculator.drafter.keep(self.state.running)
        now = clock.now()
        counts, seconds = [len(tokens) for tokens in fresh], now - max(flight.started, self._landed)
        self.meter.step(plan, flight.drafted, counts, seconds, flight.host_seconds + now - landed, flight.cost)
        self._landed = now
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
            self.speculator.drafter.keep(self.state.running)
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
