"""Measures which variants are fastest for a loaded model, inside real steps.

All groups of a regime are measured in the same forwards: each step runs every group with one of its entries and times
every op, so weights come from memory and caches are as in real work. Afterwards steps with all choices are timed
against steps with none, without clocks inside, and choices that do not win there are not used. Every step's logits
must have the bits of the default's.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from roofline.backends.cpu.executable import CpuExecutable
from roofline.backends.cpu.select import DEFAULT, REGIMES, setting_of
from roofline.backends.cpu.truth import TruthError
from roofline.backends.cpu.tuning import variants
from roofline.backends.cpu.tuning.contest import Contest, ContestOutcome, Rounds
from roofline.backends.cpu.tuning.variants import OpGroup, regime_of
from roofline.backends.paired import LEAST_PAIRS, interval, noise
from roofline.common.errors import ConfigError
from roofline.common.units import now_utc
from roofline.hardware.tuning import store
from roofline.hardware.tuning.store import TuningRecord, Tunings, TuningVerdict, VariantChoice
from roofline.ops.batch import NO_SLOT, PAGE_TOKENS, Segment, StateMove

CONTEXT = 128  # tokens before those of a decoding step
PROMPT = 256  # tokens of a prefill step
VERDICT_ROUNDS = 16
VERDICT_STEPS = 10  # of a round: see _pair
OVERHEAD = 1.2  # of filling batches, clocks and comparing bits
SAVE_EVERY = 10.0  # seconds between saves of what is unfinished
CHECKS_SHARE = 0.2  # of a budget, kept for the end-to-end comparison


@dataclass(frozen=True)
class TuningPoint:
    """A step that stands for a regime: so many sequences with so many tokens each after a context."""

    sequences: int
    tokens: int
    context: int

    def __str__(self) -> str:
        if self.tokens > 1:
            return f"prefill of {self.tokens}"
        return f"decode of {self.sequences} x 1 after {self.context}"

    @property
    def rows(self) -> int:
        return self.sequences * self.tokens


def points(executable: CpuExecutable, regime: int) -> list[TuningPoint]:
    """The steps that are timed for a regime, as far as the executable's limits allow."""
    sizes = ([(1, 1)], [(4, 1), (16, 1)], [(64, 1), (1, PROMPT)])[regime]
    limits, steps = executable.limits, []
    for most, tokens in sizes:
        sequences = min(most, limits.segments, limits.rows, limits.tokens // tokens or 1)
        room = executable.num_pages // sequences * PAGE_TOKENS
        context = 0 if tokens > 1 else min(CONTEXT, room - 1, executable.max_context - 1)
        point = TuningPoint(sequences, min(tokens, limits.tokens, room, executable.max_context), context)
        if regime_of(point.rows) == regime:
            steps.append(point)
    return steps


@dataclass(frozen=True)
class TuningProgress:
    """What `tune` reports while it works: what is done, the share of it that is done."""

    text: str
    share: float


@dataclass(frozen=True)
class TuningPlan:
    """What is to be measured. seconds: the estimate, 0 where nothing is left; settled: choices that the store has."""

    contests: Mapping[int, list[Contest]]
    rounds: Rounds
    seconds: float
    settled: int


class Tuner:
    """Tunes one executable and keeps the results in a store.

    Args:
        model: its name, for people.
        tunings: the machine's store; changed and saved as results come in.
        budget: seconds that may be spent; None: what the full number of rounds takes.
        again: measure also what the store knows already.
        defaults: variant to beat, by kind of op, where it is not the core's own.

    Raises ConfigError where `defaults` names a variant that ops of its kind do not have.
    """

    def __init__(
        self,
        executable: CpuExecutable,
        model: str,
        tunings: Tunings,
        *,
        budget: float | None = None,
        again: bool = False,
        defaults: Mapping[str, str] | None = None,
    ) -> None:
        self.executable, self.model, self.tunings = executable, model, tunings
        self.budget, self.again, self.defaults = budget, again, dict(defaults or {})
        self.setting = setting_of(executable.isa, executable.threads)
        self.groups = variants.groups(executable.program)
        self.points = {regime: points(executable, regime) for regime in range(len(REGIMES))}
        self._now: dict[tuple[int, int], str] = {}  # (first op of a group, regime): what the core has
        self._logits: dict[TuningPoint, np.ndarray] = {}
        for regime in self.points:
            for group in self.groups:
                self._choose(group, regime, self._default(group))

    def plan(self) -> TuningPlan:
        """What is left to measure and how long that takes, from one step at each point."""
        step_seconds, contests, settled = {}, {}, 0
        for regime, steps in self.points.items():
            present = [group for group in self.groups if self._present(group, regime)]
            contests[regime] = [group for group in present if self.again or not self._settled(group, regime)]
            settled += len(present) - len(contests[regime])
            step_seconds[regime] = OVERHEAD * sum(self._seconds(point) for point in steps)
        open_regimes = [regime for regime in self.points if self._needs_verdict(regime, bool(contests[regime]))]
        checks = sum(VERDICT_STEPS * VERDICT_ROUNDS * step_seconds[regime] for regime in open_regimes)

        candidate_counts = {r: max((len(self._candidates(g, r)) for g in gs), default=0) for r, gs in contests.items()}

        def seconds(rounds: Rounds) -> float:
            return sum(rounds.slots(candidate_counts[r]) * step_seconds[r] for r in contests) + checks

        rounds = Rounds()
        full = seconds(rounds)
        if self.budget is not None and full > self.budget:
            rounds = rounds.scaled(self.budget / full)
        planned = {r: [self._contest(g, r, rounds) for g in gs] for r, gs in contests.items()}
        estimate = seconds(rounds)
        return TuningPlan(planned, rounds, estimate if self.budget is None else min(estimate, self.budget), settled)

    def run(self, plan: TuningPlan, stop: Callable[[], bool] = lambda: False) -> Iterator[TuningProgress]:
        """Measure, store and compare; yields after each slot. `stop` is asked between steps.

        Ends early when `stop` says so or the budget is spent; what was measured is stored, and the next run goes on.
        """
        started = saved = time.monotonic()
        limit = None if self.budget is None else started + self.budget * (1 - CHECKS_SHARE)
        unfinished = [[c for c in contests if not c.outcome] for contests in plan.contests.values()]
        slots = sum(max((plan.rounds.slots(len(c.candidates)) for c in cs), default=0) for cs in unfinished) or 1
        done = 0
        for regime, contests in plan.contests.items():
            self._take_references(regime)
            while any(c.outcome is None for c in contests):
                if stop() or (limit is not None and time.monotonic() > limit):
                    self._save_unfinished(regime, contests)
                    break
                self._slot(regime, contests)
                done += 1
                decided = sum(c.outcome is not None for c in contests)
                text = f"{REGIMES[regime]}: {decided} of {len(contests)} shapes decided"
                yield TuningProgress(text, min(0.99, done / slots))
                if time.monotonic() - saved > SAVE_EVERY:
                    self._save_unfinished(regime, contests)
                    saved = time.monotonic()
            self._store_outcomes(regime, contests)
        for regime in self.points:
            if stop():
                break
            if self._needs_verdict(regime, bool(plan.contests[regime])):
                yield TuningProgress(f"{REGIMES[regime]}: the whole model with and without", 0.99)
                self._compare(regime, started, stop)
        self.reset()

    def reset(self) -> None:
        """The core's own variants everywhere."""
        for regime in self.points:
            for group in self.groups:
                self._choose(group, regime, DEFAULT)

    # ---- one step ----

    def _seconds(self, point: TuningPoint) -> float:
        self._fill(point)
        return min(self._forward(point) for _ in range(4))

    def _take_references(self, regime: int) -> None:
        """Logits with the defaults, which no variant may change. Points share pages: after one turn round them all
        every page holds what it will hold at each later turn."""
        self._logits.clear()
        for turn in range(2):
            for point in self.points[regime]:
                self._fill(point)
                self.executable.forward()
                if turn:
                    self._logits[point] = self.executable.logits().view(np.int32).copy()

    def _fill(self, point: TuningPoint) -> None:
        pages = -(-(point.context + point.tokens) // PAGE_TOKENS)
        ids = np.random.default_rng(7).integers(0, self.executable.vocab_size, point.rows).tolist()
        segments = [
            Segment(
                ids[i * point.tokens : (i + 1) * point.tokens],
                point.context,
                range(i * pages, (i + 1) * pages),
                state=StateMove(source=i if point.context else NO_SLOT),  # nothing is written, so each run has its bits
            )
            for i in range(point.sequences)
        ]
        self.executable.batch.fill(segments, [(i + 1) * point.tokens - 1 for i in range(point.sequences)])

    def _forward(self, point: TuningPoint) -> float:
        start = time.perf_counter()
        self.executable.forward()
        seconds = time.perf_counter() - start
        expected = self._logits.get(point)
        if expected is not None and not np.array_equal(self.executable.logits().view(np.int32), expected):
            raise TruthError(
                f"variants gave other bits in a {point}: {self._now}. Delete the tuning store, and report this."
            )
        return seconds

    def _choose(self, group: OpGroup, regime: int, variant: str) -> None:
        if self._now.get((group.ops[0], regime)) == variant:
            return
        try:
            self.executable.choose(group.ops, regime, variant)
        except ValueError as error:
            raise ConfigError(f"{group.kind} ops have no variant {variant!r}: {error}") from error
        self._now[group.ops[0], regime] = variant

    def _slot(self, regime: int, contests: Sequence[Contest]) -> None:
        """Every contest's next entry, at all points of the regime."""
        for contest in contests:
            self._choose(contest.group, regime, contest.entry())
        spent: list[list[float]] = [[] for _ in contests]
        for point in self.points[regime]:
            self._fill(point)
            self.executable.clocks(True)
            self._forward(point)
            self.executable.clocks(False)
            seconds = self.executable.op_seconds()
            for row, contest in zip(spent, contests, strict=True):
                ops = self._ops(contest.group, regime, point)
                if ops:
                    row.append(sum(seconds[op] for op in ops))
        for row, contest in zip(spent, contests, strict=True):
            contest.tell(row)

    def _ops(self, group: OpGroup, regime: int, point: TuningPoint) -> list[int]:
        """The group's ops whose rows are in the regime; of row ops also the next, which reads what they made."""
        rows = {False: point.rows, True: point.sequences}
        ops = [op for op, leads in zip(group.ops, group.over_rows, strict=True) if regime_of(rows[leads]) == regime]
        return [o for op in ops for o in (op, op + 1)] if group.kind == "rows" else ops

    # ---- what to measure ----

    def _default(self, group: OpGroup) -> str:
        return self.defaults.get(group.kind, DEFAULT)

    def _candidates(self, group: OpGroup, regime: int) -> list[str]:
        names = variants.candidates(group, regime, self.executable.isa, self.executable.threads)
        return [name for name in (DEFAULT, *names) if name != self._default(group)]

    def _present(self, group: OpGroup, regime: int) -> bool:
        """Whether the regime's steps run the group, and there is something to choose."""
        steps = self.points[regime]
        return bool(self._candidates(group, regime)) and any(self._ops(group, regime, point) for point in steps)

    def _settled(self, group: OpGroup, regime: int) -> bool:
        """Whether the store knows the choice: a default kept on a busy machine is measured again."""
        record = self._record(group, regime)
        return record is not None and (record.variant != record.default or not record.figures.get("busy"))

    def _record(self, group: OpGroup, regime: int) -> TuningRecord | None:
        record = self.tunings.records.get((group.kind, group.shape, REGIMES[regime], self.setting.run))
        usable = record is not None and record.setting == self.setting and record.default == self._default(group)
        return record if usable else None

    def _contest(self, group: OpGroup, regime: int, rounds: Rounds) -> Contest:
        contest = Contest(group, self._default(group), self._candidates(group, regime), rounds, seed=group.ops[0])
        state = self.tunings.unfinished.get(self._key(group, regime))
        if state is not None and not self.again:
            contest.resume(state)
        return contest

    def _key(self, group: OpGroup, regime: int) -> str:
        return " | ".join((group.kind, group.shape, REGIMES[regime], *vars(self.setting).values()))

    # ---- results ----

    def _save_unfinished(self, regime: int, contests: Sequence[Contest]) -> None:
        for contest in contests:
            if contest.outcome is None:
                self.tunings.unfinished[self._key(contest.group, regime)] = contest.state()
        store.save_where_possible(self.tunings)

    def _store_outcomes(self, regime: int, contests: Sequence[Contest]) -> None:
        for contest in contests:
            self._choose(contest.group, regime, contest.default)
            if contest.outcome is not None:
                record = self._as_record(contest, regime, contest.outcome)
                self.tunings.records[record.key] = record
                self.tunings.unfinished[self._key(contest.group, regime)] = None
        if contests:
            store.save_where_possible(self.tunings)

    def _as_record(self, contest: Contest, regime: int, outcome: ContestOutcome) -> TuningRecord:
        group = contest.group
        where = {"points": [str(p) for p in self.points[regime] if self._ops(group, regime, p)], "ops": len(group.ops)}
        return TuningRecord(
            kind=group.kind,
            shape=group.shape,
            regime=REGIMES[regime],
            setting=self.setting,
            variant=outcome.variant,
            default=contest.default,
            reason=outcome.reason,
            figures=dict(outcome.figures) | where,
            measured=now_utc(),
        )

    def _verdict(self, regime: int) -> TuningVerdict | None:
        verdict = self.tunings.verdicts.get((self.executable.program_hash, REGIMES[regime], self.setting.run))
        return verdict if verdict is not None and verdict.setting == self.setting else None

    def _needs_verdict(self, regime: int, measured: bool) -> bool:
        """Where something new was measured, or never compared."""
        return bool(self.points[regime]) and (measured or self._verdict(regime) is None)

    def _compare(self, regime: int, started: float, stop: Callable[[], bool]) -> None:
        """Steps with all choices against steps with none, in turns, and the verdict stored."""
        chosen = {g: r.variant for g in self.groups if (r := self._record(g, regime)) is not None}
        if any(self._record(g, regime) is None for g in self.groups if self._present(g, regime)):
            return  # unfinished: a later run compares
        changed = {group: variant for group, variant in chosen.items() if variant != self._default(group)}
        choices = tuple(VariantChoice(group.ops, variant) for group, variant in changed.items())
        if not changed:
            self._store_verdict(regime, (), False, "every default was kept", {})
            return
        self._take_references(regime)
        logs: dict[TuningPoint, list[float]] = {point: [] for point in self.points[regime]}
        same: list[float] = []
        for number in range(VERDICT_ROUNDS):
            late = self.budget is not None and time.monotonic() - started > self.budget
            if stop() or (late and number >= LEAST_PAIRS):
                break
            own = []
            for point in self.points[regime]:
                first, tuned, second = self._pair(regime, point, changed)
                logs[point].append(tuned - (first + second) / 2)
                own.append(second - first)
            same.append(sum(own) / len(own))
        if len(same) < LEAST_PAIRS:
            return
        mean = [sum(values) / len(values) for values in zip(*logs.values(), strict=True)]
        gain, spread = interval(mean), noise(same)
        slower = [str(point) for point, values in logs.items() if interval(values).low > 1]
        wins = gain.high < 1 and gain.ratio < 1 - spread and not slower
        figures: dict[str, object] = {"ratio": gain.ratio, "low": gain.low, "high": gain.high, "noise": spread}
        figures |= {"rounds": len(same), "points": {str(p): interval(v).ratio for p, v in logs.items()}}
        reason = f"steps are faster by {1 - gain.ratio:.1%}" if wins else "steps did not become faster beyond the noise"
        reason = f"slower in a {slower[0]}" if slower else reason
        self._store_verdict(regime, choices, wins, reason, figures)

    def _pair(self, regime: int, point: TuningPoint, changed: Mapping[OpGroup, str]) -> tuple[float, float, float]:
        """Logarithms of seconds of a step with defaults, with the choices, and with defaults again.

        Each is the best of three, once at every place of the turn: a lost time slice or a cold start hits them alike.
        """
        self._fill(point)
        self._forward(point)
        runs: dict[str, list[float]] = {"first": [], "tuned": [], "second": []}
        for turn in range(3):
            for what in (*list(runs)[turn:], *list(runs)[:turn]):
                for group, variant in changed.items():
                    self._choose(group, regime, variant if what == "tuned" else self._default(group))
                runs[what].append(self._forward(point))
        first, tuned, second = (float(np.log(min(seconds))) for seconds in runs.values())
        return first, tuned, second

    def _store_verdict(
        self, regime: int, choices: tuple[VariantChoice, ...], wins: bool, reason: str, figures: Mapping[str, object]
    ) -> None:
        verdict = TuningVerdict(
            program=self.executable.program_hash,
            model=self.model,
            regime=REGIMES[regime],
            setting=self.setting,
            choices=choices,
            kept=wins,
            reason=reason,
            figures=figures,
            measured=now_utc(),
        )
        self.tunings.verdicts[verdict.key] = verdict
        store.save_where_possible(self.tunings)
