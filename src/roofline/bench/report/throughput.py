"""Charts of points under load: throughput over latency, over users, over concurrency."""

from collections.abc import Sequence
from dataclasses import dataclass

from roofline.bench.report import words
from roofline.bench.report.chart import Area, Axis, Chart, Mark, ReportSection, Rule, Series, Table
from roofline.bench.report.gather import CurveKind, Gathered
from roofline.bench.results.point import Figure, Point

FAR = 4.0  # times what was measured: a limit that needs a logarithmic axis
SAME = 0.01  # limits that differ by less are one line


@dataclass(frozen=True)
class Slo:
    """What users are promised, in milliseconds; None: nothing."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None


def sections(gathered: Gathered, slo: Slo) -> list[ReportSection]:
    """The charts of each traffic."""
    out = []
    for (preset, sha256), points in gathered.traffics().items():
        title = traffic_name(preset, sha256)
        parts = (_latency(gathered, points, slo), _users(gathered, points, slo), _sweep(gathered, points, slo))
        out += [
            ReportSection(f"{title}: {each.title}", each.text, each.charts, each.table)
            for each in parts
            if each is not None
        ]
    return out


def traffic_name(preset: str, sha256: str) -> str:
    """The traffic of a part of a report: plans have none that was sent."""
    return f"{preset} (traffic {sha256[:8]})" if sha256 else preset


def _latency(gathered: Gathered, points: Sequence[Point], slo: Slo) -> ReportSection | None:
    """Requests a second over the latency of requests, with the limit and the knee."""
    series: list[Series] = []
    knees: list[str] = []
    for kind, own in gathered.curves(points).items():
        for name, part in by_arrivals(gathered.name(kind), own):
            usable = [point for point in part if _pair(point) is not None]
            if not usable:
                continue
            best = passed_knee(usable)
            look = gathered.kinds[kind]
            marks = tuple(_latency_mark(point, best is point) for point in usable)
            series.append(Series(name=name, marks=marks, look=look, dashed=name != gathered.name(kind)))
            if len(usable) > 2:
                last = f"not reached by {words.load_name(usable[-1])}, the highest load"
                knees.append(f"{name}: {last if best is None else words.load_name(best)}")
    if not series:
        return None
    series += _limits(gathered, points)
    chart = Chart(
        title="throughput over latency",
        x=Axis(title="latency of a request, mean, s", log=True),
        y=Axis(title="requests/s", zero=True, log=_far_apart(series)),
        series=tuple(series),
        areas=() if slo.e2e is None else (Area("x", slo.e2e / 1000, None, "later than promised"),),
    )
    text = (
        "Up and to the left is better. The numbers beside points are workers or the offered rate; bars are 95 % "
        "intervals. The limit is what the roofs allow: a closed loop of as many workers cannot be further to the left. "
    )
    if knees:
        text += f"The knee is the point with the most throughput for its latency: {'; '.join(knees)}."
    several = sum(len(each.marks) for each in series) > 1
    return ReportSection("throughput and latency", text, (chart,) if several else (), _point_table(gathered, points))


def _limits(gathered: Gathered, points: Sequence[Point]) -> list[Series]:
    """The limit of each curve; systems that have the same on one machine share a line."""
    lines: list[tuple[CurveKind, dict[int, Mark]]] = []
    for kind, own in gathered.curves(points).items():
        marks = {
            count: mark for point in own if (mark := _limit_mark(point)) is not None and (count := _workers(point))
        }
        if len(marks) < 2:
            continue
        for other, line in lines:
            common = marks.keys() & line.keys()
            if other.place == kind.place and common and all(_alike(marks[each], line[each]) for each in common):
                line.update(marks)
                break
        else:
            lines.append((kind, marks))
    several = len({kind.place for kind, _ in lines}) < len(lines)
    return [
        Series(
            name=f"limit of {gathered.name(kind) if several else kind.place}",
            marks=tuple(sorted(line.values(), key=lambda mark: mark.x)),
            look=gathered.kinds[kind],
            kind="line",
            dashed=True,
        )
        for kind, line in lines
    ]


def _far_apart(series: Sequence[Series]) -> bool:
    """Whether the limit is so much higher than what was measured that only a logarithm shows the two."""
    lines, curves = (
        [mark.y for each in series if (each.kind == "line") is line for mark in each.marks] for line in (True, False)
    )
    return bool(lines) and max(lines) > FAR * max(curves)


def _alike(mark: Mark, other: Mark) -> bool:
    return abs(mark.y / other.y - 1) < SAME


def _workers(point: Point) -> int:
    return point.load.concurrency or 0 if point.load is not None and point.load.arrivals == "closed" else 0


def by_arrivals(name: str, points: Sequence[Point]) -> list[tuple[str, list[Point]]]:
    """Closed loops, each kind of scheduled arrivals, and each length of prompts as curves of their own."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        if point.load is not None:
            prompt = words.prompt_length(point)
            parts: list[str] = [] if point.load.arrivals == "closed" else [point.load.arrivals]
            parts += [] if prompt is None else [f"prompts of {prompt:,}"]
            groups.setdefault(", ".join((name, *parts)), []).append(point)
    return list(groups.items())


