"""What the engine counts: cumulative figures, so that two readings give the figures of the time between."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roofline.backends.base import StepCost
    from roofline.engine.schedule.plan import State, StepPlan
    from roofline.engine.speculation.speculator import Speculator

COMPARED_SECONDS = 0.2  # of steps whose time together is compared with the roofs
STEP_EDGES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # of `step_sizes`, in tokens; vLLM's


@dataclass(slots=True)
class EngineStats:
    """A reading. Times in seconds of the executable's clock, counts in tokens, all since the engine started.

    A step that computes any prompt token is a prefill step: `prefill_seconds` is the time of those, and
    `prefill_tokens` the prompt tokens in them; `decode_seconds` and `decode_tokens` are those of the other steps.
    `mixed_tokens` are ids sampled in prefill steps, so generated = decode + mixed.
    `python_seconds` is the host's work on all steps outside the backend's calls, of which `decode_python_seconds` went
    into decode steps; where a device computes meanwhile, it is not a part of the steps' time. Speculation: `drafts`
    were verified, of `draft_tokens` tokens together, and `accepted_tokens` of those were what was sampled;
    `draft_seconds`, a part of `python_seconds`, went into making them; `drafts_held` were left aside because they would
    have lost time. `correction`: the factor by which the roofs are too low, as far as steps have shown; 1: none has.
    `step_sizes`: how many steps computed at most as many tokens as each of STEP_EDGES, and more than the edge before;
    the last counts those beyond all edges. Of models with recurrent state: `state_slots`, each of `state_slot_bytes`,
    of which sequences use some; `snapshot_hits`, answers that began with a snapshot found in one, and
    `snapshot_lost`, prompt tokens whose pages were found in vain, because no snapshot was. Of models with experts, if
    the backend counts them: `expert_rows`, how many rows went to each, all layers together; and `experts_read` distinct
    ones, added up over `expert_layers` layers of steps.
    """

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    page_bytes: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    mixed_tokens: int = 0
    python_seconds: float = 0.0
    decode_python_seconds: float = 0.0
    priced_seconds: float = 0.0
    limit_seconds: float = 0.0
    correction: float = 1.0
    flops: float = 0.0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    state_slots: int = 0
    state_slots_used: int = 0
    state_slot_bytes: int = 0
    snapshot_hits: int = 0
    snapshot_lost: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    draft_seconds: float = 0.0
    drafts_held: int = 0
    requests: int = 0
    step_tokens: int = 0
    step_sizes: list[int] = field(default_factory=lambda: [0] * (len(STEP_EDGES) + 1))
    finished: dict[str, int] = field(default_factory=dict)
    expert_rows: list[int] = field(default_factory=list)
    experts_read: int = 0
    expert_layers: int = 0

    @property
    def experts_per_layer(self) -> float | None:
        """Distinct experts that a layer reads in a step, on average; None before the first, and without experts."""
        return self.experts_read / self.expert_layers if self.expert_layers else None

    @property
    def generated_tokens(self) -> int:
        """All ids sampled."""
        return self.decode_tokens + self.mixed_tokens

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens computed per second of prefill steps; 0 before the first."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Ids per second of decode steps, over all running sequences; 0 before the first."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def speeds(self) -> str:
        """'prefill: 2000.0 tok/s, decode: 180.0 tok/s'."""
        return f"prefill: {self.prefill_tokens_per_second:.1f} tok/s, decode: {self.decode_tokens_per_second:.1f} tok/s"

    @property
    def share_of_roof(self) -> float | None:
        """Time at the roofs / measured time, over the steps with a price; None when no roofs are known. Roofs that
        steps have shown to be too low are raised to what these reached."""
        if not self.priced_seconds:
            return None
        return min(1.0, self.limit_seconds / self.priced_seconds / self.correction)

    @property
    def acceptance(self) -> float | None:
        """Accepted / drafted tokens; None before the first draft."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    def since(self, earlier: "EngineStats") -> "EngineStats":
        """The figures of the time between two readings; gauges and per-reason counts as they are now."""
        gauges = {"running", "waiting", "pages_used", "pages_total", "page_bytes", "finished", "correction"}
        gauges |= {"state_slots", "state_slots_used", "state_slot_bytes"}
        numbers = [f.name for f in fields(self) if f.name not in gauges | {"step_sizes", "expert_rows"}]
        sizes = [now - then for now, then in zip(self.step_sizes, earlier.step_sizes, strict=True)]
        changes = {name: getattr(self, name) - getattr(earlier, name) for name in numbers}
        rows = [now - then for now, then in zip_longest(self.expert_rows, earlier.expert_rows, fillvalue=0)]
        return replace(self, **changes, step_sizes=sizes, expert_rows=rows)


