"""Blocks in turns: the same requests for both, none twice for either, and figures of blocks."""

import itertools

import msgspec
import pytest

from roofline.bench.load.plan import Plan
from roofline.bench.results.compare import Sequential, SequentialGoodput
from roofline.bench.results.metrics import figures, goodput
from roofline.bench.results.objectives import Objective
from roofline.bench.serving.versus import (
    Terms,
    VersusResult,
    block_latency,
    block_rate,
    compare,
    one_after_the_other,
    with_goodput,
)
from tests.bench.report import made
from tests.bench.results.events import MS, request, run


class Side:
    """A system whose requests take so many milliseconds."""

    def __init__(self, name, log, milliseconds, **fields):
        self.name, self.log, self.milliseconds, self.fields = name, log, milliseconds, fields

    def plan(self, requests, **load):
        return Plan(traffic="", events="", url="", model="", requests=requests, **{"arrivals": "closed", **load})

    def send(self, plan):
        self.log.append(
            (self.name, plan.first, plan.requests, plan.rate if plan.arrivals == "poisson" else None, plan.seed)
        )
        requests = [request(at=10 * n, first=self.milliseconds, gap=1, **self.fields) for n in range(plan.requests)]
        return run(requests)


def compared(terms, a=100.0, b=100.0, **fields):
    log, rounds = [], []
    sides = Side("A", log, a), Side("B", log, b, **fields)
    return compare(*sides, terms, rounds.append), log, rounds


def test_a_round_is_abba_with_the_same_requests():
    comparison, log, rounds = compared(Terms(requests=4))
    assert log[:8] == [
        (name, first, 4, None, 0)
        for name, first in (("A", 0), ("B", 0), ("B", 4), ("A", 4), ("A", 8), ("B", 8), ("B", 12), ("A", 12))
    ]
    assert comparison.verdict.verdict == "no difference"
    assert (len(rounds), len(comparison.events["A"])) == (4, 8)


def test_the_arrivals_of_a_pair_are_the_same():
    _, log, _ = compared(Terms(requests=4, rate=3.0, by="latency"))
    assert log[0][3:] == log[1][3:] == (3.0, 0)
    assert log[2][3:] == log[3][3:] == (3.0, 4)


def test_what_is_slower_is_told_by_either_measure():
    for by, verdict in (("throughput", "A is higher"), ("latency", "B is higher")):
        comparison, _, _ = compared(Terms(requests=4, by=by), b=150.0)
        assert comparison.verdict.verdict == verdict
        assert comparison.latency.decision().ratio.ratio == pytest.approx(153 / 103)
        assert comparison.throughput.decision().ratio.ratio == pytest.approx(133 / 183)


def test_at_a_rate_under_a_promise_goodput_decides():
    """B is 30 % slower and keeps the limit all the same; where the limit lies between the two, it keeps it never."""
    for limit, verdict in ((140.0, "no difference"), (120.0, "A is higher")):
        terms = Terms(requests=60, rate=5.0, by="goodput", promise=Objective(ttft=limit))
        comparison, _, _ = compared(terms, b=130.0)
        assert comparison.verdict.verdict == verdict
        assert comparison.latency.decision().verdict == "B is higher"
        decision = comparison.goodput.decision()
        assert (decision.a, decision.b) == (5.0, 5.0 if limit > 130 else 0.0)
    unpromised, _, _ = compared(Terms(requests=4, rate=5.0, by="latency"), b=130.0)
    assert unpromised.goodput is None


def test_at_a_rate_throughput_is_not_compared():
    """Both have what is offered; a block's length has the time in it that its last answers take."""
    comparison, _, _ = compared(Terms(requests=4, rate=5.0, by="latency"), b=130.0)
    assert comparison.throughput.a == []
    assert len(comparison.latency.a) == comparison.rounds > 0


def test_an_objective_that_neither_side_keeps_is_named():
    terms = Terms(requests=60, rate=5.0, by="goodput", promise=Objective(ttft=10.0))
    comparison, _, _ = compared(terms)
    assert "no request to either side keeps the objective" in comparison.verdict.sentence("goodput")
    kept, _, _ = compared(Terms(requests=60, rate=5.0, by="goodput", promise=Objective(ttft=140.0)))
    assert "keeps the objective" not in kept.verdict.sentence("goodput")


def open_blocks(count, latency=400.0):
    """Blocks of 16 requests at 12 a second, each of which ends `latency` after its last arrival."""
    head = {"arrivals": "poisson", "rate": 12.0}
    block = [request(at=1000 / 12 * (n + 1), first=100, gap=latency / 4, number=n) for n in range(16)]
    return [run(block, **head) for _ in range(count)]


def test_blocks_at_a_rate_bring_what_is_offered():
    """What stands between the last arrival of a block and the first of the next is no gap of the plan."""
    events = one_after_the_other(open_blocks(6))
    assert events.head.blocks == 6
    metrics = figures(events) | goodput(events, Objective(ttft=150.0))
    assert metrics["request_rate"].value == pytest.approx(12.0)
    assert metrics["goodput"].value == pytest.approx(12.0)


def test_the_point_has_the_goodput_that_was_compared():
    """Of all requests: the first block, whose requests are late, is not in the window of the others' figures."""
    blocks = open_blocks(6)
    for each in blocks[0].requests:
        each.chunks = [moment + 1000 * MS for moment in each.chunks]
        each.end += 1000 * MS
    promise = Objective(ttft=150.0)
    comparison = VersusResult(Sequential(0.03), Sequential(0.03), "goodput", SequentialGoodput(12.0, 32, 0.03))
    for _ in range(4):
        comparison.goodput.add(5 / 6, 1.0)
    metrics = goodput(one_after_the_other(blocks), promise)
    measured = msgspec.structs.replace(made.point(4), metrics=metrics)
    kept = with_goodput(measured, "A", comparison).metrics
    assert (kept["goodput"].value, kept["good_share"].value) == (pytest.approx(10.0), pytest.approx(5 / 6))
    assert with_goodput(measured, "B", comparison).metrics["goodput"].value == pytest.approx(12.0)