def _pair(point: Point) -> tuple[float, float] | None:
    """(mean latency in seconds, requests a second), None where one of the two is not known."""
    latency, rate = words.mean(point, words.E2E), words.metric(point, words.REQUESTS)
    return None if not latency or not rate else (latency / 1000, rate)


def knee(points: Sequence[Point]) -> Point | None:
    """The point with the highest throughput divided by its latency."""
    pairs = [(pair[1] / pair[0], number) for number, point in enumerate(points) if (pair := _pair(point)) is not None]
    return points[max(pairs)[1]] if pairs else None


def passed_knee(points: Sequence[Point]) -> Point | None:
    """The knee of a curve whose points are in the order of their loads; None where it was not reached: of fewer than
    three points, and where the highest load still has the most throughput for its latency."""
    best = knee(points)
    if best is None or len(points) < 3 or words.load_name(best) == words.load_name(points[-1]):
        return None
    return best


def _latency_mark(point: Point, is_knee: bool) -> Mark:
    pair = _pair(point)
    assert pair is not None
    figure = words.figure(point, words.E2E)
    around = None
    if figure is not None and figure.ci95 is not None and figure.mean is None:
        around = figure.ci95[0] / 1000, figure.ci95[1] / 1000
    return Mark(
        x=pair[0],
        y=pair[1],
        x_interval=around,
        y_interval=words.interval(point, words.REQUESTS),
        note=note(point),
        label=words.short_load(point) + (" knee" if is_knee else ""),
        trusted=words.trusted(point),
        doubt=words.doubt(point),
    )


def _limit_mark(point: Point) -> Mark | None:
    """Where the roofs would put a closed loop of as many workers: N requests in flight take N / throughput each."""
    requests = limit_requests(point)
    if requests is None or point.load is None or point.load.arrivals != "closed" or not point.load.concurrency:
        return None
    return Mark(x=point.load.concurrency / requests, y=requests)


def limit_requests(point: Point) -> float | None:
    """Requests a second that the limit allows, None where it is not known."""
    rate, share = words.metric(point, words.REQUESTS), words.share(point)
    return None if not rate or not share else rate / share


def note(point: Point) -> str:
    """What a pointer over a point shows."""
    shares = "" if words.share(point) is None else f", {words.percent(words.share(point))} of the limit"
    doubts = "" if words.trusted(point) else f", {words.doubt(point)}"
    rate = words.digits(words.metric(point, words.REQUESTS))
    flags = "".join(f", {flag}" for flag in point.validity.flags)
    return f"{words.load_name(point)}: {rate} requests/s{shares}{doubts}, grade {point.validity.grade}{flags}"


def devices(point: Point) -> int:
    """Devices that the point's tokens are made on."""
    return max(1, sum(device.count for device in point.devices))


