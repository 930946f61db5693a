"""Charts from raw events of points: distributions of latencies, the course of a run, where the first token waits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from roofline.bench.load.events import Events, RequestEvents
from roofline.bench.report import words
from roofline.bench.report.chart import Area, Axis, Chart, Mark, ReportSection, Series, Table
from roofline.bench.report.gather import CurveKind, Gathered, kind_of
from roofline.bench.report.throughput import knee
from roofline.bench.results.point import Point
from roofline.bench.results.statistics import Values, percentile, percentile_interval
from roofline.bench.results.window import Span, in_span, measured, measured_span

MOST_STEPS = 120  # of a distribution's line
BINS = 60  # of the course of a run
NS_PER_MS, NS_PER_S = 1e6, 1e9
# Parts of the time to the first token, in their order: name, first moment, last moment.
PARTS = (
    ("late", "scheduled", "dispatched"),
    ("connect", "dispatched", "connected"),
    ("send", "connected", "sent"),
    ("answer's head", "sent", "headers"),
    ("first byte", "headers", "first_byte"),
    ("first token", "first_byte", "first_token"),
)


@dataclass(frozen=True)
class NamedEvents:
    """The events of a point that counts, with its name."""

    point: Point
    events: Events
    name: str
    look: int

    @property
    def counted(self) -> list[RequestEvents]:
        """Requests that were answered, and taken up within the span that figures are taken from; without probes."""
        return in_span(measured(self.events), self.span)

    @property
    def span(self) -> Span:
        """Between the moments at which these were taken up."""
        return measured_span(self.events)


def sections(gathered: Gathered) -> list[ReportSection]:
    """Nothing where no point has events."""
    runs = _chosen(gathered)
    if not runs:
        return []
    return [_distributions(runs), _course(_knees(runs)), _waterfall(gathered)]


def _chosen(gathered: Gathered) -> list[NamedEvents]:
    """Of each curve the points with events of the lowest and of the highest load, and the knee: charts with more lines
    are not read."""
    runs: list[NamedEvents] = []
    for kind, points in gathered.curves(gathered.points).items():
        points_with_events = [point for point in points if point.id in gathered.events]
        best = knee(points_with_events)
        chosen = [
            point
            for point in points_with_events
            if point in (points_with_events[0], points_with_events[-1]) or point is best
        ]
        for point in chosen:
            name = f"{gathered.name(kind)}, {words.load_name(point)}"
            runs.append(NamedEvents(point, gathered.events[point.id], name, len(runs)))
    return runs


def _knees(runs: Sequence[NamedEvents]) -> list[NamedEvents]:
    """Of each curve the run at its knee: runs of other loads last longer or shorter."""
    groups: dict[CurveKind, list[NamedEvents]] = {}
    for run in runs:
        groups.setdefault(kind_of(run.point), []).append(run)
    bests = [(knee([run.point for run in own]), own) for own in groups.values()]
    return [next((run for run in own if run.point is best), own[0]) for best, own in bests]


def ttft(request: RequestEvents) -> float:
    """Milliseconds from the moment the request was planned for to the first part of its answer."""
    return (request.chunks[0] - request.planned) / NS_PER_MS


def tpot(request: RequestEvents) -> float | None:
    """Milliseconds of a token after the first, None of an answer without a second one."""
    tokens = request.completion_tokens or 0
    if tokens < 2 or len(request.chunks) < 2:
        return None
    return (request.chunks[-1] - request.chunks[0]) / (tokens - 1) / NS_PER_MS


def e2e(request: RequestEvents) -> float:
    """Milliseconds from the moment the request was planned for to the end of its answer."""
    assert request.end is not None, "a request that is completed"
    return (request.end - request.planned) / NS_PER_MS


def _distributions(runs: Sequence[NamedEvents]) -> ReportSection:
    metrics: tuple[tuple[str, Callable[[RequestEvents], float | None]], ...] = (
        ("TTFT", ttft),
        ("TPOT", tpot),
        ("latency", e2e),
    )
    charts, rows = [], []
    for name, of in metrics:
        series = []
        for run in runs:
            values = sorted(value for request in run.counted if (value := of(request)) is not None)
            if not values:
                continue
            series.append(Series(name=run.name, marks=_steps(values), look=run.look, kind="steps"))
            quantiles = (_quantile(np.array(values), part) for part in (0.5, 0.95, 0.99))
            rows.append((run.name, name, f"{len(values):,}", *quantiles))
        charts.append(
            Chart(
                title=f"{name}: share of requests that took no longer",
                x=Axis(title=f"{name}, ms", log=True),
                y=Axis(title="requests, %", least=0.0, most=100.0),
                series=tuple(series),
            )
        )
    headings = ("run", "metric", "requests", "p50, ms", "p95, ms", "p99, ms")
    text = (
        "Counted from the moment for which a request was planned, so that waiting in the client is in it. In brackets "
        "the 95 % interval of each percentile, by the order of the values; a p99 needs 299 requests, a p95 59."
    )
    return ReportSection("distributions", text, tuple(c for c in charts if not c.empty), Table(headings, tuple(rows)))


def _steps(values: Sequence[float]) -> tuple[Mark, ...]:
    """The distribution's line, of at most MOST_STEPS steps."""
    count = len(values)
    places = range(1, count + 1) if count <= MOST_STEPS else (
        round(step * count / MOST_STEPS) for step in range(1, MOST_STEPS + 1)
    )  # fmt: skip
    first = Mark(x=values[0], y=0.0)
    return (first, *(Mark(x=values[place - 1], y=100 * place / count) for place in places))


