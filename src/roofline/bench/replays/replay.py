"""A replay: what was published, what the data sheets allow, and what was measured here, on one page."""

from collections.abc import Sequence

from roofline.bench.replays.own import Own
from roofline.bench.replays.published import Publication, PublishedChart, Row, RowLimit, limit_of
from roofline.bench.report import words
from roofline.bench.report.chart import Axis, Chart, Mark, ReportSection, Rule, Series, Table
from roofline.bench.report.page import Report

OURS = 6  # the look of what was measured here
WORDS = {"tokens/s": "tokens/s", "ms": "ms a step", "TFLOP/s": "TFLOP/s of a GPU", "ratio": "ratio"}


def replay(published: Publication, own: Sequence[Own], refused: Sequence[str] = ()) -> Report:
    """own: what was measured here; refused: sentences on what of it cannot be true."""
    limits = {row: limit_of(row, chart.unit) for chart in published.charts for row in chart.rows}
    sections = [_shares(published, limits, own)]
    sections += [_values(chart, limits) for chart in published.charts]
    sections.append(_ours(own))
    about = f"{published.about} {published.caveat} The nearest form that a machine of yours allows: {published.again}."
    return Report(
        title=published.title,
        about=about,
        sections=tuple(section for section in sections if section is not None),
        refused=tuple(refused),
        notes=(
            "Limits of what was published are by data sheets: each op at the longer of its reads and its arithmetic, "
            "launches and exchanges among devices not counted. Shares of what was measured here are of measured roofs.",
        ),
    )


def _shares(published: Publication, limits: dict[Row, RowLimit | None], own: Sequence[Own]) -> ReportSection | None:
    """The share of its limit that each figure reached: what can be compared between models and chips."""
    theirs = [
        (_name(row, chart), row, limit) for chart in published.charts for row in chart.rows if (limit := limits[row])
    ]
    ours = [(each, each.share) for each in own if each.share is not None]
    if not theirs:
        return None
    names = [name for name, _, _ in theirs] + [f"here: {each.name}" for each, _ in ours]
    published_marks = tuple(
        Mark(x=100 * limit.share, y=number, label=words.percent(limit.share))
        for number, (_, _, limit) in enumerate(theirs)
    )
    own_marks = tuple(
        Mark(x=100 * share, y=len(theirs) + number, label=words.percent(share), trusted=each.trusted)
        for number, (each, share) in enumerate(ours)
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
    return ReportSection("shares of the limit", text, (chart,), None)


def _name(row: Row, chart: PublishedChart) -> str:
    """A row among those of all charts. What tells it from others of its chart comes first: narrow pages cut ends."""
    return row.name or f"{row.series}, batch {row.sequences}: {chart.title}"


def _values(chart: PublishedChart, limits: dict[Row, RowLimit | None]) -> ReportSection:
    """A chart as it was published, with the limits, where there are any."""
    limited = any(limits[row] is not None for row in chart.rows)
    headings = (f"limit, {chart.unit}", "share", "bound") if limited else ()
    rows = tuple(
        (
            row.name or f"{row.series}, batch {row.sequences}",
            words.digits(row.value, 4),
            *(_limit_cells(limits[row]) if limited else ()),
            row.source,
        )
        for row in chart.rows
    )
    table = Table(("what", f"published, {chart.unit}", *headings, "source"), rows)
    drawn = _curves(chart, limits) if chart.over_sequences else _categories(chart, limits)
    return ReportSection(chart.title, "Less is better." if chart.unit == "ms" else "", (drawn,), table)


def _limit_cells(limit: RowLimit | None) -> tuple[str, str, str]:
    if limit is None:
        return "-", "-", "-"
    return words.digits(limit.value, 4), words.percent(limit.share), limit.bound


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


def _ours(own: Sequence[Own]) -> ReportSection | None:
    """What was measured here, with its share of the measured roof."""
    rows = tuple(
        (each.name, each.machine, each.figure, words.percent(each.share), each.bound or "-", each.other_load)
        for each in own
    )
    if not rows:
        return None
    headings = ("what", "machine", "measured", "share", "bound", "other load, cores")
    text = "Other load is what the machine did beside, while nothing of the measurement ran."
    return ReportSection("measured here", text, (), Table(headings, rows))
