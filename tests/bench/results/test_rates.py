"""What a second brings is what the way of sending fixes, and its intervals cover the truth."""

import numpy as np
import pytest

from roofline.bench.load.plan import Plan
from roofline.bench.load.schedule import planned_moments
from roofline.bench.results.metrics import RATES, figures
from roofline.bench.results.rates import falls_behind, rate_of
from roofline.bench.results.window import measured_span
from tests.bench.results.events import request, run
from tests.bench.results.simulated import BatchingEngine, closed_loop, open_loop, service

KINDS = ("fixed", "noisy", "exponential", "correlated", "phases")


def generator(seed=0):
    return np.random.Generator(np.random.Philox(key=seed))


@pytest.mark.parametrize("workers", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("laps", [2, 4])
def test_a_server_of_fixed_times_has_workers_over_latency(workers, laps):
    events = closed_loop(max(laps * workers, 16), workers, lambda: 320.0)
    metrics = figures(events)
    assert metrics["request_rate"].value == pytest.approx(workers / 0.32)
    assert metrics["answer_rate"].value == pytest.approx(40 * workers / 0.32)
    low, high = metrics["request_rate"].ci95
    assert low < workers / 0.32 < high < 1.001 * low


def test_probes_take_workers_but_no_throughput():
    """A loop whose every other request is a probe serves as many requests at a time as one without."""
    events = closed_loop(80, 4, lambda: 100.0)
    for each in events.requests[::2]:
        each.probe = True
    assert figures(events)["request_rate"].value == pytest.approx(40)


def test_requests_that_fail_take_their_time():
    events = closed_loop(80, 4, lambda: 100.0)
    for each in events.requests[::4]:
        each.error, each.chunks = "status 500", []
    assert figures(events)["request_rate"].value == pytest.approx(30)


def test_a_client_that_takes_its_time_between_requests_is_not_credited():
    requests = [request(at=100 * n, first=50, gap=10, number=n) for n in range(20)]  # 80 of 100 ms
    assert figures(run(requests, concurrency=1))["request_rate"].value == pytest.approx(10, rel=0.02)


@pytest.mark.parametrize("arrivals", ["constant", "poisson", "gamma"])
@pytest.mark.parametrize(("count", "rate"), [(16, 6.0), (100, 36.4), (100, 70.0)])
@pytest.mark.parametrize("kind", ["fixed", "exponential"])
def test_an_open_loop_that_is_kept_up_with_has_the_offered_rate(arrivals, count, rate, kind):
    events = open_loop(count, rate, service(kind, generator(1)), seed=3, arrivals=arrivals)
    metrics = figures(events)
    assert metrics["request_rate"].value == pytest.approx(rate, rel=1e-6)
    assert metrics["answer_rate"].value == pytest.approx(40 * rate, rel=1e-6)


@pytest.mark.parametrize("kind", ["fixed", "noisy"])
@pytest.mark.parametrize("load", [1.3, 2.0, 10.0])
def test_a_server_that_falls_behind_has_its_own_rate(kind, load):
    events = open_loop(300, 40 * load, service(kind, generator()), seed=1, servers=4)  # that can do 40 a second
    assert falls_behind(events)
    figure = figures(events)["request_rate"]
    assert figure.value == pytest.approx(40, rel=0.05)
    assert figure.ci95[0] <= 40.5
    assert figure.ci95[1] >= 39.5


def test_all_at_once_is_more_than_any_server_keeps_up_with():
    events = open_loop(200, 1e6, lambda: 100.0, seed=0, servers=4)
    assert figures(events)["request_rate"].value == pytest.approx(40, rel=0.03)


def test_a_recorded_trace_has_the_rate_of_its_arrivals():
    events = open_loop(50, 10.0, lambda: 30.0, seed=2)
    events = run(events.requests, arrivals="trace", end=5000)
    moments = [each.scheduled for each in events.requests]
    assert figures(events)["request_rate"].value == pytest.approx(49e9 / (moments[-1] - moments[0]))


def test_rounds_of_batches():
    requests = [
        request(at=1000 * n, first=100, gap=10, tokens=41, number=n, scheduled=1000 * n) for n in range(6) for _ in "ab"
    ]
    figure = figures(run(requests, arrivals="batch", concurrency=2, end=5500))["answer_rate"]
    assert figure.value == pytest.approx(2 * 41 * 6 / 5.5)
    assert figure.ci95 is not None


def kinds(*quick):
    """All kinds of services, of which the slow run has the others than `quick`."""
    return [kind if kind in quick else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]


SHORT = [(32, 1, kind) for kind in ("noisy", "exponential", "phases")]
SHORT += [pytest.param(32, 1, kind, marks=pytest.mark.slow) for kind in ("fixed", "correlated")]
LONG = [(128, 8, kind) for kind in ("noisy", "correlated")]
LONG += [pytest.param(128, 8, kind, marks=pytest.mark.slow) for kind in ("fixed", "exponential", "phases")]


@pytest.mark.parametrize(("count", "workers", "kind"), SHORT + LONG)
def test_intervals_of_closed_loops_cover(kind, count, workers):
    draw, trials, hits = generator(count), 150, {"request_rate": 0, "answer_rate": 0}
    truth, widths = {"request_rate": workers / 0.1, "answer_rate": 40 * workers / 0.1}, []
    for _ in range(trials):
        metrics = figures(closed_loop(count, workers, service(kind, draw), lambda: int(draw.integers(20, 61))))
        for name, value in truth.items():
            low, high = metrics[name].ci95
            hits[name] += low <= value <= high
        low, high = metrics["request_rate"].ci95
        widths.append(high - low)
    assert min(hits.values()) >= (0.92 if count > 100 else 0.9) * trials
    if kind == "noisy" and count > 100:
        assert np.median(widths) < 0.2 * truth["request_rate"], "an interval that covers all says nothing"


@pytest.mark.parametrize("kind", kinds("noisy", "phases"))
def test_intervals_of_open_loops_cover(kind):
    draw, trials, hits = generator(5), 80, {"request_rate": 0, "answer_rate": 0}
    for seed in range(trials):
        events = open_loop(120, 50.0, service(kind, draw), seed, tokens=lambda: int(draw.integers(20, 61)))
        metrics = figures(events)
        for name, value in (("request_rate", 50.0), ("answer_rate", 2000.0)):
            low, high = metrics[name].ci95
            hits[name] += low <= value <= high
    assert min(hits.values()) >= 0.92 * trials


def test_arrivals_that_were_not_planned_to_a_rate_have_an_interval_of_their_own():
    """Where the moments come from elsewhere, how many there happened to be is a part of the noise."""
    draw, trials, hits = generator(2), 80, 0
    for _ in range(trials):
        moments = np.cumsum(draw.exponential(20.0, size=150))
        events = run([request(at=moment, first=50) for moment in moments], arrivals="poisson", rate=50.0)
        low, high = figures(events)["request_rate"].ci95
        hits += low <= 50 <= high
    assert 0.92 * trials <= hits < trials


def test_plans_come_to_exactly_their_rate():
    plan = Plan(traffic="", events="", url="", model="", arrivals="poisson", rate=5.0, seed=9, requests=100)
    assert planned_moments(plan, [None] * 100)[-1] == pytest.approx(20e9)


ENGINES = {
    "lengths": BatchingEngine(),
    "steps": BatchingEngine(wander=0.2, memory=0.9),
    "together": BatchingEngine(wander=0.1, lengths=(40, 40)),  # all requests of a lap begin and end at once
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    ("workers", "laps"),
    [
        (8, 4),
        pytest.param(16, 4, marks=pytest.mark.slow),
        pytest.param(64, 4, marks=pytest.mark.slow),
        (16, 5),
        (16, 10),
    ],
)
def test_intervals_cover_the_rate_of_an_engine_that_computes_requests_side_by_side(name, workers, laps):
    """Requests of one step share how long it took, so those of two laps are little more than two values."""
    engine, trials, draw = ENGINES[name], 300, generator(1000 * workers + laps)
    truth = dict(zip(("request_rate", "answer_rate"), engine.rates(workers), strict=True))
    hits, widths = dict.fromkeys(truth, 0), {metric: [] for metric in truth}
    for events in engine.runs(trials, workers, laps * workers, draw):
        span = measured_span(events)
        for metric, value in truth.items():
            low, high = rate_of(events, span, RATES[metric][2]).interval
            hits[metric] += low <= value <= high
            widths[metric].append((high - low) / value)
    assert min(hits.values()) >= 0.89 * trials, hits
    widest = {"lengths": 1.1, "steps": 1.4, "together": 0.9}[name]
    assert max(map(np.median, widths.values())) < widest, "an interval that covers all says nothing"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_intervals_of_four_laps_cover(kind):
    draw, trials, hits = generator(7), 300, 0
    for _ in range(trials):
        events = closed_loop(32, 8, service(kind, draw))
        low, high = rate_of(events, measured_span(events), RATES["request_rate"][2]).interval
        hits += low <= 80 <= high
    assert hits >= 0.88 * trials


def test_medians_of_two_laps_that_ran_in_step_have_no_interval():
    """All requests of a lap took the same time: these are two values, and a median needs five."""
    (events,) = ENGINES["together"].runs(1, 16, 64, generator(1))
    assert figures(events)["e2e"].n == 32
    assert figures(events)["e2e"].ci95 is None
    apart = closed_loop(64, 16, service("noisy", generator(1)))
    low, high = figures(apart)["e2e"].ci95
    assert low < 100 < high
