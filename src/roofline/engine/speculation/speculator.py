"""Speculation: guessed ids are verified in one step with the id that is due, and it stops where it loses time.

A verify step computes the next id and k drafted ones at once, as rows of one segment, and samples the target at each
position with that position's own noise; drafted ids count while they are what was sampled. So the output is the
output without drafts, bit for bit, greedy or sampled (compare Leviathan et al. 2023, whose sampling keeps only the
distribution). What remains is a question of time, answered here from measured steps.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from roofline.backends.base import Clock
from roofline.common import log
from roofline.engine.schedule.plan import State, StepPlan
from roofline.engine.schedule.sequence import Sequence
from roofline.engine.speculation.layer import NotedPart

WINDOW = 5  # steps of a kind whose median is its time
REFRESH = 128  # verify steps after which a plain one is measured again
COSTLY = 0.5  # a price from here on leaves little to be won, and is believed only ...
SURE, SOON = 3, 16  # ... beside so many plain steps, of which one is measured again after so many verify steps
GUESSED_PRICE = 0.12  # of a drafted row, in plain steps, until it is measured
FADE = 0.95  # of what is known of a sequence's drafts, with each further token verified
HITS, TRIES = 1.0, 2.0  # what a fresh sequence is taken to have shown
MARGIN = 1.1  # what a drafted token must promise at least: measured times are no better than that
AGAIN = 1.5  # a sequence that stopped drafting must promise this much more than one that drafts
RETRY, LONGEST_RETRY = 64, 1024  # drafts held back before the prices are doubted


class Drafter(Protocol):
    """Makes drafts. `free`: so cheap that drafts are made also where none will be verified. `settled`: the last call
    drafted only, and did not have to take in much text before."""

    free: bool
    settled: bool

    def draft(self, sequences: list[Sequence], counts: list[int]) -> None:
        """Set the `draft` of each sequence: at most `counts` ids that may follow its `ids`."""

    def keep(self, running: list[Sequence]) -> None:
        """Forget all other sequences."""

    def close(self) -> None:
        """Free what is held."""


@runtime_checkable
class TakesSteps(Drafter, Protocol):
    """A drafter that goes on from what steps have computed."""

    def note(self, plan: StepPlan) -> list[NotedPart]:
        """What it has to know of a step before that is committed."""

    def take(self, parts: list[NotedPart]) -> None:
        """Take what the step has computed, behind its commit and before the next one."""


class StepTimes:
    """How long steps take: plain ones of n sequences, and what a drafted token adds to them."""

    def __init__(self) -> None:
        self._plain: dict[int, deque[float]] = {}
        self._verify: dict[int, deque[tuple[int, float]]] = {}
        self._since_plain: Counter[int] = Counter()
        self._before = 0  # sequences of the step before, if that was a plain one

    def other(self) -> None:
        """A step whose time says nothing: with prompt tokens, or with a draft model's own."""
        self._before = 0

    def add(self, sequences: int, drafted: int, seconds: float) -> None:
        """Record a step without prompt tokens. A plain one counts behind its like: others leave the caches cold."""
        before, self._before = self._before, 0 if drafted else sequences
        if drafted:
            self._verify.setdefault(sequences, deque(maxlen=WINDOW)).append((drafted, seconds))
            self._since_plain[sequences] += 1
        elif before == sequences:
            self._plain.setdefault(sequences, deque(maxlen=WINDOW)).append(seconds)
            self._since_plain[sequences] = 0

    def price(self, sequences: int) -> float | None:
        """What a drafted token adds, as a share of the plain step. None: plain steps must be measured first."""
        plain = self._plain.get(sequences)
        if not plain or (since := self._since_plain[sequences]) >= REFRESH:
            return None
        from statistics import median  # here: a process that does not speculate starts without it

        base, verify = median(plain), self._verify.get(sequences)
        if not verify or base <= 0.0:
            return GUESSED_PRICE
        price = max(0.0, median([(seconds - base) / drafted for drafted, seconds in verify]) / base)
        return None if price >= COSTLY and (len(plain) < SURE or since >= SOON) else price

    def doubt(self, sequences: int) -> None:
        """Forget the price, which may come from a busy moment: the next draft is measured afresh."""
        self._verify.pop(sequences, None)


@dataclass(slots=True, eq=False)
class SequenceRecord:
    """What is known of one sequence: decayed counts of tokens verified, and whether it drafts now."""

    hits: float = HITS
    tries: float = TRIES
    drafts: bool = True
    skips: int = 0  # drafts held back since it last drafted
    retry: int = RETRY
    streak: int = 0  # verified drafts since it last held back
    guess: list[int] = field(default_factory=list)

    @property
    def chance(self) -> float:
        """That a drafted token is right when those before it are."""
        return self.hits / self.tries

    def learn(self, fresh: list[int]) -> None:
        """Compare the guess with what came."""
        for guessed, token in zip(self.guess, fresh, strict=False):
            self.hits = self.hits * FADE + (guessed == token)
            self.tries = self.tries * FADE + 1.0
            if guessed != token:
                break


