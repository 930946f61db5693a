"""The policy that says how many replicas a fleet should have: each rule, and what holds for all loads."""

from dataclasses import replace
from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.deploy.scaling import FleetLoad, ScalingDecision, ScalingMemory, ScalingTargets, decide, replay

TARGETS = ScalingTargets(min_replicas=1, max_replicas=20, utilisation=0.5, queue_seconds=1.0, calm_seconds=60.0)
CALM = FleetLoad(seconds=0.0, up=4, slots=10, running=18)


def decided(targets: ScalingTargets, *loads: FleetLoad) -> list[ScalingDecision]:
    return list(replay(targets, loads))


def test_a_load_step_is_met_at_once_by_what_the_open_requests_need() -> None:
    first, second = decided(TARGETS, CALM, replace(CALM, seconds=1.0, running=40, waiting=23))
    assert first.replicas == 4
    assert second.replicas == ceil(63 / 5)
    assert second.reason == "63 open requests at 50% of 10 for each replica"


def test_the_most_is_kept_to_and_told() -> None:
    (decision,) = decided(TARGETS, replace(CALM, running=1000))
    assert decision.replicas == 20
    assert decision.reason.endswith("max_replicas=20 is the most")
    (decision,) = decided(TARGETS, replace(CALM, up=30, running=140))
    assert decision.replicas == 20


def test_a_missed_target_adds_once_until_it_is_felt() -> None:
    late = replace(CALM, queue_seconds=1.2)
    loads = [
        late,  # doubled
        replace(late, seconds=1.0, starting=4),
        replace(late, seconds=2.0, up=8),  # the last moment with some that start was 1.0
        replace(late, seconds=5.9, up=8),
        replace(late, seconds=6.0, up=8),
    ]
    decisions = decided(TARGETS, *loads)
    assert [decision.replicas for decision in decisions] == [8, 8, 8, 8, 16]
    assert decisions[0].reason == "the oldest waiting request has waited for 1.2 s, more than 1"
    assert decisions[1].reason.endswith("; replicas that were added for it are not felt yet")


def test_each_target_is_looked_at_and_none_that_is_not_set() -> None:
    for name, changes in {
        "waiting": {"waiting": 9},
        "queue_seconds": {"queue_seconds": 2.1},
        "first_token_seconds": {"first_token_seconds": 2.1},
        "token_seconds": {"token_seconds": 2.1},
    }.items():
        none = ScalingTargets(max_replicas=20, queue_seconds=None, utilisation=None)
        load = FleetLoad(seconds=0.0, up=4, slots=100, running=1, **changes)  # type: ignore[arg-type]
        assert decide(none, load, ScalingMemory()).replicas == 4, name
        one = replace(none, **{name: 2.0})
        assert decide(one, load, ScalingMemory()).replicas == 8, name
        within = {key: 2.0 if key != "waiting" else 8 for key in changes}
        assert decide(one, replace(load, **within), ScalingMemory()).replicas == 4, name


def test_fewer_are_left_after_a_calm_time_alone_and_at_most_half_at_a_time() -> None:
    loads = [replace(CALM, seconds=float(second), up=8, running=0) for second in range(61)]
    decisions = decided(TARGETS, *loads)
    assert [decision.replicas for decision in decisions] == [8] * 60 + [4]
    memory = decisions[-1].memory
    after = decide(TARGETS, replace(loads[-1], seconds=61.0, up=4), memory)
    assert after.replicas == 4, "the next ones go after as long a time"
    after = decide(TARGETS, replace(loads[-1], seconds=121.0, up=4), after.memory)
    assert after.replicas == 2


def test_a_need_within_the_calm_time_keeps_replicas() -> None:
    loads = [replace(CALM, seconds=float(second), up=8, running=30 if second == 30 else 0) for second in range(100)]
    decisions = decided(TARGETS, *loads)
    assert [decision.replicas for decision in decisions[:90]] == [8] * 60 + [6] * 30
    assert decisions[59].reason == "no request is open; 8 replicas were needed within the last 60 s"


def test_to_zero_and_back() -> None:
    targets = replace(TARGETS, min_replicas=0, idle_seconds=30.0)
    busy = FleetLoad(seconds=0.0, up=1, slots=10, running=1)
    idle = [replace(busy, seconds=float(second), running=0) for second in range(1, 31)]
    decisions = decided(targets, busy, *idle)
    assert [decision.replicas for decision in decisions] == [1] * 30 + [0]
    assert decisions[-1].reason == "no request for 30 s"
    none = replace(idle[-1], seconds=31.0, up=0)
    still = decide(targets, none, decisions[-1].memory)
    assert still.replicas == 0
    assert decide(targets, replace(none, seconds=32.0, waiting=1), still.memory).replicas == 1
    assert decide(replace(targets, min_replicas=1), none, still.memory).replicas == 1
    starting = replace(none, seconds=33.0, starting=1, waiting=1, queue_seconds=1.5)
    assert decide(targets, starting, still.memory).replicas == 1, "it starts already"


LOADS = st.lists(
    st.builds(
        FleetLoad,
        seconds=st.floats(0, 5),
        up=st.integers(0, 30),
        starting=st.integers(0, 5),
        slots=st.integers(1, 64),
        running=st.integers(0, 2000),
        waiting=st.integers(0, 500),
        queue_seconds=st.floats(0, 10),
        first_token_seconds=st.none() | st.floats(0, 10),
    ),
    min_size=1,
    max_size=60,
)
ALL_TARGETS = st.builds(
    ScalingTargets,
    min_replicas=st.integers(0, 5),
    max_replicas=st.integers(5, 25),
    utilisation=st.none() | st.floats(0.05, 1),
    waiting=st.none() | st.floats(0, 5),
    queue_seconds=st.none() | st.floats(0.1, 5),
    first_token_seconds=st.none() | st.floats(0.1, 5),
    calm_seconds=st.floats(0, 30),
    settle_seconds=st.floats(0, 10),
    idle_seconds=st.floats(0, 30),
)


@given(ALL_TARGETS, LOADS)
@settings(max_examples=150, deadline=None)
def test_what_holds_for_all_loads(targets: ScalingTargets, steps: list[FleetLoad]) -> None:
    """The bounds; no request without a replica; nothing ended while a target is missed; a bounded memory."""
    now, loads = 0.0, []
    for step in steps:
        now += step.seconds
        loads.append(replace(step, seconds=now))
    decisions = decided(targets, *loads)
    for load, decision in zip(loads, decisions, strict=True):
        current, demand = load.up + load.starting, load.running + load.waiting
        assert targets.min_replicas <= decision.replicas <= targets.max_replicas
        assert decision.replicas >= 1 or not demand
        if targets.queue_seconds is not None and load.queue_seconds > targets.queue_seconds and demand:
            assert decision.replicas >= min(current, targets.max_replicas)
        if targets.utilisation is not None and demand:
            need = ceil(demand / (load.slots * targets.utilisation))
            assert decision.replicas >= min(need, targets.max_replicas)
        moments = [moment for moment, _ in decision.memory.needs]
        needs = [need for _, need in decision.memory.needs]
        assert moments == sorted(moments)
        assert needs == sorted(set(needs), reverse=True), "each need once, the later of two equal ones"
        assert decision.reason
        assert not decision.reason.endswith(".")
    assert decided(targets, *loads) == decisions, "the same loads give the same decisions"
