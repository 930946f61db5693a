"""Steps 4 to 7 in the life of a request: (draft,) schedule, fill, forward and sample, commit."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from roofline.backends.base import ComputesNothing, Executable, FindsDamage, LostError, Queueing, StepCost
from roofline.backends.sampling import Sampled
from roofline.common import log
from roofline.engine.constraints.forms import Forms
from roofline.engine.digests import digests_of
from roofline.engine.events import Event, FinishReason, PromptProgress, token_logprob
from roofline.engine.pooler import HiddenRows, Pooler, logits_of, take_rows
from roofline.engine.restoring import restore_states
from roofline.engine.schedule import continuous as scheduler
from roofline.engine.schedule.continuous import PendingCommit
from roofline.engine.schedule.fill import BatchFiller
from roofline.engine.schedule.plan import State, StepPlan
from roofline.engine.schedule.prompt_scores import scores_of, with_scores, without_scores
from roofline.engine.schedule.rows import RowBuilder
from roofline.engine.schedule.sequence import Sequence
from roofline.engine.speculation.speculator import Speculator
from roofline.engine.stats import StatsMeter

if TYPE_CHECKING:
    import numpy as np

    from roofline.engine.recording.recorder import StepRecorder
NO_NUMBERS = "no id could be sampled: the logits are not numbers"
NO_VECTOR = "no vector could be made: the result is not numbers"


@dataclass
class Flight:
    """A step that was launched. drafted: tokens for each of the plan's `sampled`; started, planned: when; sampled: its
    ids, or what waits for them; cost: its price; error: why it failed; host_seconds: of the launch, outside the
    backend; pending: what was counted before its ids were known; counted: whether the next step's rows need them, or
    this one's logits are looked at; digests: whether any of its sequences wants digests of its logits, for which it
    lands before the next is launched; hidden: rows of the plan's `pooled`."""

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
    digests: bool = False
    hidden: list[HiddenRows] = field(default_factory=list)


