"""Figures from raw events: each a pure function of them, under a definition that is printed beside its number.

Latencies are of the requests that were dispatched within the window and completed, also where that was after its end:
to leave those out would favour the short ones. Throughput is of what was delivered within the window. Probes are in no
figure.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from roofline.bench.load.events import Events, RequestEvents
from roofline.bench.results.point import Counts, Figure, Lengths
from roofline.bench.results.statistics import (
    Values,
    batch_means_interval,
    percentile,
    percentile_interval,
    warm_up_length,
)
from roofline.common.errors import ConfigError
from roofline.common.names import unknown

Of = Callable[[RequestEvents], float | None]  # a request's value, None where it has none
NS_MS = 1e-6
SLICES = 20  # of the window, for the interval of a throughput


@dataclass(frozen=True)
class Metric:
    """A metric of single requests, as a formula over their moments."""

    definition: str
    unit: str
    of: Of


def answer_tokens(request: RequestEvents) -> int:
    """As the server counts them, else the parts of the answer."""
    parts = len(request.chunks) if request.parts is None else request.parts
    return parts if request.completion_tokens is None else request.completion_tokens


def _ttft(request: RequestEvents) -> float | None:
    return (request.chunks[0] - request.dispatched) * NS_MS if request.chunks else None


def _corrected_ttft(request: RequestEvents) -> float | None:
    if request.scheduled is None or not request.chunks:
        return None
    return (request.chunks[0] - request.scheduled) * NS_MS


def _tpot(request: RequestEvents) -> float | None:
    tokens = answer_tokens(request)
    return (request.chunks[-1] - request.chunks[0]) * NS_MS / (tokens - 1) if tokens > 1 and request.chunks else None


def _e2e(request: RequestEvents) -> float | None:
    return None if request.end is None else (request.end - request.dispatched) * NS_MS


def _corrected_e2e(request: RequestEvents) -> float | None:
    return None if request.end is None or request.scheduled is None else (request.end - request.scheduled) * NS_MS


def _decode_rate(request: RequestEvents) -> float | None:
    tpot = _tpot(request)
    return 1000 / tpot if tpot else None


METRICS = {
    "ttft": Metric("first part with text or reasoning - dispatched", "ms", _ttft),
    "ttft_corrected": Metric("first part with text or reasoning - scheduled", "ms", _corrected_ttft),
    "tpot": Metric("(last part - first part) / (answer tokens - 1)", "ms", _tpot),
    "e2e": Metric("last byte - dispatched", "ms", _e2e),
    "e2e_corrected": Metric("last byte - scheduled", "ms", _corrected_e2e),
    "decode_rate": Metric("(answer tokens - 1) / (last part - first part)", "tokens/s", _decode_rate),
}


@dataclass(frozen=True)
class Span:
    """The window: nanoseconds since the run's beginning."""

    begin: int
    end: int

    @property
    def seconds(self) -> float:
        return max(self.end - self.begin, 1) / 1e9


def measured_span(events: Events) -> Span:
    """The window of a run: what its head says, without the warm-up that MSER cuts off by the latency of requests in
    their order. Where less than half of the answers had ended by then, as of an open loop that the system cannot keep
    up with or of fewer conversations than workers, it goes on to the last answer's end."""
    head = events.head
    completed = [each for each in measured(events) if each.completed]
    ends = [each.end or 0 for each in completed]
    end = head.end if 2 * sum(moment <= head.end for moment in ends) >= len(ends) else max(ends)
    inside = [each for each in completed if each.dispatched <= end]
    cut = warm_up_length(np.array([_e2e(each) or 0.0 for each in inside]))
    return Span(inside[cut].dispatched if cut else head.begin, end)


def measured(events: Events) -> list[RequestEvents]:
    """All requests but probes."""
    return [request for request in events.requests if not request.probe]


def in_span(requests: Iterable[RequestEvents], span: Span) -> list[RequestEvents]:
    """The completed requests that were dispatched in it."""
    return [each for each in requests if each.completed and span.begin <= each.dispatched <= span.end]


def figures(events: Events, span: Span | None = None) -> dict[str, Figure]:
    """All metrics of a run that have values. span: None takes `measured_span`."""
    return {name: figure for name, figure in all_figures(events, span).items() if figure.n}


