"""A replay: what was published, what the data sheets allow, and what was measured here, on one page."""

from collections.abc import Sequence

from roofline.bench.replays.published import Publication, PublishedChart, Row, RowLimit, limit_of
from roofline.bench.report import words
from roofline.bench.report.chart import Axis, Chart, Mark, Rule, Section, Series, Table
from roofline.bench.report.gather import of_points
from roofline.bench.report.page import Report
from roofline.bench.results.point import Point

OURS = 6  # the look of what was measured here
WORDS = {"tokens/s": "tokens/s", "ms": "ms a step", "TFLOP/s": "TFLOP/s of a GPU", "ratio": "ratio"}


def replay(published: Publication, points: Sequence[Point]) -> Report:
    """points: measured here; impossible ones are refused."""
    gathered = of_points(points)
    limits = {row: limit_of(row, chart.unit) for chart in published.charts for row in chart.rows}
    sections = [_shares(published, limits, gathered.points)]
    sections += [_values(chart, limits) for chart in published.charts]
    sections.append(_ours(gathered.points))
    about = f"{published.about} {published.caveat} The nearest form that a machine of yours allows: {published.again}."
    return Report(
        title=published.title,
        about=about,
        sections=tuple(section for section in sections if section is not None),
        refused=tuple(gathered.refused),
        notes=(
            "Limits of what was published are by data sheets: each op at the longer of its reads and its arithmetic, "
            "launches and exchanges among devices not counted. Limits of what was measured here are in its points.",
        ),
    )


def _shares(published: Publication, limits: dict[Row, RowLimit | None], points: Sequence[Point]) -> Section | None:
    """The share of its limit that each figure reached: what can be compared between models and chips."""
    theirs = [
        (_name(row, chart), row, limit) for chart in published.charts for row in chart.rows if (limit := limits[row])
    ]
    ours = [(point, share) for point in points if (share := words.share(point)) is not None]
    if not theirs:
        return None
    names = [name for name, _, _ in theirs] + [f"here: {_point_name(point)}" for point, _ in ours]
    published_marks = tuple(
        Mark(
            x=100 * limit.share,
            y=number,
            note=f"{name}: {words.percent(limit.share)}",
            label=words.percent(limit.share),
        )
        for number, (name, _, limit) in enumerate(theirs)
    )
    own_marks = tuple(
        Mark(x=100 * share, y=len(theirs) + number, label=words.percent(share), trusted=words.trusted(point))
        for number, (point, share) in enumerate(ours)
    )
    series = (
        Series(name="published, of the data sheet", marks=published_marks, look=0, kind="dots"),
        Series(name="measured here, of the measured roof", marks=own_marks, look=OURS, kind="dots"),
    )
    chart = Chart(
        title="shares of the limit",
        x=Axis(title="% of the limit", zero=True, most=100.0, least=0.0),
        y=Axis(title="", categories=tuple(names)),
        series=series,
        rules=(Rule("x", 100.0, "the limit"),),
    )
    text = "What share of the physical limit each figure reached. It compares figures of different models and chips."
    return Section("shares of the limit", text, (chart,), None)


def _point_name(point: Point) -> str:
    return f"{words.system_name(point)}, {point.system.model or point.preset}, {words.load_name(point)}"


def _name(row: Row, chart: PublishedChart) -> str:
    what = row.name or f"{row.series}, batch {row.sequences}"
    return f"{chart.title}: {what}" if not row.name else what


def _values(chart: PublishedChart, limits: dict[Row, RowLimit | None]) -> Section:
    rows = []
    for row in chart.rows:
        limit = limits[row]
        rows.append(
            (
                row.name or f"{row.series}, batch {row.sequences}", words.digits(row.value, 4),
                "-" if limit is None else words.digits(limit.value, 4),
                "-" if limit is None else words.percent(limit.share), "-" if limit is None else limit.bound, row.source,
            )
        )  # fmt: skip
    table = Table(("what", f"published, {chart.unit}", f"limit, {chart.unit}", "share", "bound", "source"), tuple(rows))
    drawn = _curves(chart, limits) if chart.over_sequences else _categories(chart, limits)
    text = "Less is better." if chart.unit == "ms" else ""
    return Section(chart.title, text, (drawn,), table)


def _curves(chart: PublishedChart, limits: dict[Row, RowLimit | None]) -> Chart:
    names = list(dict.fromkeys(row.series for row in chart.rows))
    series: list[Series] = []
    lines: dict[tuple[tuple[float, float], ...], str] = {}
    for look, name in enumerate(names):
        own = [row for row in chart.rows if row.series == name]
        series.append(Series(name=name, marks=tuple(Mark(x=row.sequences, y=row.value) for row in own), look=look))
        line = tuple((float(row.sequences), limit.value) for row in own if (limit := limits[row]) is not None)
        if line:
            lines.setdefault(line, name)  # techniques on one chip have one limit
    for line, name in lines.items():
        title = "limit" if len(lines) == 1 else f"limit of {name}"
        marks = tuple(Mark(x=x, y=y) for x, y in line)
        series.append(
            Series(name=title, marks=marks, look=7 if len(lines) == 1 else names.index(name), kind="line", dashed=True)
        )
    x = Axis(title="sequences", log=True)
    return Chart(title=chart.title, x=x, y=Axis(title=WORDS[chart.unit], log=True), series=tuple(series))


def _categories(chart: PublishedChart, limits: dict[Row, RowLimit | None]) -> Chart:
    names = list(dict.fromkeys(row.series for row in chart.rows))
    series = [
        Series(
            name=name,
            marks=tuple(
                Mark(x=row.value, y=number, label=words.digits(row.value, 4))
                for number, row in enumerate(chart.rows)
                if row.series == name
            ),
            look=look,
            kind="dots",
        )
        for look, name in enumerate(names)
    ]
    marks = tuple(
        Mark(x=limit.value, y=number, label=f"limit {words.digits(limit.value)}")
        for number, row in enumerate(chart.rows)
        if (limit := limits[row]) is not None
    )
    if marks:
        series.append(Series(name="limit by the data sheet", marks=marks, look=7, kind="dots"))
    return Chart(
        title=chart.title,
        x=Axis(title=WORDS[chart.unit], zero=True, least=0.0),
        y=Axis(title="", categories=tuple(row.name for row in chart.rows)),
        series=tuple(series),
        rules=(Rule("x", 1.0, "as fast"),) if chart.unit == "ratio" else (),
    )


def _ours(points: Sequence[Point]) -> Section | None:
    """What was measured here, with its limit."""
    rows = []
    for point in points:
        tpot, limit = words.metric(point, words.TPOT), point.limit
        rows.append(
            (
                _point_name(point), words.place(point),
                words.with_interval(words.metric(point, words.TOKENS), words.interval(point, words.TOKENS)),
                words.digits(tpot),
                "-" if limit is None else words.digits(limit.tokens_per_s), words.percent(words.share(point)),
                "-" if limit is None else limit.bound,
            )
        )  # fmt: skip
    if not rows:
        return None
    headings = ("what", "machine", "tokens/s", "TPOT, ms", "limit, tokens/s", "share", "bound")
    return Section("measured here", "", (), Table(headings, tuple(rows)))