class Stepper:
    """Runs one executable over one scheduling state. overlap: launch a step before the ids of the one before are known,
    where the executable can queue and nothing is drafted."""

    def __init__(
        self,
        executable: Executable,
        state: State,
        schedule: Callable[[State], StepPlan],
        meter: StatsMeter,
        measure: bool,
        speculator: Speculator | None = None,
        overlap: bool = False,
    ) -> None:
        self.executable, self.state, self.schedule = executable, state, schedule
        self.meter, self.measure, self.speculator = meter, measure, speculator
        self.lost: LostError | None = None  # why no step can succeed any more
        self.recorder: StepRecorder | None = None  # whoever writes the steps down
        self._filler = BatchFiller(executable.batch, sizes_only=isinstance(executable, ComputesNothing))
        self._rows = RowBuilder()
        self._forms = Forms(executable)
        self.pooler = Pooler(executable)
        self._queueing = executable if overlap and isinstance(executable, Queueing) else None
        self._flying: Flight | None = None
        self._landed = -math.inf

    @property
    def flying(self) -> bool:
        """Whether a step is under way whose ids nobody has been told."""
        return self._awaited() is not None

    def step(self) -> list[Event]:
        """One step and its events; [] when nothing can run. A step that fails is computed again in parts, so that only
        the sequences end that it fails for; the others get the ids that they would have got.

        Where the executable can queue, the step's events come with the next call, which first launches the step after
        it: the device goes on while the host is at work. Unless that needs the ids: penalties count them, and they
        decide what may come next in an answer with a form.
        """
        before, self._flying = self._awaited(), None
        events: list[Event] = []
        if before is not None and before.counted:
            events, before = self._land(before), None
        flight = self._plan()
        if flight is not None:
            self._launch(flight, self._queueing if self.speculator is None else None)
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

    def _plan(self) -> Flight | None:
        """Schedule a step; None where nothing can run."""
        clock = self.executable.clock
        started = clock.now()
        if self.speculator is not None:
            self.speculator.draft(self.state)
        plan = self.schedule(self.state)
        if not plan.sequences:
            return None
        flight = Flight(plan, [len(s.draft) for s in plan.sampled], started, clock.now())
        for sequence in plan.sequences[plan.decodes :]:  # whoever decodes has been scheduled before
            if sequence.scheduled_at is None:
                sequence.scheduled_at = flight.planned
        return flight

    def _launch(self, flight: Flight, queueing: Queueing | None) -> None:
        """Give a step to the backend. What goes wrong is kept in the flight until it lands."""
        executable, clock, plan, pooled = self.executable, self.executable.clock, flight.plan, flight.plan.pooled
        answers = plan.part(s for s in plan.sequences if not s.hidden) if pooled else plan
        masked, called = False, flight.planned
        try:
            if answers.sequences:
                self._filler.fill(answers)
                rows = self._rows.build(answers.sampled)
                flight.digests = self._rows.digests or self.recorder is not None
                if self.recorder is not None:
                    self.recorder.step(answers)
                masked = self._forms.start(answers)
                called = clock.now()
                executable.forward()
                rows.mask = self._forms.finish()
                if answers.scores:
                    rows = with_scores(rows, answers)
                if answers.rows:
                    sample = queueing.queue_sample if queueing is not None else self._forms.sample
                    flight.sampled = sample(rows)
            if pooled:
                flight.hidden = self.pooler.run(plan.part(pooled))
            returned = clock.now()
            flight.cost = self._cost(bool(answers.sequences), bool(pooled)) if self.measure else None
        except Exception as error:  # whatever a backend raises, other requests live on
            self._forms.drop()
            flight.error = error
            return
        if queueing is not None:
            flight.counted = self._rows.histories or masked or flight.digests or plan.vectors > len(pooled)
            flight.pending = scheduler.advance(self.state, plan)
        flight.host_seconds = clock.now() - flight.started - (returned - called)

    def _cost(self, answers: bool, pooled: bool) -> StepCost:
        """The price of the step: of what is computed for answers, and of hidden rows."""
        if not pooled:
            return self.executable.step_cost()
        cost = self.pooler.step_cost()
        return cost + self.executable.step_cost() if answers else cost

    def _land(self, flight: Flight) -> list[Event]:
        """Wait for a step's ids, commit it, and return its events."""
        plan, clock = flight.plan, self.executable.clock
        try:
            sampled = computed = flight.sampled() if callable(flight.sampled) else flight.sampled
            if sampled is not None and plan.scores:
                sampled = without_scores(sampled, plan)
            ids = self._checked(sampled)
            rows = logits = self.executable.logits() if flight.digests and plan.rows else None  # until the next step's
            if rows is not None and plan.scores:
                logits = rows[plan.sampled_rows()]
        except Exception as error:
            flight.error = error
        if self.recorder is not None and len(plan.pooled) < len(plan.sequences):  # hidden rows are not recorded
            self.recorder.landed(None if flight.error is not None else rows, flight.error)
        if flight.error is not None:
            return self._compute_in_parts(flight, flight.error)
        landed = clock.now()
        events = _progress(flight, landed)
        scored, unscored = _scores(plan, computed)
        if unscored:
            ids = [scheduler.FAILED if s in unscored else token for s, token in zip(plan.sampled, ids, strict=True)]
        events += scored
        ending = self._take_vectors(flight) if plan.vectors else []
        alive = [sequence.finished is None for sequence in plan.sampled]
        noted = self.speculator.note(plan) if self.speculator is not None else []
        if flight.pending is None:
            fresh = scheduler.commit(self.state, plan, ids)
        else:
            fresh = scheduler.settle(self.state, plan, flight.pending, ids)
        if self.speculator is not None:
            self.speculator.take(noted)
        row = 0
        for sequence, lives, tokens, count in zip(plan.sampled, alive, fresh, flight.drafted, strict=True):
            if tokens or sequence.vector is not None:
                sequence.last_at = landed
                sequence.first_at = landed if sequence.first_at is None else sequence.first_at
            if lives:
                events += self._tell(sequence, tokens, row, sampled, logits)
            row += count + 1
        events += self.end(unscored, "error", f"{NO_NUMBERS}{self._damage}" if unscored else None)
        events += self._tell_vectors(ending, landed)
        if self.speculator is not None:
            self.speculator.learn(plan, flight.drafted, fresh, clock.now() - flight.planned)
            self.speculator.drafter.keep(self.state.running)
        now = clock.now()
        counts, seconds = [len(tokens) for tokens in fresh], now - max(flight.started, self._landed)
        self.meter.step(plan, flight.drafted, counts, seconds, flight.host_seconds + now - landed, flight.cost)
        self._landed = now
        return events

    def _tell_vectors(self, ended: list[Sequence], landed: float) -> list[Event]:
        """The last events of sequences whose hidden rows are all there."""
        for sequence in ended:
            sequence.first_at = sequence.last_at = landed
        return [event for sequence in ended for event in self._tell(sequence, [], 0, None, None)]

    def _take_vectors(self, flight: Flight) -> list[Sequence]:
        """Give the sequences with pooling what a step has for their vectors; those whose hidden rows are all there."""
        for part in flight.hidden:
            if part.sequence.finished is None:
                take_rows(part)
        plan, row = flight.plan, 0
        rows = plan.sampled_rows() if plan.scores else range(plan.rows)
        for sequence, count in zip(plan.sampled, flight.drafted, strict=True):
            pooling = sequence.request.params.pooling
            if pooling is not None and sequence.finished is None:
                sequence.vector = logits_of(self.executable.logits()[rows[row]], pooling)
            row += count + 1
        return [part.sequence for part in flight.hidden if part.ends and part.sequence.finished is None]

    def _tell(
        self, sequence: Sequence, tokens: list[int], row: int, sampled: Sampled | None, logits: "np.ndarray | None"
    ) -> list[Event]:
        """Take in the new ids of a sequence and return its events; what fails in that ends this sequence alone.

        row: of the sequence's first new id in `sampled` and in the step's logits [rows, vocab].
        """
        try:
            if tokens and sequence.sampling.history is not None:
                for token in tokens:
                    sequence.sampling.history.add(token)
            cause = self._cause(sequence) if sequence.finished == "error" else None
            events = _events(sequence, tokens, row, sampled, cause)
            if logits is not None and tokens and sequence.request.params.digests:
                events[0] = events[0]._replace(digests=digests_of(logits[row : row + len(tokens)]))
        except Exception as error:
            log.get("engine").error("an answer of request %s failed", sequence.request.id, exc_info=error)
            scheduler.finish(self.state, [sequence], "error")
            sequence.finished = "error"  # also where its last id had come
            events = [_last(sequence, "error", f"{type(error).__name__}: {error}")]
        if sequence.finished is not None:
            self.meter.ended(sequence.finished)
        return events

    def _checked(self, sampled: Sampled | None) -> list[int]:
        """The sampled ids, FAILED where one is outside the vocabulary: that row's sequence ends, the others go on."""
        ids: list[int] = sampled.ids.tolist() if sampled is not None else []
        size = self.executable.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < size:
            ids = [token if 0 <= token < size else scheduler.FAILED for token in ids]
        return ids

    def _cause(self, sequence: Sequence) -> str:
        """Why a sequence failed that others of its step did not share."""
        form = sequence.matcher.error if sequence.matcher is not None else None
        if form is not None:
            return form
        return f"{NO_VECTOR if sequence.pools else NO_NUMBERS}{self._damage}"

    @cached_property
    def _damage(self) -> str:
        """Why a result is no numbers, "" if that is not known; the weights are looked through once, when it happens."""
        executable = self.executable
        tensor = executable.damaged_tensor() if isinstance(executable, FindsDamage) else None
        return f": tensor {tensor!r} of the model holds NaN or infinity, so its file is damaged" if tensor else ""

    def _compute_in_parts(self, flight: Flight, error: Exception) -> list[Event]:
        """Compute a step that failed again, in two parts, and these as well if they fail: only a sequence that fails
        alone ends. Exact, since what is computed of a sequence does not depend on the others.

        All end where nothing can be computed any more, and where ids were lost that later steps build on.
        """
        if isinstance(error, LostError):
            self.lost = error
        plan = flight.plan
        sequences = [sequence for sequence in plan.sequences if sequence.finished is None]
        if self.lost is None:  # else whoever ends this engine says it, in one line
            log.get("engine").error("a step of %d sequences failed", len(plan.sequences), exc_info=error)
        if self.lost is not None or flight.pending is not None or len(plan.sequences) == 1:
            return self.end(sequences, "error", f"{type(error).__name__}: {error}")
        events: list[Event] = []
        middle = (len(sequences) + 1) // 2
        for part in (plan.part(sequences[:middle]), plan.part(sequences[middle:])):
            now = self.executable.clock.now()
            again = Flight(part, [len(s.draft) for s in part.sampled], now, now)
            if part.moves and (problem := self._restore(part)) is not None:
                events += self._compute_in_parts(again, problem)
            elif part.sequences:
                self._launch(again, None)
                events += self._land(again)
        return events

    def _restore(self, plan: StepPlan) -> Exception | None:
        """Compute anew what a failed step may have done to the state of these sequences; why it cannot be."""
        self._filler.forget()
        if self.recorder is not None:
            self.recorder.forget(plan)
        return restore_states(self.executable, self.state, plan)

    def close(self) -> None:
        """End the thread that makes masks, and free the model without its head."""
        self._forms.close()
        self.pooler.close()

    def end(self, sequences: list[Sequence], reason: FinishReason, error: str | None = None) -> list[Event]:
        """End sequences from outside, free their pages, and return the last event of each that had not ended."""
        ended = scheduler.finish(self.state, sequences, reason)
        for _ in ended:
            self.meter.ended(reason)
        if ended and self.speculator is not None:
            self.speculator.drafter.keep(self.state.running)
        return [_last(sequence, reason, error) for sequence in ended]