def all_figures(events: Events, span: Span | None = None) -> dict[str, Figure]:
    """All metrics of a run, also those that no request has a value of (their n is 0)."""
    span = span or measured_span(events)
    requests = in_span(measured(events), span)
    rows = {name: of_requests(metric, requests) for name, metric in METRICS.items()}
    rows["itl"] = gaps_of(requests)
    rows |= throughput(events, span)
    if not _all_parts_known(events):  # when tokens came within the window is not known
        rows["answer_rate"] = msgspec.structs.replace(rows["answer_rate"], n=0, value=None)
    return rows


def _all_parts_known(events: Events) -> bool:
    return all(request.parts is None for request in measured(events))


def gaps_of(requests: Iterable[RequestEvents]) -> Figure:
    """The gaps between parts of answers, which are tokens where servers send each in a part of its own."""
    gaps = [gap for request in requests if request.parts is None for gap in np.diff(request.chunks).tolist()]
    what = "gaps between parts of the answer, of all requests together"
    return distribution(what, "ms", np.array(gaps) * NS_MS, independent=False)


def of_requests(metric: Metric, requests: Iterable[RequestEvents]) -> Figure:
    """The metric over requests."""
    values = [value for request in requests if (value := metric.of(request)) is not None]
    return distribution(metric.definition, metric.unit, np.array(values))


def distribution(definition: str, unit: str, values: Values, independent: bool = True) -> Figure:
    """A figure of many values, with the percentiles that there are enough of them for. independent: whether they are,
    as those of requests, and unlike gaps of one answer: only then there is an interval of the median."""
    if not len(values):
        return Figure(definition=definition, unit=unit, n=0)
    p50, p90, p95, p99 = (percentile(values, share) for share in (0.5, 0.9, 0.95, 0.99))
    return Figure(
        definition=definition,
        unit=unit,
        n=len(values),
        mean=float(values.mean()),
        sd=float(values.std(ddof=1)) if len(values) > 1 else None,
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        ci95=percentile_interval(values, 0.5) if independent else None,
    )


def throughput(events: Events, span: Span) -> dict[str, Figure]:
    """Requests and tokens a second within the window, with intervals by batch means over slices of it."""
    edges = np.linspace(span.begin, span.end, SLICES + 1)
    ends = [each.end for each in measured(events) if each.completed and each.end is not None]
    moments, weights = deliveries(measured(events))
    rows = {}
    for name, unit, at, counts in (
        ("request_rate", "requests/s", np.array(ends, dtype=float), np.ones(len(ends))),
        ("answer_rate", "tokens/s", moments, weights),
    ):
        sums, _ = np.histogram(at, edges, weights=counts)
        rates = sums / (span.seconds / SLICES)
        known = name == "request_rate" or _all_parts_known(events)
        interval = batch_means_interval(rates) if known and np.count_nonzero(sums) == SLICES else None
        what = "completed requests" if name == "request_rate" else "answer tokens, a request's spread over its parts,"
        rows[name] = Figure(
            definition=f"{what} within the window / its seconds",
            unit=unit,
            n=int(np.count_nonzero((at >= span.begin) & (at <= span.end))),
            value=float(sums.sum() / span.seconds),
            ci95=interval,
        )
    prompts = [each for each in measured(events) if each.completed and each.prompt_tokens is not None]
    inside = [each.prompt_tokens or 0 for each in prompts if span.begin <= each.chunks[0] <= span.end]
    rows["prompt_rate"] = Figure(
        definition="prompt tokens of the requests whose first part came within the window / its seconds",
        unit="tokens/s",
        n=len(inside),
        value=sum(inside) / span.seconds,
    )
    return rows


def deliveries(requests: Iterable[RequestEvents]) -> tuple[Values, Values]:
    """(moments, tokens) of all parts of answers, of requests that failed too: what they got was delivered."""
    moments: list[int] = []
    weights: list[float] = []
    for request in requests:
        if request.chunks:
            moments += request.chunks
            weights += [answer_tokens(request) / len(request.chunks)] * len(request.chunks)
    return np.array(moments, dtype=float), np.array(weights, dtype=float)


