"""How many replicas a fleet should have: a pure function of its load, with a reason in words.

`roofline plan --fleet` asks it in a simulation, the supervisor of `roofline up` once a second, and what Ray, KEDA and
the horizontal autoscaler of Kubernetes read is its answer. It keeps no clock and reads nothing: the same loads in the
same order give the same decisions, so a recorded run can be decided again.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from roofline.common.options import Options, option

TOPIC = "Scaling"


@dataclass(frozen=True)
class ScalingTargets(Options):
    """What a fleet is held to. A target that is None is not looked at."""

    min_replicas: int = option(
        1, "The fewest replicas; 0: none where nothing came for --idle-seconds, and one starts with the next request.",
        minimum=0, unit="replicas", topic=TOPIC,
    )  # fmt: skip
    max_replicas: int = option(
        1, "The most replicas that requests may make necessary.", minimum=1, unit="replicas", topic=TOPIC
    )
    utilisation: float | None = option(
        0.7, "Share of the requests which a replica computes at a time that it should have on average.",
        minimum=0.01, maximum=1, topic=TOPIC,
    )  # fmt: skip
    waiting: float | None = option(
        None, "Waiting requests for each replica, beyond which replicas are added.",
        minimum=0, unit="requests", topic=TOPIC,
    )  # fmt: skip
    queue_seconds: float | None = option(
        1.0, "Replicas are added where the oldest waiting request has waited for longer.",
        minimum=0.001, unit="seconds", topic=TOPIC,
    )  # fmt: skip
    first_token_seconds: float | None = option(
        None, "Replicas are added where the 95th percentile of the time to the first token is above it.",
        minimum=0.001, unit="seconds", topic=TOPIC,
    )  # fmt: skip
    token_seconds: float | None = option(
        None, "Replicas are added where the 95th percentile of the time between two tokens is above it.",
        minimum=0.0001, unit="seconds", topic=TOPIC,
    )  # fmt: skip
    growth: float = option(
        1.0, "Share of the replicas that are added where a target is missed, at least one.",
        minimum=0.01, maximum=10, topic=TOPIC,
    )  # fmt: skip
    shrinkage: float = option(
        0.5, "Largest share of the replicas that are ended at a time, at least one.",
        minimum=0.01, maximum=1, topic=TOPIC,
    )  # fmt: skip
    calm_seconds: float = option(
        60.0, "Replicas are ended where fewer have been enough for so long.", minimum=0, unit="seconds", topic=TOPIC
    )
    settle_seconds: float = option(
        5.0, "After replicas were added for a missed target, none is added for one for so long: requests that waited "
        "before still end.",
        minimum=0, unit="seconds", topic=TOPIC,
    )  # fmt: skip
    idle_seconds: float = option(
        300.0, "With --min-replicas 0: the last replica is ended where no request came for so long.",
        minimum=0, unit="seconds", topic=TOPIC,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FleetLoad:
    """What a fleet does at one moment.

    Args:
        seconds: the clock, from any start.
        up: replicas that take requests. starting: those that will.
        slots: requests that one replica computes at a time.
        running, waiting: requests of all replicas; those that wait at the load balancer count too.
        queue_seconds: for how long the oldest waiting request has waited; 0: none waits.
        first_token_seconds, token_seconds: 95th percentiles of the requests that were answered since the decision
            before; None: none was.
    """

    seconds: float
    up: int
    starting: int = 0
    slots: int
    running: float = 0
    waiting: float = 0
    queue_seconds: float = 0
    first_token_seconds: float | None = None
    token_seconds: float | None = None


@dataclass(frozen=True)
class ScalingMemory:
    """What a decision needs to know of the ones before it.

    needs: (moment, replicas that were needed then), of the last `calm_seconds`, without those that a later need of as
    many makes needless: the moments rise and the needs fall. busy: the last moment with a request, or the first moment.
    grown: the last moment at which replicas that were added for a missed target still started, None: none were.
    """

    needs: tuple[tuple[float, int], ...] = ()
    busy: float | None = None
    grown: float | None = None


@dataclass(frozen=True)
class ScalingDecision:
    """How many replicas there should be, those that start included, and why, as a sentence without a full stop."""

    replicas: int
    reason: str
    memory: ScalingMemory = field(default_factory=ScalingMemory, repr=False)


def decide(targets: ScalingTargets, load: FleetLoad, memory: ScalingMemory) -> ScalingDecision:
    """Return how many replicas there should be.

    Replicas are added at once and ended late. `utilisation` asks for what the open requests need; a target that is
    missed adds `growth` of the replicas, and none is added for another missed target while those start and for
    `settle_seconds` after that, as they are not felt yet. Replicas are ended only where the largest need of the last
    `calm_seconds` was smaller (the stabilisation window of Kubernetes' horizontal autoscaler), and at most `shrinkage`
    of them go at a time.
    """
    now, current, demand = load.seconds, load.up + load.starting, load.running + load.waiting
    busy = now if demand or memory.busy is None else memory.busy
    if not demand and targets.min_replicas == 0 and (current == 0 or now - busy >= targets.idle_seconds):
        return ScalingDecision(0, f"no request for {now - busy:.0f} s", ScalingMemory(busy=busy))
    needed, reason = _needed_by_use(targets, load, current)
    missed, grown = _missed(targets, load, current), memory.grown
    if grown is not None and load.starting:
        grown = now
    if missed is not None and (grown is None or now - grown >= targets.settle_seconds) and not load.starting:
        more = current + max(1, math.floor(targets.growth * current), int(load.waiting) // load.slots)
        needed, reason, grown = max(needed, more), missed, now
    elif missed is not None:
        needed, reason = max(needed, current), f"{missed}; replicas that were added for it are not felt yet"
    needed = max(needed, targets.min_replicas, 1)
    goal, needs = needed, _later_needs(targets, memory, now, needed, current)
    if needed < current:
        goal, reason = _fewer(targets, needs[0][1], current, reason)
        if goal < current:
            needs = ((now, goal),)  # the next ones go after as long a time
    if goal > targets.max_replicas:
        goal, reason = targets.max_replicas, f"{reason}; max_replicas={targets.max_replicas} is the most"
    return ScalingDecision(goal, reason, ScalingMemory(needs, busy, grown))


def replay(targets: ScalingTargets, loads: Iterable[FleetLoad]) -> Iterator[ScalingDecision]:
    """Yield the decision of each of the loads of a run, in their order."""
    memory = ScalingMemory()
    for load in loads:
        decision = decide(targets, load, memory)
        memory = decision.memory
        yield decision


def _needed_by_use(targets: ScalingTargets, load: FleetLoad, current: int) -> tuple[int, str]:
    """Return how many replicas the open requests need, and why."""
    demand = load.running + load.waiting
    if not demand:
        return 0, "no request is open"
    if targets.utilisation is None:
        return current, "all targets are met"
    needed = math.ceil(demand / (load.slots * targets.utilisation))
    return needed, f"{demand:g} open requests at {targets.utilisation:.0%} of {load.slots} for each replica"


def _missed(targets: ScalingTargets, load: FleetLoad, current: int) -> str | None:
    """Return the first target that is missed, in words; None: all are met."""
    if targets.waiting is not None and load.waiting > targets.waiting * current:
        return f"{load.waiting:g} requests wait, more than {targets.waiting:g} for each of {current} replicas"
    limits = (
        ("the oldest waiting request has waited for", load.queue_seconds, targets.queue_seconds),
        ("95 % of the first tokens came within", load.first_token_seconds, targets.first_token_seconds),
        ("95 % of the tokens came within", load.token_seconds, targets.token_seconds),
    )
    for words, seconds, most in limits:
        if seconds is not None and most is not None and seconds > most:
            return f"{words} {seconds:.3g} s, more than {most:g}"
    return None


def _later_needs(
    targets: ScalingTargets, memory: ScalingMemory, now: float, needed: int, current: int
) -> tuple[tuple[float, int], ...]:
    """Return the needs of the last `calm_seconds` with that of now. A fleet begins with the replicas that it needs."""
    before = memory.needs or ((now, current),)
    since = now - targets.calm_seconds
    return (*((moment, need) for moment, need in before if need > needed and moment > since), (now, needed))


def _fewer(targets: ScalingTargets, largest: int, current: int, reason: str) -> tuple[int, str]:
    """Return how many of more replicas than are needed now should stay, and why. largest: need of `calm_seconds`."""
    if largest >= current:
        return current, f"{reason}; {largest} replicas were needed within the last {targets.calm_seconds:g} s"
    least = current - max(1, math.floor(targets.shrinkage * current))
    return max(largest, least), f"{largest} replicas were enough for the last {targets.calm_seconds:g} s"