def _last(sequence: Sequence, reason: FinishReason, error: str | None) -> Event:
    """The last event of a sequence that no id ended."""
    return Event(
        request_id=sequence.request.id,
        index=sequence.index,
        ids=[],
        logprobs=None,
        finish_reason=reason,
        stop_id=None,
        error=error,
        usage=sequence.usage(),
    )


def _progress(flight: Flight, landed: float) -> list[Event]:
    """How far the prompts are with this step, before it is committed, for requests that want to know."""
    plan, events = flight.plan, []
    for at, sequence in enumerate(plan.sequences[plan.decodes :], plan.decodes):
        request = sequence.request
        if not request.params.prompt_progress or sequence.first_at is not None or sequence.finished is not None:
            continue
        # Where the next step is counted already, `sequence.computed` is ahead of this one.
        computed = sequence.computed + plan.counts[at] if flight.pending is None else flight.pending.computed[at]
        assert sequence.scheduled_at is not None, "it is in a step"
        total, seconds = sequence.prompt_length, landed - sequence.scheduled_at
        progress = PromptProgress(total, sequence.cached_tokens, min(computed, total), seconds)
        events.append(Event(request.id, sequence.index, [], progress=progress))
    return events


def _scores(plan: StepPlan, sampled: Sampled | None) -> tuple[list[Event], list[Sequence]]:
    """What a step tells of prompt tokens, and the sequences whose logits there are no numbers."""
    events: list[Event] = []
    unscored: list[Sequence] = []
    for score in plan.scores:
        sequence = score.sequence
        logprobs = scores_of(sampled, score) if sampled is not None else None
        if logprobs is None:
            unscored.append(sequence)
        elif sequence.finished is None:
            events.append(Event(sequence.request.id, sequence.index, [], prompt_logprobs=logprobs))
    return events, unscored