def _users(gathered: Gathered, points: Sequence[Point], slo: Slo) -> ReportSection | None:
    """Speed for a user over tokens a device makes, and which points no other one beats."""
    series: list[Series] = []
    places: list[tuple[float, float]] = []
    rows: list[tuple[str, ...]] = []
    for kind, own in gathered.curves(points).items():
        for name, part in by_arrivals(gathered.name(kind), own):
            pairs = [(point, mark) for point in part if (mark := _user_mark(point)) is not None]
            marks = tuple(mark for _, mark in pairs)
            dashed = name != gathered.name(kind)
            series += [Series(name=name, marks=marks, look=gathered.kinds[kind], dashed=dashed)] if marks else []
            places += [(mark.x, mark.y) for mark in marks if mark.trusted]
            rows += [(name, words.load_name(at), words.digits(mark.x), words.digits(mark.y)) for at, mark in pairs]
    if not series:
        return None
    front = pareto(places)
    if len(front) > 1:
        marks_of_front = tuple(Mark(x=x, y=y) for x, y in front)
        series.insert(0, Series(name="best trade-offs", marks=marks_of_front, look=7, kind="line", dashed=True))
    on_front = {(words.digits(x), words.digits(y)) for x, y in front}
    chart = Chart(
        title="tokens/s of a user and of a device",
        x=Axis(title="tokens/s of a user (1 / TPOT)", zero=True),
        y=Axis(title="tokens/s of a device", zero=True),
        series=tuple(series),
        areas=() if slo.tpot is None else (Area("x", None, 1000 / slo.tpot, "slower than promised"),),
    )
    table = Table(
        ("system", "load", "tokens/s of a user", "tokens/s of a device", "best trade-off"),
        tuple((*row, "yes" if row[2:4] in on_front else "no") for row in rows),
    )
    text = "Up and to the right is better. On the dashed line no other trusted point is better in both."
    return ReportSection("users and devices", text, (chart,) if len(rows) > 1 else (), table)


def _user_mark(point: Point) -> Mark | None:
    """None where speed or throughput are not known."""
    tpot, tokens, around = words.metric(point, words.TPOT), words.metric(point, words.TOKENS), None
    if not tpot or not tokens:
        return None
    if (ends := words.interval(point, words.TOKENS)) is not None:
        around = ends[0] / devices(point), ends[1] / devices(point)
    return Mark(
        x=1000 / tpot,
        y=tokens / devices(point),
        y_interval=around,
        note=note(point),
        label=words.short_load(point),
        trusted=words.trusted(point),
        doubt=words.doubt(point),
    )


