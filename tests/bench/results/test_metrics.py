"""Figures are what their definitions say, for any events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roofline.bench.load.events import RequestEvents
from roofline.bench.results.metrics import at_once, counts, figures, goodput, lengths
from roofline.bench.results.objectives import OBJECTIVES, Objective, read_objective
from roofline.bench.results.window import Span, is_short, measured_span, most_in_flight
from roofline.common.errors import ConfigError
from tests.bench.results.events import MS, request, run

MOMENTS = st.floats(0, 1e4).map(lambda value: round(value, 3))
REQUESTS = st.builds(
    request,
    at=MOMENTS,
    first=st.floats(0.1, 500),
    gap=st.floats(0.01, 50),
    tokens=st.integers(1, 20),
)


def test_a_request_by_hand():
    metrics = figures(run([request(at=100, first=50, gap=10, tokens=4, scheduled=70)] * 5))
    means = {name: figure.mean for name, figure in metrics.items() if figure.mean is not None}
    assert means == pytest.approx(
        {
            "ttft": 50,
            "ttft_corrected": 80,
            "tpot": 10,
            "e2e": 80,
            "e2e_corrected": 110,
            "decode_rate": 100,
            "itl": 10,
        }
    )
    assert metrics["answer_rate"].value == pytest.approx(20 / 0.08), "five at a time, each of 80 ms"
    assert metrics["request_rate"].value == pytest.approx(5 / 0.08)
    assert metrics["prompt_rate"].value == pytest.approx(35 / 0.08)
    assert metrics["itl"].n == 15
    assert metrics["ttft"].p50 == 50
    assert metrics["ttft"].p90 is None


def test_chunks_of_several_tokens_are_no_tokens():
    metrics = figures(run([request(at=0, first=20, gap=30, tokens=9, parts=3)] * 5))  # all at once
    assert metrics["tpot"].mean == pytest.approx(60 / 8)
    assert metrics["itl"].mean == pytest.approx(30)
    assert metrics["answer_rate"].value == pytest.approx(45 / 0.08)


def test_what_lies_outside_of_the_window_is_in_no_figure():
    requests = [
        request(at=0, first=900),
        request(at=100, first=50),
        request(at=300, first=50),
        request(at=600, first=5),
    ]
    metrics = figures(run(requests), Span(90 * MS, 340 * MS))
    assert (metrics["e2e"].n, metrics["e2e"].mean) == (2, 80)  # one that ended later counts
    busy = (500 + 80 + 80) / 500  # requests at a time, from when there are two to the last dispatch
    assert metrics["request_rate"].value == pytest.approx(busy / 0.08)
    assert metrics["answer_rate"].value == pytest.approx(4 * busy / 0.08)


def test_probes_and_failures_are_in_no_latency():
    failed = request(at=0, first=5000, error="status 500")
    events = run([request(at=0, first=10), request(at=0, first=9000, probe=True), failed])
    assert figures(events)["e2e"].n == 1
    assert counts(events).failed == 1
    assert counts(events).completed == 1


def test_tokens_are_counted_as_parts_where_the_server_does_not_count():
    events = run([request(at=0, first=10, tokens=4, completion_tokens=None)])
    assert counts(events).tokens_by == "chunks"
    assert counts(events).answer_tokens == 4


def test_unfinished_requests_are_counted():
    events = run([request(at=0, first=10), RequestEvents(request=1, scheduled=0, dispatched=0)])
    assert (counts(events).completed, counts(events).unfinished) == (1, 1)
    assert most_in_flight(events) == 2


def test_the_first_and_the_last_lap_are_left_out():
    requests = [request(at=100 * (n // 3), first=50, number=n) for n in range(15)]
    assert measured_span(run(requests, concurrency=3)) == Span(100 * MS, 300 * MS)
    assert measured_span(run(requests[:9], concurrency=3)) == Span(100 * MS, 280 * MS), "too few to leave out two laps"
    assert measured_span(run(requests[:6], concurrency=3)) == Span(0, 180 * MS)
    assert [is_short(run(requests[:count], concurrency=3)) for count in (15, 12, 9)] == [False, False, True]
    assert measured_span(run(requests, arrivals="batch", concurrency=3)) == Span(0, 480 * MS)


def test_a_lap_of_an_open_loop_is_what_is_in_flight():
    requests = [request(at=40 * n, first=50, number=n) for n in range(20)]  # 80 ms each: two at a time
    span = measured_span(run(requests, end=760, arrivals="constant", rate=25.0))
    assert span == Span(120 * MS, 640 * MS)
    cut = run(requests, begin=100, end=700, arrivals="constant", rate=25.0)
    assert measured_span(cut) == Span(100 * MS, 700 * MS), "another tool has cut its warm-up and its cool-down already"


def test_goodput():
    requests = [
        request(at=0, first=100, gap=10),
        request(at=0, first=100, gap=300),  # too slow a decode
        request(at=0, first=2500),  # too late
        request(at=1950, first=100, scheduled=0),  # waited in the client
        request(at=0, first=100, error="status 500"),
        request(at=0, first=1, tokens=1),
    ]
    metrics = goodput(run(requests, end=3000), Objective(2000, 200), Span(0, 3000 * MS))
    assert metrics["good_share"].value == pytest.approx(2 / 6)
    assert metrics["goodput"].value == pytest.approx(2 * most_in_flight(run(requests)) / total_seconds(requests))


def test_an_answer_in_one_part_keeps_a_promise_only_where_all_of_it_does():
    quick, slow = (request(at=0, first=first, gap=0, tokens=11) for first in (100, 1900))  # at most 10, 190 ms a token
    metrics = goodput(run([quick, slow]), Objective(2000, 30))
    assert metrics["good_share"].value == pytest.approx(1 / 2)
    assert "tpot" not in figures(run([quick, slow]))


def total_seconds(requests):
    return sum(each.end - each.dispatched for each in requests) / 1e9


def test_promises_of_ones_own():
    assert read_objective("ttft=200, tpot=50", "objective") == Objective(ttft=200, tpot=50)
    assert read_objective("mlperf:llama2-70b", "objective") is OBJECTIVES["mlperf:llama2-70b"]
    assert Objective(tpot=50, e2e=900).rule == "TPOT <= 50 ms and latency from scheduled <= 900 ms"
    metrics = goodput(run([request(at=0, first=100, gap=10), request(at=0, first=900)]), Objective(e2e=500))
    assert metrics["good_share"].value == pytest.approx(1 / 2)
    for text in ("ttft=0", "ttft=x", "tfft=3", "ttft=inf"):
        with pytest.raises(ConfigError, match=f"objective='{text}': '{text}' is no limit in ms"):
            read_objective(text, "objective")
    with pytest.raises(ConfigError, match="did you mean 'mlperf:llama2-70b'"):
        read_objective("mlperf:llama2-70", "objective")
    with pytest.raises(ConfigError, match="has two limits of ttft: leave one of them out"):
        read_objective("ttft=50,tpot=9,ttft=300", "objective")


def test_definitions_of_open_loops_are_formulas():
    events = run([request(at=100 * n, first=50, number=n) for n in range(20)], arrivals="poisson", rate=10.0)
    defined = figures(events) | goodput(events, Objective(ttft=100))
    formula = " / requests of the window * requests offered a second"
    assert defined["request_rate"].definition == f"completed requests{formula}"
    assert defined["goodput"].definition == f"requests with TTFT from scheduled <= 100 ms{formula}"


@given(st.lists(REQUESTS, min_size=1, max_size=30))
def test_relations_of_any_run(requests):
    events = run(requests)
    span = Span(0, events.head.end)
    metrics = figures(events, span)
    assert metrics["ttft"].mean <= metrics["e2e"].mean * (1 + 1e-9)
    in_flight = metrics["request_rate"].value * metrics["e2e"].mean / 1000  # Little's law
    assert 0 < in_flight <= most_in_flight(events) * (1 + 1e-9)
    tokens = sum(each.completion_tokens for each in requests) / len(requests)
    assert metrics["answer_rate"].value == pytest.approx(metrics["request_rate"].value * tokens)
    assert 1 <= most_in_flight(events) <= len(requests)
    if "tpot" in metrics:
        assert metrics["tpot"].n == sum(each.completion_tokens > 1 and not at_once(each) for each in requests)
    for figure in metrics.values():
        assert (figure.p99 is None) == (figure.n < 299 or figure.value is not None)
        if figure.p50 is not None and figure.p95 is not None:
            assert figure.p50 <= figure.p95


@given(st.lists(REQUESTS, min_size=1, max_size=20), st.floats(0, 1e5))
def test_waiting_in_the_client_shows_only_where_it_is_corrected(requests, late):
    on_time, delayed = run(requests), run(requests)
    delayed.requests = [request_late(each, round(late * MS)) for each in requests]
    one, other = figures(on_time, Span(0, 1 << 62)), figures(delayed, Span(0, 1 << 62))
    assert other["e2e"] == one["e2e"]
    assert other["e2e_corrected"].mean == pytest.approx(one["e2e_corrected"].mean + round(late * MS) / MS)


def request_late(each, by):
    values = {name: getattr(each, name) for name in each.__struct_fields__}
    return RequestEvents(**{**values, "scheduled": each.scheduled - by})


def test_lengths_of_nothing():
    assert lengths([]).most == 0
    assert lengths([1, 2, 9]).mean == 4


def test_goodput_of_a_backlog_is_that_of_the_window():
    """The requests of the first lap keep the limit, and none behind them does."""
    requests = [request(at=100 * n, first=50 + 60 * n, gap=1, number=n) for n in range(60)]
    told = goodput(run(requests, arrivals="poisson", rate=10.0, end=6000), Objective(e2e=300))
    assert told["good_share"].value == 0
    assert told["goodput"].value == 0
    kept = goodput(run(requests, arrivals="poisson", rate=10.0, end=6000), Objective(e2e=1e6))
    assert kept["goodput"].value == pytest.approx(1 / 0.16)
    assert kept["goodput"].definition.endswith("/ all that were sent * requests that end a second")