def test_where_goodput_decides_requests_that_fail_are_not_good(monkeypatch):
    """A tenth of B's requests fails: no round is left out, and the comparison is not given up."""
    failing(monkeypatch, {block for block in range(200) if block % 4 in (1, 2)})
    terms = Terms(requests=10, rate=5.0, by="goodput", promise=Objective(ttft=1000.0))
    comparison, _, rounds = compared(terms)
    assert (comparison.failure, comparison.lost_rounds, comparison.throughput.a) == ("", 0, [])
    assert comparison.verdict.verdict == "A is higher"
    decision = comparison.goodput.decision()
    assert (decision.a, decision.b) == (5.0, pytest.approx(4.5))
    assert comparison.rounds == len(rounds) == decision.rounds
    other, _, _ = compared(Terms(requests=10, rate=5.0, by="latency", promise=Objective(ttft=1000.0)))
    assert "the comparison was given up" in other.failure or other.lost_rounds


def test_the_budget_is_the_last_look():
    assert Terms(requests=1, rounds=5).looks == (4, 5)
    assert Terms(requests=1, rounds=2).looks == (2,)
    _, log, rounds = compared(Terms(requests=1, rounds=2))
    assert (len(rounds), len(log)) == (2, 8)


def failing(monkeypatch, blocks):
    """Sides whose blocks of these numbers have a request that fails."""
    send, count = Side.send, itertools.count()

    def sometimes(side, plan):
        events = send(side, plan)
        if next(count) in blocks:
            events.requests[0].error = "status 500"
        return events

    monkeypatch.setattr(Side, "send", sometimes)


def test_a_round_with_a_failure_is_left_out_and_told(monkeypatch, caplog):
    failing(monkeypatch, {5})
    with caplog.at_level("WARNING"):
        comparison, log, rounds = compared(Terms(requests=4))
    assert (comparison.verdict.verdict, comparison.failure, comparison.lost_rounds) == ("no difference", "", 1)
    assert (len(rounds), len(log)) == (4, 18), "the rest of the round is not sent"
    assert [len(comparison.events[name]) for name in "AB"] == [8, 8]
    (told,) = caplog.messages
    assert told == "round 2 is left out: 1 of 12 requests to B failed, the last one with: status 500"


def test_many_failures_end_the_comparison_with_what_there_is(monkeypatch):
    failing(monkeypatch, set(range(4, 100)))
    comparison, _, rounds = compared(Terms(requests=4))
    assert len(rounds) == 1
    assert len(comparison.events["A"]) == 2
    assert comparison.failure.startswith("6 of ")


def test_a_side_that_fails_ends_the_comparison_at_once():
    comparison, _, rounds = compared(Terms(requests=16), error="status 500")
    assert (comparison.failure, rounds) == (
        "16 of 16 requests to B failed, the last one with: status 500; the comparison was given up",
        [],
    )


def test_too_many_lost_rounds_end_it(monkeypatch):
    failing(monkeypatch, {0, 1, 2})
    comparison, _, rounds = compared(Terms(requests=4, rounds=4), b=101.0)
    assert (comparison.lost_rounds, len(rounds)) == (3, 3)
    assert comparison.failure == "3 rounds were left out because requests failed: too few are left"


def test_an_answer_without_text_is_a_failure():
    comparison, _, rounds = compared(Terms(requests=16), chunks=[])
    assert comparison.failure.startswith("16 of 16 requests to B failed, the last one with: the answer had no text")
    assert not rounds


def test_figures_of_a_block():
    block = run([request(at=50, first=40, gap=10, tokens=3, scheduled=20), request(at=60, first=120, gap=10, tokens=3)])
    assert block_rate(block) == pytest.approx(6 / 0.15)
    assert block_latency(block) == pytest.approx((90 + 140) / 2)


def test_blocks_follow_each_other():
    blocks = [run([request(at=5, first=10, gap=1)]), run([request(at=7, first=10, gap=1)])]
    events = one_after_the_other(blocks)
    assert [each.dispatched for each in events.requests] == [5 * MS, 25 * MS]
    assert events.requests[1].chunks[0] == 35 * MS
    assert events.requests[1].connected is None
    assert events.head.end == 38 * MS
    assert blocks[1].requests[0].dispatched == 7 * MS
    assert events.head.joules is None


def test_joules_of_blocks_are_added_up():
    blocks = [run([request(at=5, first=10, gap=1)], joules=each, joules_seconds=0.5) for each in (3.0, 4.0)]
    head = one_after_the_other(blocks).head
    assert (head.joules, head.joules_seconds) == (7.0, 1.0)


def test_an_interrupted_block_is_left_out(monkeypatch):
    log = []
    sides = Side("A", log, 10), Side("B", log, 10)
    send = Side.send

    def interrupted(side, plan):
        events = send(side, plan)
        if len(log) == 6:
            events.head = msgspec.structs.replace(events.head, interrupted=True)
        return events

    monkeypatch.setattr(Side, "send", interrupted)
    comparison = compare(*sides, Terms(requests=2), lambda _: None)
    assert len(comparison.throughput.a) == 1
    assert comparison.decision is None
    assert comparison.interrupted
    assert len(log) == 6
    assert comparison.verdict.verdict == "undecided"