class Speculator:
    """Decides before each step which sequences draft how many tokens.

    Args:
        tokens: most tokens of a draft.
        adaptive: draft only where measured times and acceptance promise a gain; otherwise always.
    """

    def __init__(self, drafter: Drafter, tokens: int, clock: Clock, adaptive: bool = True) -> None:
        self.drafter, self.tokens, self.adaptive = drafter, tokens, adaptive
        self.drafts_held = 0  # drafts that were not verified because they would have lost
        self.seconds = 0.0  # spent on drafting
        self._clock, self._times = clock, StepTimes()
        self._drafting = 0.0  # seconds, for the step to come
        self._dear, self._dear_retry = 0, RETRY  # drafts held back because no acceptance would pay, of any sequence
        self._broken = False

    def draft(self, state: State) -> None:
        """Set the drafts of the sequences that the next step decodes; none where some prompt is still to compute."""
        started = self._clock.now()
        running = state.running
        for sequence in running:
            sequence.draft = []
            if sequence.speculation is None:
                sequence.speculation = SequenceRecord()
            sequence.speculation.guess = []
        self._drafting, self.drafter.settled = 0.0, True
        if self._broken or any(len(s.ids) - s.computed > 1 + s.again for s in running):
            return
        if state.waiting and not self.drafter.free:  # a prompt may join the step, and the drafts would be in vain
            return
        # What follows a token of an answer with a form is known when that token is.
        max_drafts = [min(self.tokens, s.end - len(s.ids) - 1) if s.matcher is None else 0 for s in running]
        able = [(s, count) for s, count in zip(running, max_drafts, strict=True) if count > 0]
        if self.drafter.free:
            self._make(able)
            able = [(s, len(s.draft)) for s, _ in able if s.draft]
            for sequence, count in self._chosen(able, len(running)):
                del sequence.draft[count:]
        else:
            self._make([(s, count) for s, count in self._chosen(able, len(running)) if count])
        self._drafting = self._clock.now() - started
        self.seconds += self._drafting

    def note(self, plan: StepPlan) -> list[NotedPart]:
        """What the drafter has to know of a step before that is committed."""
        return self.drafter.note(plan) if isinstance(self.drafter, TakesSteps) and not self._broken else []

    def take(self, parts: list[NotedPart]) -> None:
        """Give the drafter what the step has computed."""
        if isinstance(self.drafter, TakesSteps) and parts and not self._broken:
            started = self._clock.now()
            try:
                self.drafter.take(parts)
            except Exception as error:
                self._stop(error)
            self.seconds += self._clock.now() - started

    def learn(self, plan: StepPlan, drafted: list[int], fresh: list[list[int]], seconds: float) -> None:
        """Take in a step: drafted tokens and new ids of each of `plan.sampled`, and its time without drafting."""
        if plan.decode_only and self.drafter.settled and (plan.drafted or not plan.repeated):
            self._times.add(len(plan.sequences), plan.drafted, seconds + self._drafting)
        else:
            self._times.other()
        for sequence, count, tokens in zip(plan.sampled, drafted, fresh, strict=True):
            record: SequenceRecord | None = sequence.speculation
            if record is None:
                continue
            record.learn(tokens)
            if count:
                record.streak += 1
                if record.streak >= RETRY:
                    record.retry = RETRY

    def _make(self, targets: list[tuple[Sequence, int]]) -> None:
        if not targets:
            return
        try:
            self.drafter.draft([s for s, _ in targets], [count for _, count in targets])
        except Exception as error:
            self._stop(error)
        for sequence, _ in targets:
            if self._broken:
                sequence.draft = []
            sequence.speculation.guess = list(sequence.draft)

    def _stop(self, error: Exception) -> None:
        """Draft no more: no request may fail because nobody could guess its next ids."""
        log.get("engine").error("drafting failed and is off from now on", exc_info=error)
        self._broken = True

    def _chosen(self, able: list[tuple[Sequence, int]], sequences: int) -> list[tuple[Sequence, int]]:
        """How many tokens of its draft each sequence verifies.

        A step of n sequences gives n tokens and takes 1; with d drafted tokens, of which a are expected to be right,
        it gives n + a and takes 1 + d * price. Tokens are taken, the likeliest first, while the quotient grows clearly.
        """
        if not self.adaptive:
            return able
        price = self._times.price(sequences) if able else None
        if price is not None and MARGIN * price >= 1.0:
            self._hold_all(len(able), sequences)
            price = None
        if price is None:
            return [(s, 0) for s, _ in able]
        # Of tokens that are equally likely the earlier stands first: without it a later one cannot be chosen.
        likely = sorted(
            (-(s.speculation.chance**j), i, j) for i, (s, count) in enumerate(able) for j in range(1, count + 1)
        )
        chosen = [0] * len(able)
        tokens, expected = 0, float(sequences)
        for negative, i, j in likely:
            chance = -negative
            record: SequenceRecord = able[i][0].speculation
            margin = MARGIN if record.drafts else AGAIN
            if chosen[i] != j - 1 or chance <= margin * price * expected / (1.0 + tokens * price):
                continue
            chosen[i] = j
            tokens, expected = tokens + 1, expected + chance
        for (sequence, _), count in zip(able, chosen, strict=True):
            self._note(sequence.speculation, count, sequences)
        return [(s, count) for (s, _), count in zip(able, chosen, strict=True)]

    def _hold_all(self, drafts: int, sequences: int) -> None:
        """Not even drafts that are always right pay: that is no sequence's fault, and only a new price changes it."""
        self.drafts_held += drafts
        self._dear += 1
        if self._dear >= self._dear_retry:
            self._dear, self._dear_retry = 0, min(2 * self._dear_retry, LONGEST_RETRY)
            self._times.doubt(sequences)

    def _note(self, record: SequenceRecord, count: int, sequences: int) -> None:
        record.drafts = count > 0
        if count:
            record.skips = 0
            return
        self.drafts_held += 1
        record.skips, record.streak = record.skips + 1, 0
        if record.skips >= record.retry:
            record.skips, record.retry = 0, min(2 * record.retry, LONGEST_RETRY)
            record.drafts = True
            self._times.doubt(sequences)
            if not self.drafter.free:  # nothing was learnt of it meanwhile
                record.hits, record.tries = HITS, TRIES