@dataclass(frozen=True)
class Objective:
    """What a service promises of nearly all requests, in milliseconds. share: of the requests that must be within."""

    ttft: float
    tpot: float
    share: float = 0.99


# MLPerf Inference, server and interactive scenarios (loadgen/mlperf.conf): the 99th percentiles of TTFT and TPOT.
OBJECTIVES = {
    "mlperf:llama2-70b": Objective(2000, 200),
    "mlperf:llama2-70b-interactive": Objective(450, 40),
    "mlperf:llama3.1-8b": Objective(2000, 100),
    "mlperf:llama3.1-8b-interactive": Objective(500, 30),
    "mlperf:llama3.1-405b": Objective(6000, 175),
    "mlperf:llama3.1-405b-interactive": Objective(4500, 80),
    "mlperf:mixtral-8x7b": Objective(2000, 200),
    "mlperf:deepseek-r1": Objective(2000, 80),
    "mlperf:deepseek-r1-interactive": Objective(1500, 15),
}


def objective_named(name: str) -> Objective:
    """Raises ConfigError for a name that OBJECTIVES does not have."""
    if name not in OBJECTIVES:
        raise ConfigError(unknown("objective", name, OBJECTIVES))
    return OBJECTIVES[name]


def goodput(events: Events, objective: Objective, span: Span | None = None) -> dict[str, Figure]:
    """Requests a second that keep the objective, and the share that they are of all that were sent.

    Moments count from `scheduled`: a request that waited in the client has waited. Requests that failed keep nothing.
    Where a planned moment is not known, there is no goodput: n is 0.
    """
    span = span or measured_span(events)
    sent = [each for each in measured(events) if span.begin <= each.dispatched <= span.end]
    good = [each for each in sent if each.completed and _keeps(each, objective)]
    rule = f"TTFT from scheduled <= {objective.ttft:g} ms and TPOT <= {objective.tpot:g} ms"
    count = len(sent) if all(each.scheduled is not None for each in sent) else 0
    in_time = sum(each.end is not None and each.end <= span.end for each in good)
    return {
        "goodput": Figure(
            definition=f"requests with {rule} that completed within the window / its seconds",
            unit="requests/s",
            n=count,
            value=in_time / span.seconds,
        ),
        "good_share": Figure(
            definition=f"requests with {rule} / all that were sent; the objective is {objective.share:.0%}",
            unit="1",
            n=count,
            value=len(good) / len(sent) if sent else 0.0,
        ),
    }


def _keeps(request: RequestEvents, objective: Objective) -> bool:
    ttft, tpot = _corrected_ttft(request), _tpot(request)
    return ttft is not None and ttft <= objective.ttft and (tpot is None or tpot <= objective.tpot)


def counts(events: Events) -> Counts:
    """How the requests ended, and their tokens. Requests without an end were under way when the run was ended."""
    requests = measured(events)
    completed = [each for each in requests if each.completed]
    failed = [each for each in requests if each.error is not None]
    return Counts(
        completed=len(completed),
        failed=len(failed),
        unfinished=len(requests) - len(completed) - len(failed),
        prompt_tokens=sum(each.prompt_tokens or 0 for each in completed),
        answer_tokens=sum(answer_tokens(each) for each in completed),
        cached_tokens=sum(each.cached_tokens or 0 for each in completed),
        tokens_by="server" if all(each.completion_tokens is not None for each in completed) else "chunks",
    )


def lengths(values: Sequence[int]) -> Lengths:
    """Of prompts or answers, zeros of none."""
    if not values:
        return Lengths(mean=0.0, p50=0.0, p95=0.0, most=0)
    p50, p95 = np.quantile(values, [0.5, 0.95]).tolist()
    return Lengths(mean=float(np.mean(values)), p50=p50, p95=p95, most=max(values))


def most_in_flight(events: Events) -> int:
    """The most requests, with probes, that were under way at a time."""
    steps = [(each.dispatched, 1) for each in events.requests]
    steps += [(each.end, -1) for each in events.requests if each.end is not None]
    now = most = 0
    for _, step in sorted(steps):
        now += step
        most = max(most, now)
    return most
