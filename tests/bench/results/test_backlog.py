"""A server that cannot keep up with an open loop is noticed, and one that can is not said to fall behind."""

import numpy as np
import pytest

from roofline.bench.results.backlog import falls_behind
from roofline.bench.serving.versus import one_after_the_other
from tests.bench.results.events import MS, request, run
from tests.bench.results.simulated import open_loop, service

SERVERS = [("fixed", 1), ("fixed", 4), ("noisy", 1), ("noisy", 4)]
UNEVEN = [("exponential", 1), ("exponential", 4), ("correlated", 4), ("phases", 4)]


def generator(seed):
    return np.random.Generator(np.random.Philox(key=seed))


def flagged(kind, servers, load, count, trials):
    """The share of runs whose server is said to fall behind. load: of what it can do."""
    draw = generator(servers)
    rate = 10.0 * servers * load
    runs = (open_loop(count, rate, service(kind, draw), seed, servers=servers) for seed in range(trials))
    return sum(map(falls_behind, runs)) / trials


def batched(count, rate, seed, most=8, base=0.1, per_request=0.0125):
    """The run of a server that takes up to so many waiting requests at a time, and answers them together."""
    events = open_loop(count, rate, lambda: 1.0, seed)
    now, waiting = 0, list(events.requests)
    while waiting:
        now = max(now, waiting[0].scheduled)
        batch = [each for each in waiting[:most] if each.scheduled <= now]
        now += round((base + per_request * len(batch)) * 1000 * MS)
        for each in batch:
            each.chunks, each.end = [now], now
        waiting = waiting[len(batch) :]
    return events


@pytest.mark.parametrize(("kind", "servers"), SERVERS)
@pytest.mark.parametrize(("load", "count"), [(1.2, 200), (1.5, 60), (2.0, 60), (3.0, 60)])
def test_an_overload_is_noticed(kind, servers, load, count):
    assert flagged(kind, servers, load, count, 60) >= 0.95


@pytest.mark.parametrize(("kind", "servers"), UNEVEN)
@pytest.mark.parametrize(("load", "count"), [(1.2, 500), (1.5, 100), (2.0, 60)])
def test_an_overload_is_noticed_where_requests_differ(kind, servers, load, count):
    assert flagged(kind, servers, load, count, 40) >= 0.9


@pytest.mark.parametrize(("kind", "servers"), SERVERS + UNEVEN)
@pytest.mark.parametrize(("load", "count"), [(0.5, 60), (0.8, 60), (0.8, 200)])
def test_a_server_that_keeps_up_is_not_flagged(kind, servers, load, count):
    assert flagged(kind, servers, load, count, 100) <= (0.06 if kind == "phases" else 0.03)


@pytest.mark.parametrize("count", [60, 200])
def test_a_server_that_answers_in_batches(count):
    most = 8 / 0.2  # requests a second
    assert sum(falls_behind(batched(count, 0.8 * most, seed)) for seed in range(100)) <= 2
    assert sum(falls_behind(batched(count, 1.5 * most, seed)) for seed in range(40)) >= 38


@pytest.mark.parametrize("in_flight", [5, 30])
def test_long_answers_side_by_side_are_no_backlog(in_flight):
    """All requests are served at once, so none waits, however many are in flight where the run ends."""
    draw = generator(in_flight)
    latency = service("exponential", draw)
    runs = [open_loop(60, 10.0 * in_flight, latency, seed) for seed in range(100)]
    assert sum(map(falls_behind, runs)) <= 2


def test_a_slow_beginning_is_no_backlog():
    """Requests of the first second wait until a server has warmed up, and then it is as quick as ever."""
    requests = [request(at=100 * n, first=max(50, 1500 - 200 * n), gap=0, number=n) for n in range(60)]
    assert not falls_behind(run(requests, arrivals="constant", rate=10.0))


def blocks_of(load, kind, seed, count=8, size=16):
    """Blocks of requests to a server of four places, each of which begins when the one before has ended."""
    draw = generator(seed)
    blocks = [open_loop(size, 40 * load, service(kind, draw), 100 * seed + n, servers=4) for n in range(count)]
    return one_after_the_other(blocks)


@pytest.mark.parametrize("kind", ["fixed", "noisy", "exponential"])
def test_blocks_of_an_overload_are_noticed(kind):
    """Each block ends before the next begins, so the backlog is there again in each."""
    assert sum(falls_behind(blocks_of(2.0, kind, seed)) for seed in range(20)) >= 19
    assert sum(falls_behind(blocks_of(0.8, kind, seed)) for seed in range(60)) <= 1


def test_requests_of_blocks_that_failed_move_no_others():
    events = blocks_of(2.0, "fixed", 1)
    for number in (3, 40):
        events.requests[number].error = "status 503"
    assert falls_behind(events)
    for each in events.requests[::16]:
        each.error = "status 503"
    assert not falls_behind(events), "of the first of each block nothing is known"
