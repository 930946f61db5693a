"""The report as Markdown, and its points as CSV."""

import csv
import io
from collections.abc import Iterable, Sequence

from roofline.bench.report import words
from roofline.bench.report.chart import Table
from roofline.bench.report.page import Report
from roofline.bench.results.point import Figure, Point

FIGURES = ("value", "mean", "p50", "p95", "p99", "low", "high")  # columns of each metric; low, high: of 95 %


def markdown(report: Report) -> str:
    """The report without its charts."""
    lines = [f"# {report.title}", "", report.about, ""]
    lines += _part("Refused", report.refused)
    for section in report.sections:
        lines += [f"## {section.title}", ""]
        lines += [section.text, ""] if section.text else []
        lines += [*markdown_table(section.table), ""] if section.table is not None else []
    return "\n".join([*lines, *_part("Notes", report.notes)]).rstrip("\n") + "\n"


def _part(title: str, items: Sequence[str]) -> list[str]:
    return [f"## {title}", "", *(f"* {item}" for item in items), ""] if items else []


def markdown_table(table: Table) -> list[str]:
    """Lines of a table; a bar within a cell is escaped."""

    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    return [line(table.headings), f"|{'---|' * len(table.headings)}", *map(line, table.rows)]


def csv_of_points(points: Sequence[Point]) -> str:
    """One row a point, all its metrics in columns; an empty cell is a figure that there is not."""
    names = sorted({name for point in points for name in point.metrics})
    columns = [f"{name}_{figure}" for name in names for figure in FIGURES]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*_facts_of(None), *columns])
    for point in points:
        figures = [cell for name in names for cell in _cells(point.metrics.get(name))]
        writer.writerow([*_facts_of(point).values(), *figures])
    return stream.getvalue()


def _facts_of(point: Point | None) -> dict[str, object]:
    """What a point is, beside its metrics; of None the same keys."""
    if point is None:
        return dict.fromkeys(_NAMES)
    limit, energy, load = point.limit, point.energy, point.load
    return dict(
        zip(
            _NAMES,
            (
                point.id, point.kind, point.preset, point.started, point.system.label, point.system.version,
                point.system.model, words.place(point), None if point.workload is None else point.workload.sha256,
                words.prompt_length(point),
                None if load is None else load.arrivals, None if load is None else load.concurrency,
                None if load is None else load.offered, words.trusted(point), point.validity.grade,
                "; ".join(point.validity.flags), None if limit is None else limit.bound,
                None if limit is None else limit.share_of_measured, None if limit is None else limit.share_of_sheet,
                None if energy is None else energy.joules_per_token,
            ),
            strict=True,
        )
    )  # fmt: skip


_NAMES = (
    "id", "kind", "preset", "started", "system", "version", "model", "machine", "traffic_sha256", "prompt", "arrivals",
    "workers", "offered_per_s", "client_trusted", "grade", "flags", "bound", "share_of_measured", "share_of_sheet",
    "joules_per_token",
)  # fmt: skip


def _cells(figure: Figure | None) -> tuple[float | None, ...]:
    if figure is None:
        return (None,) * len(FIGURES)
    low, high = figure.ci95 or (None, None)
    return figure.value, figure.mean, figure.p50, figure.p95, figure.p99, low, high