def pareto(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other place exceeds in one coordinate without being less in the other, by ascending x."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(set(places), key=lambda place: (-place[0], -place[1])):
        if not front or y > front[-1][1]:
            front.append((x, y))
    return front[::-1]


def _sweep(gathered: Gathered, points: Sequence[Point], slo: Slo) -> ReportSection | None:
    """Tokens a second, time to the first token, and failures over concurrency."""
    closed = [point for point in points if point.load and point.load.arrivals == "closed" and point.load.concurrency]
    if len({point.load.concurrency for point in closed if point.load}) < 2:
        return None
    x = Axis(title="workers", log=True, doubling=True)
    ttft_rules = () if slo.ttft is None else (Rule("y", slo.ttft, "promised"),)
    charts = (
        Chart(title="tokens/s of answers", x=x, y=Axis(title="tokens/s", zero=True),
              series=_over_workers(gathered, closed, words.TOKENS)),
        Chart(title="time to the first token", x=x, y=Axis(title="TTFT p50, ms", log=True),
              series=_over_workers(gathered, closed, words.TTFT), rules=ttft_rules),
        Chart(title="requests that failed", x=x, y=Axis(title="failed, %", zero=True, most=1.0),
              series=_failures(gathered, closed)),
    )  # fmt: skip
    text = "What more workers bring, and what it costs those who wait. The p99 of fewer than 299 requests is not told."
    return ReportSection("concurrency", text, tuple(c for c in charts if not c.empty), _sweep_table(gathered, closed))


def _sweep_table(gathered: Gathered, points: Sequence[Point]) -> Table:
    """With goodput where any of the points was measured under a promise."""
    promised = any(words.GOODPUT in point.metrics for point in points)
    rows = []
    for kind, own in gathered.curves(points).items():
        for point in own:
            failed = _failed(point)
            rows.append(
                (
                    gathered.name(kind), words.load_name(point),
                    words.with_interval(words.metric(point, words.TOKENS), words.interval(point, words.TOKENS)),
                    *_percentiles(words.figure(point, words.TTFT)), "-" if failed is None else f"{failed:.2f} %",
                    *([_goodput(point)] if promised else []),
                )
            )  # fmt: skip
    headings = ("system", "load", "tokens/s", "TTFT p50, ms", "TTFT p95, ms", "TTFT p99, ms", "failed")
    return Table((*headings, *(["goodput, requests/s"] if promised else [])), tuple(rows))


def _goodput(point: Point) -> str:
    return words.with_interval(words.metric(point, words.GOODPUT), words.interval(point, words.GOODPUT))


def _over_workers(gathered: Gathered, points: Sequence[Point], name: str) -> tuple[Series, ...]:
    out = []
    for kind, own in gathered.curves(points).items():
        marks = []
        for point in own:
            value = words.metric(point, name)
            if value is not None and point.load is not None and point.load.concurrency:
                around = words.interval(point, name)
                marks.append(
                    Mark(
                        x=point.load.concurrency, y=value, y_interval=around, note=note(point),
                        trusted=words.trusted(point), doubt=words.doubt(point),
                    )
                )  # fmt: skip
        if marks:
            out.append(Series(name=gathered.name(kind), marks=tuple(marks), look=gathered.kinds[kind]))
    return tuple(out)


def _failures(gathered: Gathered, points: Sequence[Point]) -> tuple[Series, ...]:
    """The share of each level that failed; nothing where none did, which the table says."""
    out = []
    for kind, own in gathered.curves(points).items():
        shares = [(point, _failed(point)) for point in own]
        marks = tuple(
            Mark(
                x=point.load.concurrency,
                y=share,
                trusted=words.trusted(point),
                doubt=words.doubt(point),
                note=note(point),
            )
            for point, share in shares
            if share is not None and point.load is not None and point.load.concurrency is not None
        )
        if marks:
            out.append(Series(name=gathered.name(kind), marks=marks, look=gathered.kinds[kind]))
    failed = any(mark.y for series in out for mark in series.marks)
    return tuple(out) if failed else ()


def _failed(point: Point) -> float | None:
    """The share of requests that failed, or were answered without text, in %."""
    counts = point.counts
    if counts is None:
        return None
    without = counts.failed + counts.empty
    ended = counts.completed + without
    return 100 * without / ended if ended else None


def _percentiles(figure: Figure | None) -> tuple[str, str, str]:
    if figure is None:
        return "-", "-", "-"
    return words.digits(figure.p50), words.digits(figure.p95), words.digits(figure.p99)


def _point_table(gathered: Gathered, points: Sequence[Point]) -> Table:
    """All that the chart shows, and what is said of each point; goodput where something was promised."""
    promised = any(words.GOODPUT in point.metrics for point in points)
    rows = []
    for kind, own in gathered.curves(points).items():
        for point in own:
            pair = _pair(point)
            limit = point.limit
            rows.append(
                (
                    gathered.name(kind), words.load_name(point),
                    words.with_interval(words.metric(point, words.REQUESTS), words.interval(point, words.REQUESTS)),
                    words.with_interval(words.metric(point, words.TOKENS), words.interval(point, words.TOKENS)),
                    "-" if pair is None else words.digits(pair[0]),
                    *([_goodput(point)] if promised else []),
                    words.percent(None if limit is None else limit.share_of_measured),
                    words.percent(None if limit is None else limit.share_of_sheet),
                    "-" if limit is None else limit.bound,
                    words.client(point),
                    ", ".join((point.validity.grade, *point.validity.flags)),
                )
            )  # fmt: skip
    headings = (
        "system", "load", "requests/s", "tokens/s", "mean latency, s", *(["goodput, requests/s"] if promised else []),
        "of measured roof", "of data sheet", "bound", "client", "grade",
    )  # fmt: skip
    return Table(headings, tuple(rows))
