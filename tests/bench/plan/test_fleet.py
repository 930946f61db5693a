"""Fleets: their parts against naive ones, the model of a replica against replicas that run the real scheduler."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from roofline.bench.plan.fleet.answers import Answers
from roofline.bench.plan.fleet.caches import Caches
from roofline.bench.plan.fleet.figures import FleetFigures, Times
from roofline.bench.plan.fleet.fleet import is_exact, plan_fleet
from roofline.bench.plan.fleet.lengths import Requests
from roofline.bench.plan.fleet.prompts import Prompts
from roofline.bench.plan.fleet.replicas import DRAINING, FAILED, OFF, STARTING, UP, Replicas, WaitingState
from roofline.bench.plan.fleet.routing import Router
from roofline.bench.plan.fleet.service import Service
from roofline.bench.plan.fleet.simulate import Simulation
from roofline.bench.plan.fleet.spec import (
    FailureSpec,
    FleetSpec,
    ModelSpec,
    PolicySpec,
    ReplicaSpec,
    Routing,
    Spread,
    TrafficSpec,
    read_spec,
)
from roofline.bench.plan.fleet.waiting import Waiting
from roofline.bench.results.store import read_points
from roofline.common.errors import ConfigError
from tests.command_line import call_roofline

MODEL = ModelSpec(name="llama-3-8b", chip="H100 SXM", max_running=128, reads=0.65)
SERVICE = Service(
    running=np.array([1.0, 64.0]), decode_seconds=np.array([0.01, 0.02]), tokens=np.array([0.0, 4000.0]),
    seconds=np.array([0.005, 0.085]), most_running=64, step_tokens=2048, cache_tokens=500_000,
)  # fmt: skip


def fleet(rate: float, seconds: float, replicas: int = 8, answer: float = 40, **others: object) -> FleetSpec:
    traffic = TrafficSpec(
        seconds=seconds,
        rate=rate,
        prompt=Spread(mean=300, sigma=0.5, most=1500),
        answer=Spread(mean=answer, sigma=0.5, most=200),
    )
    values = {"name": "test", "model": MODEL, "traffic": traffic, "replicas": ReplicaSpec(start=replicas), **others}
    return FleetSpec(**values)  # type: ignore[arg-type]


def naive_least_loaded(load: list[int], count: int) -> list[int]:
    for _ in range(count):
        load[load.index(min(load))] += 1
    return sorted(load)


@pytest.mark.parametrize("count", [0, 1, 7, 20, 61])
def test_the_least_loaded_are_filled_up(count: int) -> None:
    load = np.random.default_rng(3).integers(0, 9, 20)
    up = np.flatnonzero(np.arange(20) % 3)
    chosen = Router("least-loaded", 0).assign(up, load, np.zeros(count, np.int32))
    assert set(chosen) <= set(up)
    after = load[up] + np.bincount(chosen, minlength=20)[up]
    assert sorted(after) == naive_least_loaded(load[up].tolist(), count)


def test_round_robin_goes_on_where_it_stopped() -> None:
    router, up, load = Router("round-robin", 0), np.array([2, 5, 7]), np.zeros(8, np.int64)
    chosen = [router.assign(up, load, np.zeros(n, np.int32)).tolist() for n in (2, 5)]
    assert chosen == [[2, 5], [7, 2, 5, 7, 2]]


@pytest.mark.parametrize("policy", ["power-of-two", "prefix"])
def test_others_spread_the_load_and_see_only_replicas_that_are_up(policy: Routing) -> None:
    up, load = np.arange(0, 100, 2), np.zeros(100, np.int64)
    prefixes = np.random.default_rng(0).integers(0, 400, 2000).astype(np.int32)
    chosen = np.bincount(Router(policy, 0).assign(up, load, prefixes), minlength=100)
    assert not chosen[1::2].any()
    assert chosen[::2].max() < 2 * 40


def test_a_prefix_stays_at_home_until_that_is_full() -> None:
    up, load = np.arange(50), np.zeros(50, np.int64)
    alike = np.full(2, 17, np.int32)
    homes = set(Router("prefix", 0).assign(up, load, alike)) | set(Router("prefix", 9).assign(up, load, alike))
    assert len(homes) <= 2
    popular = np.bincount(Router("prefix", 0).assign(up, load, np.full(12, 17, np.int32)), minlength=50)
    assert popular.max() <= 3  # no more than the bound, however many come at once
    load[list(homes)] = 1000
    assert not homes & set(Router("prefix", 0).assign(up, load, alike))


def test_times_have_percentiles_to_one_per_cent() -> None:
    values, times = np.random.default_rng(0).lognormal(-3, 1, 10_000), Times()
    times.add(values[:4000])
    times.add(values[4000:], np.ones(6000))
    assert (times.count, times.mean) == (10_000, pytest.approx(values.mean()))
    for percent in (1, 50, 95, 99):
        assert times.percentile(percent) == pytest.approx(np.percentile(values, percent), rel=0.015)
    assert Times().percentile(50) == Times().mean == 0


def test_answers_end_when_their_replica_has_made_enough_progress() -> None:
    rng, answers = np.random.default_rng(0), Answers(3, 64)
    rows, lengths = rng.integers(0, 3, 50), rng.integers(4, 64, 50).astype(float)
    answers.add(rows, lengths, np.full(50, -1.0), lengths)
    for at in range(40):
        made = np.array([1.0, 2.5, 0.0])
        for count, started, tokens, end in answers.advance(made, float(at), 1.0):
            assert (started == -count).all()
            assert ((end >= at - 1) & (end <= at + 1)).all()
            assert (tokens > 0).all()
        for row, progress in enumerate(made * (at + 1)):  # to a bucket, which is a token
            least, most = ((lengths[rows == row] > progress + slack).sum() for slack in (1, -1))
            assert least <= answers.running[row] <= most
    assert (answers.running[1], answers.running[2]) == (0, (rows == 2).sum())
    assert answers.drop(np.array([2])) == (rows == 2).sum()
    assert answers.running.sum() == answers.running[0]


def test_prompts_share_the_step_after_the_one_under_way() -> None:
    prompts = Prompts(SERVICE, 2)
    replica, tokens = np.array([0, 0, 0, 1, 0]), np.array([1000, 100, 200, 500, 300])
    moments = np.array([0.000, 0.010, 0.020, 0.020, 0.100])
    computed = prompts.compute(Waiting(replica, tokens, tokens, moments), np.zeros(2), 0.0, 0.5)

    def step(size: int) -> float:
        return float(SERVICE.prompt_step(np.zeros(1), np.array([size]))[0])

    alone, together = step(1000), step(300)  # 25 ms, then the two that came meanwhile
    expected = [alone, alone + together, alone + together, 0.02 + step(500), 0.1 + step(300)]
    # Of requests that share a step the moments are those of its end.
    assert computed.first == pytest.approx(expected)
    assert computed.steps.tolist() == [3, 1]
    assert computed.seconds == pytest.approx([alone + together + step(300), step(500)])


def test_prompts_beyond_a_slice_and_beyond_a_step() -> None:
    prompts = Prompts(SERVICE, 1)
    one, tokens = np.zeros(3, np.int64), np.full(3, 1500)
    requests = Waiting(one, tokens, tokens, np.array([0.0, 0.001, 0.002]))
    computed = prompts.compute(requests, np.zeros(1), 0.0, 0.05)
    # Two of 1,500 are more than a step of 2,048: each has its own, of 35 ms.
    assert computed.first == pytest.approx([0.035, 0.07, 0.105])
    assert computed.seconds == pytest.approx([0.05])
    later = prompts.compute(Waiting.none(), np.zeros(1), 0.05, 0.05)
    assert later.seconds == pytest.approx([0.05])
    rest = prompts.compute(Waiting.none(), np.zeros(1), 0.1, 0.05)
    assert rest.seconds == pytest.approx([0.005])
    assert computed.steps + later.steps + rest.steps == pytest.approx([3])


def test_places_count_those_before() -> None:
    replica = np.array([4, 1, 4, 4, 1, 0])
    assert Waiting(replica, replica, replica, replica * 1.0).places().tolist() == [0, 0, 1, 2, 1, 0]
    assert len(Waiting.none().places()) == 0


def test_scaling_keeps_to_its_bounds_and_takes_its_time() -> None:
    spec = fleet(1, 60, replicas=10, policies=PolicySpec(utilisation=0.5, interval=10.0))
    spec = FleetSpec(**{name: getattr(spec, name) for name in spec.__struct_fields__} | {
        "replicas": ReplicaSpec(start=10, least=4, most=20, start_seconds=25.0)
    })  # fmt: skip
    replicas = Replicas(spec, "utilisation", most_running=10)
    load = np.full(20, 0)
    load[:10] = 9
    replicas.advance(10.0, 1.0, load, WaitingState())  # 90 requests at 5 a replica: 18
    assert (replicas.state == STARTING).sum() == 8
    assert len(replicas.up) == 10
    replicas.advance(34.0, 1.0, load, WaitingState())
    assert len(replicas.up) == 10
    replicas.advance(35.0, 1.0, load, WaitingState())
    assert len(replicas.up) == 18
    load[:] = 0
    load[0] = 1
    replicas.advance(60.0, 1.0, load, WaitingState())  # one request: the least
    assert len(replicas.up) == 4
    assert 0 in replicas.up or replicas.state[0] == DRAINING
    replicas.advance(61.0, 1.0, load, WaitingState())
    assert (replicas.state == OFF).sum() >= 15


def test_scaling_by_the_queue_adds_while_requests_wait() -> None:
    spec = fleet(1, 60, replicas=10, policies=PolicySpec(queue=0.5, interval=10.0))
    spec = FleetSpec(**{name: getattr(spec, name) for name in spec.__struct_fields__} | {
        "replicas": ReplicaSpec(start=10, least=2, most=20, start_seconds=0.0)
    })  # fmt: skip
    replicas, busy = Replicas(spec, "queue", most_running=10), np.full(20, 3)
    replicas.advance(10.0, 1.0, busy, WaitingState(4))
    assert (replicas.state == STARTING).sum() == 0
    replicas.advance(20.0, 1.0, busy, WaitingState(6))
    assert (replicas.state == STARTING).sum() == 1
    replicas.advance(30.0, 1.0, busy, WaitingState(60))
    assert (replicas.state == STARTING).sum() == 6
    fixed = Replicas(spec, "fixed", most_running=10)
    fixed.advance(30.0, 1.0, busy, WaitingState(1000))
    assert (fixed.state == UP).sum() == 10


def test_scaling_by_latency_sees_what_waits_and_when_first_tokens_came() -> None:
    policies = PolicySpec(utilisation=1.0, queue_seconds=2.0, first_token_seconds=3.0, calm_seconds=20.0, interval=10.0)
    spec = fleet(1, 60, replicas=2, policies=policies)
    spec = FleetSpec(**{name: getattr(spec, name) for name in spec.__struct_fields__} | {
        "replicas": ReplicaSpec(start=2, most=20, start_seconds=0.0)
    })  # fmt: skip
    replicas, load = Replicas(spec, "latency", most_running=10), np.full(20, 0)
    load[0] = 3
    replicas.advance(10.0, 1.0, load, WaitingState(3, 1.9, lambda: 2.9))
    assert (replicas.state == STARTING).sum() == 0
    replicas.advance(20.0, 1.0, load, WaitingState(3, 2.1, lambda: None))
    assert (replicas.state == STARTING).sum() == 2
    replicas.advance(30.0, 1.0, load, WaitingState(3, 0.0, lambda: 3.1))
    assert (replicas.state == STARTING).sum() == 4
    replicas.advance(40.0, 1.0, load, WaitingState())
    assert (replicas.state == UP).sum() == 8
    replicas.advance(60.0, 1.0, load, WaitingState())
    assert (replicas.state == UP).sum() == 4


def test_a_fleet_that_is_scaled_by_latency_keeps_its_first_tokens() -> None:
    """Two replicas cannot keep up with what comes: what waits is what adds others."""
    policies = PolicySpec(utilisation=1.0, queue_seconds=0.5, calm_seconds=60.0, interval=1.0)
    spec = fleet(300.0, 60, replicas=2, policies=policies)
    spec = FleetSpec(**{name: getattr(spec, name) for name in spec.__struct_fields__} | {
        "replicas": ReplicaSpec(start=2, most=40, start_seconds=2.0)
    })  # fmt: skip
    scaled, fixed = (Simulation(spec, SERVICE, "least-loaded", scaling).run() for scaling in ("latency", "fixed"))
    assert fixed.ttft.percentile(95) > 4
    assert scaled.ttft.percentile(95) < 2
    assert 2 < scaled.most_replicas < 40
    assert scaled.refused < fixed.refused / 5


def test_failures_come_at_their_rate_and_are_repaired() -> None:
    spec = fleet(1, 60, replicas=1000, failures=FailureSpec(hours_between=1.0, repair_seconds=100.0))
    replicas, load = Replicas(spec, "fixed", most_running=10), np.zeros(1000, np.int64)
    for second in range(3600):
        replicas.advance(float(second), 1.0, load, WaitingState())
    there = 1 / (1 + 100 / 3600)
    assert replicas.failures == pytest.approx(1000 * there, rel=0.1)
    assert (replicas.state == FAILED).sum() == pytest.approx(1000 * (1 - there), rel=0.5)


def test_all_requests_are_accounted_for() -> None:
    policies = PolicySpec(routing=("power-of-two",), scaling=("utilisation",), interval=5.0)
    spec = fleet(300.0, 45, replicas=24, policies=policies, failures=FailureSpec(hours_between=1.0, repair_seconds=20))
    figures = Simulation(spec, SERVICE, "power-of-two", "utilisation").run()
    assert figures.failures > 0
    assert figures.resent > 0
    assert figures.requests == pytest.approx(300 * 45, rel=0.05)
    running = figures.requests - figures.answered - figures.refused
    assert 0 <= running < 0.05 * figures.requests
    again = Simulation(spec, SERVICE, "power-of-two", "utilisation").run()
    assert (again.tokens, again.ttft.mean) == (figures.tokens, figures.ttft.mean)


def test_what_is_more_than_a_fleet_can_do_waits_and_is_refused() -> None:
    spec = fleet(4000.0, 20, replicas=4)
    spec = FleetSpec(**{name: getattr(spec, name) for name in spec.__struct_fields__} | {
        "replicas": ReplicaSpec(start=4, most_waiting=50)
    })  # fmt: skip
    figures = Simulation(spec, SERVICE, "round-robin", "fixed").run()
    assert figures.refused > figures.requests / 2
    assert figures.used > 0.9
    # 64 answers a replica, each with a token a step of 20 ms, without the time of prompts
    assert figures.tokens_per_s < 4 * 64 / 0.02


def naive_caches(replicas: list[int], prefixes: list[int], own: int, shared: int, room: int) -> list[bool]:
    """Each cache as the list of what was written into it, a number of tokens at a time."""
    written: dict[int, list[tuple[int, int]]] = {}  # of each replica: beginnings and tokens
    hits = []
    for replica, prefix in zip(replicas, prefixes, strict=True):
        log = written.setdefault(replica, [])
        place = max((at for at, (each, _) in enumerate(log) if each == prefix), default=-1)
        hit = place >= 0 and sum(tokens for _, tokens in log[place + 1 :]) < room
        log += [(-1, own + (0 if hit else shared)), (prefix, 0)]
        hits.append(hit)
    return hits


def test_caches_keep_what_was_used_last() -> None:
    rng = np.random.default_rng(0)
    replicas, prefixes = rng.integers(0, 3, 600), rng.zipf(1.5, 600) % 20
    caches = Caches(3, 2000, 20, 100)
    hits = [bool(caches.look_up(replicas[n : n + 1], prefixes[n : n + 1], np.array([150]))[0]) for n in range(600)]
    assert hits == naive_caches(replicas.tolist(), prefixes.tolist(), 50, 100, 2000)
    assert 0.2 < np.mean(hits) < 0.9
    caches.drop(np.array([1]))
    last = np.array([prefixes[replicas == replica][-1] for replica in (0, 1)])
    again = caches.look_up(np.array([0, 1]), last, np.array([150, 150]))
    assert again.tolist() == [True, False]


def test_replicas_that_are_switched_off_lose_their_caches() -> None:
    traffic = TrafficSpec(
        seconds=10, rate=1e-9, prompt=Spread(mean=300, most=400), answer=Spread(mean=4, most=8), prefixes=2,
        prefix_tokens=100,
    )  # fmt: skip
    spec = FleetSpec(name="test", model=MODEL, traffic=traffic, replicas=ReplicaSpec(start=4))
    simulation = Simulation(spec, SERVICE, "least-loaded", "fixed")
    caches, replicas = simulation._caches, simulation._replicas
    all_of_them, prefixes, tokens = np.arange(4), np.zeros(4, np.int32), np.full(4, 150)
    caches.look_up(all_of_them, prefixes, tokens)
    replicas.state[1:3] = DRAINING
    simulation._answers.running[2] = 1  # it ends its answer first
    simulation._slice(0.0, 0.1)
    assert replicas.state.tolist() == [UP, OFF, DRAINING, UP]
    replicas.state[1] = STARTING  # the next slice has it up
    simulation._slice(0.1, 0.1)
    assert replicas.state[1] == UP
    assert caches.look_up(all_of_them, prefixes, tokens).tolist() == [True, False, True, True]


def test_many_replicas_follow_the_common_beginnings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roofline.bench.plan.fleet.caches.MOST_CELLS", 8)
    caches = Caches(4, 1000, 100, 10)
    for expected in ([False, False], [True, False]):
        assert caches.look_up(np.array([3, 3]), np.array([1, 2]), np.array([20, 20])).tolist() == expected


@pytest.mark.slow
def test_hits_are_those_of_the_real_cache() -> None:
    """With long beginnings, more of them than a cache holds."""
    traffic = TrafficSpec(
        seconds=25, rate=16, prompt=Spread(mean=2600, sigma=0.2, most=4000), answer=Spread(mean=40, most=100),
        prefixes=300, prefix_tokens=2048,
    )  # fmt: skip
    exact, model = both(FleetSpec(name="test", model=MODEL, traffic=traffic, replicas=ReplicaSpec(start=2)))
    assert 0.3 < exact.hits < 0.8
    assert abs(model.hits - exact.hits) < 0.03


def test_prefixes_at_home_are_computed_once() -> None:
    traffic = TrafficSpec(
        seconds=20, rate=400, prompt=Spread(mean=600), answer=Spread(mean=20), prefixes=64, prefix_tokens=512
    )
    spec = FleetSpec(name="test", model=MODEL, traffic=traffic, replicas=ReplicaSpec(start=32))
    service = replace(SERVICE, cache_tokens=8000)
    apart, home = (Simulation(spec, service, routing, "fixed").run() for routing in ("round-robin", "prefix"))
    assert home.hits > apart.hits + 0.2
    assert home.ttft.mean < apart.ttft.mean


def both(spec: FleetSpec) -> tuple[FleetFigures, FleetFigures]:
    """The fleet exactly, and by the model of a replica."""
    values = {name: getattr(spec, name) for name in spec.__struct_fields__}
    exact, model = (plan_fleet(FleetSpec(**{**values, "method": method})).figures[0] for method in ("exact", "model"))
    assert (exact.method, model.method) == ("exact", "model")
    return exact, model


def differences(exact: FleetFigures, model: FleetFigures) -> dict[str, float]:
    pairs = {
        "tokens": (exact.tokens / exact.answered, model.tokens / model.answered),
        "tpot": (exact.tpot.mean, model.tpot.mean),
        "tpot p95": (exact.tpot.percentile(95), model.tpot.percentile(95)),
        "ttft": (exact.ttft.mean, model.ttft.mean),
        "ttft p50": (exact.ttft.percentile(50), model.ttft.percentile(50)),
        "used": (exact.used, model.used),
    }
    return {name: two / one - 1 for name, (one, two) in pairs.items()}


@pytest.mark.slow
def test_the_model_is_within_five_per_cent_of_eight_replicas() -> None:
    exact, model = both(fleet(160.0, 12))
    assert {name: error for name, error in differences(exact, model).items() if abs(error) > 0.05} == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "routing"),
    [
        (100.0, "least-loaded"),
        *(pytest.param(300.0, name, marks=pytest.mark.soak) for name in ("round-robin", "power-of-two")),
    ],
)
def test_the_model_at_other_loads_and_policies(rate: float, routing: Routing) -> None:
    exact, model = both(fleet(rate, 30, answer=120, policies=PolicySpec(routing=(routing,))))
    assert {name: error for name, error in differences(exact, model).items() if abs(error) > 0.05} == {}


@pytest.mark.slow
def test_the_model_where_prompts_take_most_of_the_time() -> None:
    errors = differences(*both(fleet(700.0, 10, answer=60)))
    # Progress is even within a slice, which the real one is not: TPOT varies less from request to request.
    assert abs(errors.pop("tpot p95")) < 0.1
    assert {name: error for name, error in errors.items() if abs(error) > 0.05} == {}


def test_small_fleets_that_stay_as_they_are_run_exactly() -> None:
    assert is_exact(fleet(1, 1, replicas=64))
    assert not is_exact(fleet(1, 1, replicas=65))
    assert not is_exact(fleet(1, 1, failures=FailureSpec(hours_between=1.0)))
    assert not is_exact(fleet(1, 1, policies=PolicySpec(scaling=("queue",))))


TEXT = """
name = "chat"
price = 2.0
[model]
name = "llama-3-8b"
chip = "H100 SXM"
[traffic]
seconds = 5
rate = 500.0
prompt = {mean = 300}
answer = {mean = 30}
[replicas]
start = 100
[policies]
routing = ["round-robin", "least-loaded", "power-of-two"]
scaling = ["fixed", "utilisation"]
"""


@pytest.mark.slow
def test_the_command_compares_policies(tmp_path: Path) -> None:
    spec, out = tmp_path / "chat.toml", tmp_path / "points"
    spec.write_text(TEXT)
    result = call_roofline(["plan", "--fleet", spec, "-o", out])
    assert result.exit_code == 0, result.stderr
    for part in ("power-of-two", "utilisation", "100 to 100", "USD/Mtok", "62% of the read roof", "5.0 s of the fleet"):
        assert part in result.stdout
    points = read_points(out)
    assert len({(point.extra["routing"], point.extra["scaling"]) for point in points}) == 6
    assert {point.kind for point in points} == {"fleet"}
    assert len({point.extra["requests"] for point in points}) == 1
    for point in points:
        assert point.metrics["request_rate"].value == pytest.approx(float(point.extra["answered"] or 0) / 5)
        assert (point.metrics["answer_rate"].value or 0) > (point.metrics["request_rate"].value or 0)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (("start = 100", "start = 0"), "replicas.start"),
        (("rate = 500.0", "rate = 500.0\nrates = 1"), "unknown field `rates`"),
        (("{mean = 30}", "{mean = 0}"), "traffic.answer.mean"),
        (('"least-loaded"', '"random"'), "random"),
        (("price = 2.0", 'method = "exact"'), "neither scaling nor failures"),
        (("[model]", "[model"), "is not TOML"),
        (
            ("rate = 500.0", "rate = 500.0\nprefixes = 2\nprefix_tokens = 200000"),
            "prefix_tokens cannot be used: give less",
        ),
        (('chip = "H100 SXM"', 'chip = "H100"'), "several products"),
        (('chip = "H100 SXM"', 'chip = "RTX 4080"'), "smaller format"),
    ],
)
def test_what_is_no_fleet_is_said_in_a_sentence(tmp_path: Path, change: tuple[str, str], match: str) -> None:
    spec = tmp_path / "chat.toml"
    spec.write_text(TEXT.replace(*change))
    result = call_roofline(["plan", "--fleet", spec])
    assert result.exit_code != 0
    assert match in result.stderr
    with pytest.raises(ConfigError, match="cannot be read"):
        read_spec(tmp_path / "none.toml")


def test_a_day_has_its_peak() -> None:
    traffic = TrafficSpec(seconds=60, rate=100, swing=0.5, peak_hour=15, prompt=Spread(mean=9), answer=Spread(mean=9))
    requests = Requests(traffic)
    assert [requests.rate(hour * 3600) for hour in (15, 3)] == pytest.approx([150, 50])
    assert len(requests.until(200.0)) == pytest.approx(200 * requests.rate(100.0), rel=0.05)


def test_requests_are_the_same_however_they_are_fetched() -> None:
    traffic = TrafficSpec(
        seconds=9, rate=50, prompt=Spread(mean=90, sigma=1), answer=Spread(mean=9), prefixes=5, prefix_tokens=8
    )
    at_once, parts = Requests(traffic).until(9.0), Requests(traffic)
    pieces = [parts.until(moment) for moment in (0.3, 0.3, 2.7, 9.0)]
    parts.again(np.zeros(3))
    for name in ("moments", "prompts", "answers", "prefixes"):
        assert np.concatenate([getattr(piece, name) for piece in pieces]).tolist() == getattr(at_once, name).tolist()
    assert (np.diff(at_once.moments) >= 0).all()
    assert at_once.prompts.min() >= 9
    assert set(at_once.prefixes) == set(range(5))
