"""Charts of what the replicas of a fleet said of themselves while they were measured, from collected series."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roofline.bench.report import words
from roofline.bench.report.chart import Axis, Chart, Mark, ReportSection, Rule, Series, Table
from roofline.bench.report.gather import CollectedRun, Gathered
from roofline.bench.results.collected import (
    CACHE,
    GENERATED,
    PROMPTS,
    RUNNING,
    UP,
    WAITING,
    CollectedSeries,
    end_of,
    start_of,
)

BINS = 240  # of a line
MOST_LINES = 7  # of replicas; the others are in the sum alone
MISSED_SCRAPES = 3  # after which a figure that was not read again counts as 0
COUNTERS = (
    ("tokens of answers", "tokens/s", GENERATED),
    ("tokens of prompts that were computed", "tokens/s", PROMPTS),
)
GAUGES = (("answers that are computed", "answers", RUNNING, 1.0), ("answers that wait", "answers", WAITING, 1.0))
CACHE_USE = ("key-value cache in use", "%", CACHE, 100.0)


@dataclass(frozen=True)
class TimeGrid:
    """The bins of a chart. edges: in seconds since 1970; step: seconds between two scrapes, as a rule."""

    edges: np.ndarray
    step: float

    @property
    def middles(self) -> np.ndarray:
        return (self.edges[1:] + self.edges[:-1]) / 2


def sections(gathered: Gathered) -> list[ReportSection]:
    """One for each run beside which series were collected."""
    runs = gathered.collected
    return [
        _section(run, f"replicas over time, run {run.name}" if len(runs) > 1 else "replicas over time") for run in runs
    ]


def _section(run: CollectedRun, title: str) -> ReportSection:
    grid = _grid(run)
    replicas = sorted({series.replica for series in run.series})
    drawn = replicas[:MOST_LINES] if len(replicas) > 1 else []
    shown = {series.name for series in run.series}
    charts = []
    for name, unit, figure in COUNTERS:
        rates = {replica: _rates(_of(run, replica, figure), grid) for replica in replicas}
        if figure in shown:
            charts.append(_chart(name, unit, rates, drawn, run, grid))
    for name, unit, figure, factor in (*GAUGES, CACHE_USE):
        values = {replica: factor * _levels(_of(run, replica, figure), grid) for replica in replicas}
        if figure in shown:
            charts.append(_chart(name, unit, values, drawn or replicas, run, grid, together=figure != CACHE))
    text = "What the servers' own metrics said while the load ran; lines across mark where each level began."
    if len(replicas) > MOST_LINES:
        text += f" {len(replicas) - MOST_LINES} more replicas are in the sum alone."
    return ReportSection(title, text, tuple(charts), _table(run, replicas))


def _grid(run: CollectedRun) -> TimeGrid:
    begin, end = start_of(run.points), end_of(run.points)
    gaps = [np.diff(series.times) for series in run.series if series.name == UP and len(series.times) > 1]
    step = float(np.median(np.concatenate(gaps))) if gaps else end - begin
    count = int(min(max((end - begin) / max(step, 1e-3), 1), BINS))
    return TimeGrid(np.linspace(begin, end, count + 1), step)


def _of(run: CollectedRun, replica: str, name: str) -> CollectedSeries | None:
    return next((series for series in run.series if series.replica == replica and series.name == name), None)


def _rates(series: CollectedSeries | None, grid: TimeGrid) -> np.ndarray:
    """What a counter grew by a second, in each bin. Between two scrapes it grew evenly, as far as anybody knows; one
    that fell began anew from 0."""
    if series is None or len(series.times) < 2:
        return np.zeros(len(grid.edges) - 1)
    growth = np.diff(series.values)
    growth = np.where(growth < 0, series.values[1:], growth)
    counted = np.concatenate([[0.0], np.cumsum(growth)])
    return np.diff(np.interp(grid.edges, series.times, counted)) / np.diff(grid.edges)


def _levels(series: CollectedSeries | None, grid: TimeGrid) -> np.ndarray:
    """The value of a gauge in the middle of each bin: what was read last, 0 once it was no longer read."""
    middles = grid.middles
    if series is None:
        return np.zeros(len(middles))
    places = np.searchsorted(series.times, middles, side="right") - 1
    age = middles - series.times[np.maximum(places, 0)]
    fresh = (places >= 0) & (age <= MISSED_SCRAPES * grid.step)
    return np.where(fresh, series.values[np.maximum(places, 0)], 0.0)


def _chart(
    title: str,
    unit: str,
    values: dict[str, np.ndarray],
    drawn: Sequence[str],
    run: CollectedRun,
    grid: TimeGrid,
    together: bool = True,
) -> Chart:
    """together: whether a sum over all replicas means something."""
    begin = grid.edges[0]
    lines = {"all replicas": np.sum(list(values.values()), axis=0)} if together and values else {}
    lines |= {replica: values[replica] for replica in drawn} if not together or len(values) > 1 else {}
    return Chart(
        title=title,
        x=Axis(title="seconds since the first level began", zero=True),
        y=Axis(title=unit, zero=True),
        series=tuple(
            Series(
                name=name,
                marks=tuple(Mark(x=float(x - begin), y=float(y)) for x, y in zip(grid.middles, line, strict=True)),
                look=look if together else look + 1,  # a replica looks the same in all charts
                kind="line",
            )
            for look, (name, line) in enumerate(lines.items())
        ),
        rules=tuple(Rule("x", start_of([point]) - begin, words.short_load(point)) for point in run.points),
    )


def _table(run: CollectedRun, replicas: Sequence[str]) -> Table:
    rows = []
    for replica in replicas:
        up, cache = _of(run, replica, UP), _of(run, replica, CACHE)
        generated = _of(run, replica, GENERATED)
        span = TimeGrid(np.array([start_of(run.points), end_of(run.points)]), 0.0)
        rows.append(
            (
                replica,
                "-" if up is None else f"{len(up.values):,}",
                "-" if up is None else f"{int(np.sum(up.values == 0)):,}",
                words.digits(float(_rates(generated, span)[0])),
                *(_most(_of(run, replica, name)) for name in (RUNNING, WAITING)),
                "-" if cache is None else f"{100 * cache.values.max():.0f}%",
            )
        )
    headings = (
        *("replica", "scrapes", "of them failed", "tokens/s of answers, mean"),
        *("most computed at a time", "most that waited", "cache, most in use"),
    )
    return Table(headings, tuple(rows))


def _most(series: CollectedSeries | None) -> str:
    return "-" if series is None else f"{series.values.max():,.0f}"
