"""Figures from raw events: each a pure function of them, under a definition that is printed beside its number.

Latencies are of the requests that were dispatched within the window and completed, also where that was after its end:
to leave those out would favour the short ones. Throughput is of the same requests (`rates.py`). Probes are in no
figure.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from roofline.bench.load.events import Events, RequestEvents
from roofline.bench.results.backlog import falls_behind
from roofline.bench.results.objectives import Objective
from roofline.bench.results.point import Counts, Figure, Lengths
from roofline.bench.results.rates import Amount, rate_of
from roofline.bench.results.statistics import Values, percentile, serial_percentile_interval
from roofline.bench.results.window import Span, in_span, lap_of, measured, measured_span

Of = Callable[[RequestEvents], float | None]  # a request's value, None where it has none
NS_MS = 1e-6
BURST_GAP = 0.05  # milliseconds between parts of an answer, below which they are what a client reads in one go


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


def first_part(request: RequestEvents) -> int | None:
    """When the first part of the answer came, None where there is none or nothing tells when."""
    return request.chunks[0] if request.chunks and request.first_known else None


def _ttft(request: RequestEvents) -> float | None:
    first = first_part(request)
    return None if first is None else (first - request.dispatched) * NS_MS


def _corrected_ttft(request: RequestEvents) -> float | None:
    first = first_part(request)
    return None if first is None or request.scheduled is None else (first - request.scheduled) * NS_MS


def _tpot(request: RequestEvents) -> float | None:
    tokens = answer_tokens(request)
    if tokens < 2 or first_part(request) is None or at_once(request):
        return None
    return (request.chunks[-1] - request.chunks[0]) * NS_MS / (tokens - 1)


def at_once(request: RequestEvents) -> bool:
    """Whether an answer of several tokens came at one moment, or in one burst, as from behind a proxy that holds it
    back: then nothing tells how long a token took."""
    if answer_tokens(request) < 2 or not request.chunks:
        return False
    parts = len(request.chunks) if request.parts is None else request.parts
    return (request.chunks[-1] - request.chunks[0]) * NS_MS <= BURST_GAP * max(parts - 1, 0)


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
    "tpot": Metric(
        "(last part - first part) / (answer tokens - 1), of answers that come in several parts", "ms", _tpot
    ),
    "e2e": Metric("last byte - dispatched", "ms", _e2e),
    "e2e_corrected": Metric("last byte - scheduled", "ms", _corrected_e2e),
    "decode_rate": Metric("(answer tokens - 1) / (last part - first part)", "tokens/s", _decode_rate),
}


def figures(events: Events, span: Span | None = None) -> dict[str, Figure]:
    """All metrics of a run that have values. span: None takes `measured_span`."""
    return {name: figure for name, figure in all_figures(events, span).items() if figure.n}


def all_figures(events: Events, span: Span | None = None) -> dict[str, Figure]:
    """All metrics of a run, also those that no request has a value of (their n is 0)."""
    span = span or measured_span(events)
    requests = in_span(measured(events), span)
    rows = {name: of_requests(metric, requests, lap_of(events)) for name, metric in METRICS.items()}
    rows["itl"] = gaps_of(requests)
    return rows | throughput(events, span)


def gaps_of(requests: Iterable[RequestEvents]) -> Figure:
    """The gaps between parts of answers, which are tokens where servers send each in a part of its own."""
    gaps = [gap for request in requests if request.parts is None for gap in np.diff(request.chunks).tolist()]
    what = "gaps between parts of the answer, of all requests together"
    return distribution(what, "ms", np.array(gaps) * NS_MS, independent=False)


def of_requests(metric: Metric, requests: Iterable[RequestEvents], beside: int = 1) -> Figure:
    """The metric over requests. beside: how many of them were under way at a time."""
    values = [value for request in requests if (value := metric.of(request)) is not None]
    return distribution(metric.definition, metric.unit, np.array(values), beside=beside)


def distribution(definition: str, unit: str, values: Values, independent: bool = True, beside: int = 1) -> Figure:
    """A figure of many values in their order, with the percentiles that there are enough of them for. independent:
    whether they are of a request each, unlike gaps of one answer: only then there is an interval of the median; beside:
    how many of them came at a time."""
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
        ci95=serial_percentile_interval(values, 0.5, beside) if independent else None,
    )


RATES: dict[str, tuple[str, str, Amount]] = {
    "request_rate": ("completed requests", "requests/s", lambda request: float(request.completed)),
    "answer_rate": ("answer tokens", "tokens/s", lambda request: delivered_tokens(request)),
    "prompt_rate": ("prompt tokens of completed requests", "tokens/s", lambda request: _prompt_tokens(request)),
}


def throughput(events: Events, span: Span) -> dict[str, Figure]:
    """Requests and tokens a second, with intervals."""
    how = way_of_rates(events)
    return {name: _rate_figure(events, span, f"{what} {how}", unit, of) for name, (what, unit, of) in RATES.items()}


def way_of_rates(events: Events) -> str:
    """How a rate is computed for the run's arrivals, as the end of its definition."""
    arrivals = events.head.arrivals
    if arrivals == "closed":
        return "of the window * requests in flight / the time that its requests took"
    if arrivals == "batch":
        return "of all rounds / the time that these took"
    if falls_behind(events):
        return "/ the time from end to end of answers"
    return "/ requests of the window * requests offered a second"