def _events(sequence: Sequence, tokens: list[int], row: int, sampled: Sampled | None, error: str | None) -> list[Event]:
    """What a sequence tells of a step: its new ids, of the logit rows from `row` on, and whether and why it ended."""
    request = sequence.request
    if sequence.pools and sequence.finished == "stop":
        return [_last(sequence, "stop", None)._replace(vector=sequence.vector)]
    logprobs = None
    if request.params.logprobs is not None and sampled is not None:
        count = request.params.logprobs
        logprobs = [token_logprob(token, at, count, sampled) for at, token in enumerate(tokens, row)]
    if sequence.finished is None:
        return [Event(request.id, sequence.index, tokens, logprobs)]
    if sequence.finished == "error":
        last = _last(sequence, "error", error)
        return [Event(request.id, sequence.index, tokens, logprobs), last] if tokens else [last]
    stop_id = tokens[-1] if sequence.finished == "stop" and _is_end(sequence, tokens[-1]) else None
    return [
        Event(
            request_id=request.id,
            index=sequence.index,
            ids=tokens,
            logprobs=logprobs,
            finish_reason=sequence.finished,
            stop_id=stop_id,
            error=None,
            usage=sequence.usage(),
        )
    ]


def _is_end(sequence: Sequence, token: int) -> bool:
    """Whether an id only ends its answer. The last one of a form that is complete belongs to the text."""
    return token in sequence.stop_ids or (sequence.matcher is not None and sequence.matcher.is_end(token))