def total(readings: Iterable[EngineStats]) -> EngineStats:
    """The figures of several engines together. Their seconds add up too: speeds are those of an average engine."""
    result = EngineStats()
    for reading in readings:
        for f in fields(EngineStats):
            if f.name not in ("finished", "page_bytes", "state_slot_bytes", "correction", "step_sizes", "expert_rows"):
                setattr(result, f.name, getattr(result, f.name) + getattr(reading, f.name))
        for reason, count in reading.finished.items():
            result.finished[reason] = result.finished.get(reason, 0) + count
        result.step_sizes = [a + b for a, b in zip(result.step_sizes, reading.step_sizes, strict=True)]
        pairs = zip_longest(result.expert_rows, reading.expert_rows, fillvalue=0)
        result.expert_rows = [a + b for a, b in pairs]
        result.correction = max(result.correction, reading.correction)
        result.page_bytes = max(result.page_bytes, reading.page_bytes)  # of one model, so of one size
        result.state_slot_bytes = max(result.state_slot_bytes, reading.state_slot_bytes)
    return result


class StatsMeter:
    """Adds steps up to an EngineStats."""

    def __init__(self, pages_total: int, page_bytes: int, state_slots: int = 0, state_slot_bytes: int = 0) -> None:
        self.totals = EngineStats(
            pages_total=pages_total, page_bytes=page_bytes, state_slots=state_slots, state_slot_bytes=state_slot_bytes
        )
        self._limit = self._priced = 0.0  # seconds of the steps that are compared with the roofs together

    def step(
        self,
        plan: "StepPlan",
        drafted: list[int],
        generated: list[int],
        seconds: float,
        host_seconds: float,
        cost: "StepCost | None",
    ) -> None:
        """Count a committed step: how many tokens were drafted for and given to each of `plan.sampled`, its whole time,
        the part outside the backend, its price."""
        totals, new = self.totals, sum(generated)
        if plan.drafted:
            for guesses, ids in zip(drafted, generated, strict=True):
                if guesses:
                    totals.drafts += 1
                    totals.draft_tokens += guesses
                    totals.accepted_tokens += min(guesses, max(0, ids - 1))
        totals.steps += 1
        totals.step_tokens += plan.tokens
        totals.step_sizes[bisect_left(STEP_EDGES, plan.tokens)] += 1
        totals.python_seconds += host_seconds
        if plan.decode_only:
            totals.decode_tokens += new
            totals.decode_seconds += seconds
            totals.decode_python_seconds += host_seconds
        else:
            totals.prefill_tokens += plan.tokens - plan.decodes - plan.repeated  # nothing is drafted beside a prompt
            totals.prefill_seconds += seconds
            totals.mixed_tokens += new
        if cost is not None:
            totals.flops += cost.flops
            totals.weight_bytes += cost.weight_bytes
            totals.kv_bytes += cost.kv_bytes
            if cost.limit_seconds is not None:
                totals.limit_seconds += cost.limit_seconds
                totals.priced_seconds += seconds
                self._compare(cost.limit_seconds, seconds)

    def _compare(self, limit: float, seconds: float) -> None:
        """Whether steps were faster than the roofs allow: of a single one the time is too uncertain to tell."""
        self._limit += limit
        self._priced += seconds
        if self._priced >= COMPARED_SECONDS:
            self.totals.correction = max(self.totals.correction, self._limit / self._priced)
            self._limit = self._priced = 0.0

    def ended(self, reason: str) -> None:
        """Count an answer that ended."""
        self.totals.finished[reason] = self.totals.finished.get(reason, 0) + 1

    def reading(self, state: "State", speculator: "Speculator | None" = None) -> EngineStats:
        """A copy of the totals with the gauges of now."""
        return replace(
            self.totals,
            running=len(state.running),
            waiting=len(state.waiting),
            pages_used=state.cache.used,
            prefix_queries=state.prefix_queries,
            prefix_hits=state.prefix_hits,
            preemptions=state.preemptions,
            state_slots_used=state.slots.used if state.slots is not None else 0,
            snapshot_hits=state.snapshot_hits,
            snapshot_lost=state.snapshot_lost,
            draft_seconds=speculator.seconds if speculator else 0.0,
            drafts_held=speculator.drafts_held if speculator else 0,
            step_sizes=list(self.totals.step_sizes),
            finished=dict(self.totals.finished),
        )