def _rate_figure(events: Events, span: Span, definition: str, unit: str, amount: Amount) -> Figure:
    rate = rate_of(events, span, amount)
    return Figure(definition=definition, unit=unit, n=rate.n, value=rate.value, ci95=rate.interval)


def delivered_tokens(request: RequestEvents) -> float:
    """Tokens that came, of a request that failed too: what it got was delivered."""
    return float(answer_tokens(request)) if request.chunks else 0.0


def _prompt_tokens(request: RequestEvents) -> float:
    return float(request.prompt_tokens or 0) if request.completed else 0.0


def deliveries(requests: Iterable[RequestEvents]) -> tuple[Values, Values]:
    """(moments, tokens) of all parts of answers, of requests that failed too: what they got was delivered."""
    moments: list[int] = []
    weights: list[float] = []
    for request in requests:
        if request.chunks:
            moments += request.chunks
            weights += [answer_tokens(request) / len(request.chunks)] * len(request.chunks)
    return np.array(moments, dtype=float), np.array(weights, dtype=float)


def goodput(events: Events, objective: Objective, span: Span | None = None) -> dict[str, Figure]:
    """Requests a second that keep the objective, and the share that they are of all that were sent.

    Moments count from `scheduled`: a request that waited in the client has waited. Requests that failed keep nothing.
    Where a planned moment is not known, or a first part that has a limit, there is no goodput: n is 0.
    """
    span = span or measured_span(events)
    sent = [each for each in measured(events) if span.begin <= each.dispatched <= span.end]
    good = sum(_is_good(each, objective) for each in sent)
    rule = objective.rule
    count = len(sent) if all(_can_be_judged(each, objective) for each in sent) else 0
    return {
        "goodput": _goodput_rate(events, objective, span, count, good / len(sent) if sent else 0.0),
        "good_share": Figure(
            definition=f"requests with {rule} / all that were sent; the objective is {objective.share:.0%}",
            unit="1",
            n=count,
            value=good / len(sent) if sent else 0.0,
        ),
    }


def _goodput_rate(events: Events, objective: Objective, span: Span, count: int, share: float) -> Figure:
    """Of a server that falls behind, the share of the window's requests times the rate of ends: the ends that the rate
    is taken from are also those of the first lap, which found no backlog."""
    if falls_behind(events):
        ends = rate_of(events, span, lambda request: 1.0)
        what = "/ all that were sent * requests that end a second"
        value, interval = share * ends.value, None
    else:
        rate = rate_of(events, span, lambda request: float(_is_good(request, objective)))
        what, value, interval = way_of_rates(events), rate.value, rate.interval
    definition = f"requests with {objective.rule} {what}"
    return Figure(definition=definition, unit="requests/s", n=count, value=value, ci95=interval)


def good_share(events: Events, objective: Objective) -> float:
    """The share of all requests of a run, probes apart, that keep the objective."""
    sent = measured(events)
    return sum(_is_good(each, objective) for each in sent) / len(sent) if sent else 0.0


def _can_be_judged(request: RequestEvents, objective: Objective) -> bool:
    return request.scheduled is not None and (request.first_known or math.isinf(objective.ttft))


def _is_good(request: RequestEvents, objective: Objective) -> bool:
    return request.completed and _keeps(request, objective)


def _keeps(request: RequestEvents, objective: Objective) -> bool:
    ttft, tpot, latency = _corrected_ttft(request), _tpot(request), _corrected_e2e(request)
    if tpot is None and at_once(request):  # then it is at most as long as all of the answer over its tokens
        tpot = (_e2e(request) or 0.0) / (answer_tokens(request) - 1)
    if latency is None or (ttft is None and request.first_known):
        return False
    limited = ((ttft, objective.ttft), (tpot, objective.tpot), (latency, objective.e2e))
    return all(value is None or value <= limit for value, limit in limited)


def counts(events: Events) -> Counts:
    """How the requests ended, and their tokens. Requests without an end were under way when the run was ended."""
    requests = measured(events)
    completed = [each for each in requests if each.completed]
    failed = [each for each in requests if each.error is not None]
    empty = sum(each.empty for each in requests)
    return Counts(
        completed=len(completed),
        failed=len(failed),
        unfinished=len(requests) - len(completed) - len(failed) - empty,
        empty=empty,
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
