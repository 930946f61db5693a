"""The report as one HTML file that asks for nothing else: charts as inline SVG, a table under each."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from string import Template

from roofline.bench.report import draw
from roofline.bench.report.chart import Chart, ReportSection, Table

SHORT, LONG = 16, 50  # characters of cells that are not broken, and of those that need room
MOST_ROWS = 20  # of a table that is shown without a frame of its own to scroll in
UNTRUSTED = "the client is not trusted with this load"  # where a mark does not say why
FIGURE_SIGNS = set("0123456789.,%[]()-+ e")  # what cells of figures are made of, beside their units


@dataclass(frozen=True)
class Report:
    """What `page` and `text` write. about: one line on what was measured where; refused: points that cannot be true;
    notes: what is missing or doubtful."""

    title: str
    about: str
    sections: tuple[ReportSection, ...]
    refused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def page(report: Report) -> str:
    """The text of the HTML file."""
    template = Template((files("roofline.bench.report") / "page.html").read_text("utf-8"))
    parts = [_list("Refused", report.refused, "refused"), *map(_section, report.sections), _list("Notes", report.notes)]
    return template.safe_substitute(
        title=html.escape(report.title), about=html.escape(report.about), sections="\n".join(filter(None, parts))
    )


def _list(title: str, lines: Sequence[str], kind: str = "") -> str:
    if not lines:
        return ""
    look = f' class="{kind}"' if kind else ""
    return f"<section{look}><h2>{title}</h2>{''.join(f'<p>{html.escape(line)}</p>' for line in lines)}</section>"


def _section(section: ReportSection) -> str:
    charts = "".join(_chart(chart, len(section.charts) > 1) for chart in section.charts if not chart.empty)
    table = "" if section.table is None else _table(section.table)
    text = f"<p>{html.escape(section.text)}</p>" if section.text else ""
    return f"<section><h2>{html.escape(section.title)}</h2>{text}{charts}{table}</section>"


def _chart(chart: Chart, titled: bool) -> str:
    title = f"<h3>{html.escape(chart.title)}</h3>" if titled else ""
    names = "".join(
        f"<li>{draw.legend(series)}<span>{html.escape(series.name)}</span></li>"
        for series in chart.series
        if series.marks
    )
    doubts = dict.fromkeys(
        mark.doubt or UNTRUSTED for series in chart.series for mark in series.marks if not mark.trusted
    )
    names += "".join(f'<li class="grey">{draw.doubted()}<span>{html.escape(doubt)}</span></li>' for doubt in doubts)
    return f'{title}<ul class="legend">{names}</ul>{draw.draw(chart, draw.WIDE)}{draw.draw(chart, draw.NARROW)}'


def _table(table: Table) -> str:
    of_words = [at == 0 or any(not _is_figure(row[at]) for row in table.rows) for at in range(len(table.headings))]
    longest = [max((len(row[at]) for row in table.rows), default=0) for at in range(len(table.headings))]
    looks = [
        "" if not each else ' class="words"' if SHORT < length <= LONG else f' class="words {_width(length)}"'
        for each, length in zip(of_words, longest, strict=True)
    ]
    head = "".join(f"<th{look}>{html.escape(name)}</th>" for name, look in zip(table.headings, looks, strict=True))
    body = "".join(
        f"<tr><th>{html.escape(row[0])}</th>"
        + "".join(f"<td{look}>{_cell(cell)}</td>" for cell, look in zip(row[1:], looks[1:], strict=True))
        + "</tr>"
        for row in table.rows
    )
    buttons = "".join(
        f'<button type="button" data-form="{form}">Copy as {form}</button>' for form in ("Markdown", "CSV")
    )
    frame = "wide tall" if len(table.rows) > MOST_ROWS else "wide"
    return (
        f'<div class="table"><div class="copy">{buttons}</div><div class="{frame}" tabindex="0">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></div>"
    )


def _width(length: int) -> str:
    return "long" if length > LONG else "short"


def _cell(text: str) -> str:
    """A cell whose interval goes to a line of its own where the table is too broad, and is not broken itself."""
    value, bracket, around = text.partition(" [")
    if not bracket or not _is_figure(text):
        return html.escape(text)
    return f'{html.escape(value)} <span class="around">[{html.escape(around)}</span>'


def _is_figure(cell: str) -> bool:
    return all(sign in FIGURE_SIGNS for sign in cell)