def _quantile(values: Values, part: float) -> str:
    """The quantile with its interval, "-" where there are too few values for it."""
    return words.with_interval(percentile(values, part), percentile_interval(values, part))


def _course(runs: Sequence[NamedEvents]) -> ReportSection:
    """Tokens a second and requests in flight over the run, what does not count shaded."""
    flows, flights, rows = [], [], []
    for run in runs:
        head, requests = run.events.head, run.events.requests
        last = max([head.end, *(request.end or request.dispatched for request in requests)])
        width = last / BINS
        tokens, flying = [0.0] * BINS, [0.0] * BINS
        for each in requests:
            parts = len(each.chunks)
            for at in each.chunks:
                tokens[_bin(at, width)] += (each.completion_tokens or parts) / parts
            _add_span(flying, each.planned, each.end if each.end is not None else last, width)
        middles = [(number + 0.5) * width / NS_PER_S for number in range(BINS)]
        flow = [count * NS_PER_S / width for count in tokens]
        pairs = zip(middles, flow, strict=True)
        flows.append(Series(name=run.name, marks=tuple(Mark(x=x, y=y) for x, y in pairs), look=run.look, kind="line"))
        pairs = zip(middles, flying, strict=True)
        flights.append(Series(name=run.name, marks=tuple(Mark(x=x, y=y) for x, y in pairs), look=run.look, kind="line"))
        span = run.span
        rows.append(
            (run.name, words.digits(span.begin / NS_PER_S), words.digits(span.seconds), f"{len(run.counted):,}",
             run.point.window.method)
        )  # fmt: skip
    drawn = (("tokens of answers", "tokens/s", flows), ("requests under way", "requests", flights))
    charts = tuple(
        Chart(
            title=title,
            x=Axis(title="seconds since the beginning", zero=True),
            y=Axis(title=unit, zero=True),
            series=tuple(series),
            areas=_uncounted(runs),
        )
        for title, unit, series in drawn
    )
    headings = ("run", "warm-up, s", "counted, s", "requests that count", "how the warm-up was cut")
    text = "Figures are of requests that were sent between the shaded parts: it warms up before, and runs out behind."
    return ReportSection("the course of the runs", text, charts, Table(headings, tuple(rows)))


def _bin(at: float, width: float) -> int:
    return min(BINS - 1, max(0, int(at / width)))


def _add_span(bins: list[float], start: float, end: float, width: float) -> None:
    """Add to each bin the part of it that the span covers."""
    for number in range(_bin(start, width), _bin(end, width) + 1):
        covered = min(end, (number + 1) * width) - max(start, number * width)
        bins[number] += max(0.0, covered) / width


def _uncounted(runs: Sequence[NamedEvents]) -> tuple[Area, ...]:
    """The shaded parts that all runs have in common."""
    begin = min(run.span.begin for run in runs) / NS_PER_S
    end = max(run.span.end for run in runs) / NS_PER_S
    return Area("x", None, begin, "warm-up"), Area("x", end, None, "after")


def _waterfall(gathered: Gathered) -> ReportSection:
    """Where the time to the first token goes, on average, for each point with events."""
    names: list[str] = []
    bars, rows = [list[Mark]() for _ in PARTS], []
    for point in gathered.points:
        if point.id not in gathered.events:
            continue
        run = NamedEvents(point, gathered.events[point.id], "", 0)
        means = mean_parts(run.counted)
        if not any(means):
            continue
        name = f"{words.system_name(point)}, {words.load_name(point)}"
        reached = 0.0
        for number, mean in enumerate(means):
            note = f"{PARTS[number][0]}: {words.digits(mean)} ms"
            bars[number].append(Mark(x=reached, y=len(names), x_interval=(reached, reached + mean), note=note))
            reached += mean
        names.append(name)
        rows.append((name, *(words.digits(mean) for mean in means), words.digits(reached)))
    series = tuple(
        Series(name=part, marks=tuple(marks), look=look, kind="bars")
        for look, ((part, _, _), marks) in enumerate(zip(PARTS, bars, strict=True))
    )
    chart = Chart(
        title="where the first token waits",
        x=Axis(title="ms, mean", zero=True),
        y=Axis(title="", categories=tuple(names)),
        series=series,
    )
    headings = ("run", *(f"{part}, ms" for part, _, _ in PARTS), "TTFT, ms")
    text = (
        "Late is how much later than planned the client sent; then come the connection, the request, the server until "
        "the answer's head, its first byte, and the first byte's first token. A moment that was not recorded adds to "
        "the next."
    )
    return ReportSection("where the first token waits", text, (chart,), Table(headings, tuple(rows)))


def mean_parts(requests: Sequence[RequestEvents]) -> list[float]:
    """Mean milliseconds of each of PARTS. They add up to the mean TTFT."""
    sums = [0.0] * len(PARTS)
    for request in requests:
        before = request.planned
        for number, (_, _, name) in enumerate(PARTS):
            at = request.chunks[0] if name == "first_token" else getattr(request, name)
            at = min(at if at is not None else before, request.chunks[0])  # heads may come with the first token
            sums[number] += max(0, at - before) / NS_PER_MS
            before = max(before, at)
    return [total / len(requests) if requests else 0.0 for total in sums]
