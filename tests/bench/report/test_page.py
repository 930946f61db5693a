"""The page, the Markdown and the CSV: complete, self-contained, quoted, and drawn by a browser without overlaps."""

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from roofline.bench.report.chart import ReportSection, Table
from roofline.bench.report.cost import Prices
from roofline.bench.report.gather import MOST_POINTS, Gathered, gather, of_points
from roofline.bench.report.page import Report, page
from roofline.bench.report.report import report
from roofline.bench.report.text import csv_of_points, markdown, markdown_table
from roofline.bench.report.throughput import Slo
from roofline.bench.results.store import append_points
from tests.bench.report import made
from tests.browser import CHROMIUM, MISSING, Browser

NAME = 'a <b> & "c" </script> | engine'


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> Gathered:
    """Two systems on one machine, one on another, with events, a comparison, a doubtful point and an impossible one."""
    folder = tmp_path_factory.mktemp("points")
    points = [*made.curve(label=NAME), *made.curve(label="llama.cpp", most=5.0, version="b7000")]
    points = [
        made.with_events(point, folder, f"{number}.jsonl", point.load.concurrency or 1)
        for number, point in enumerate(points)
        if point.load is not None
    ]
    points += made.curve(label=NAME, chip="Another CPU", bandwidth=1e11, most=14.0)
    points += [made.point(64, label=NAME, trusted=False), made.point(64, label="too good", share=2.2)]
    points += [made.point(4, label=NAME, rate=3.0), made.point(8, label=NAME, rate=5.0), *made.compared(1.6)]
    append_points(points, folder / "a.jsonl")
    return gather([folder / "a.jsonl"])


@pytest.fixture(scope="module")
def made_report(gathered: Gathered) -> Report:
    prices = Prices(usd_per_hour={"": 2.0}, source="a list", date="2026-11-01")
    return report(gathered, slo=Slo(ttft=2000, tpot=60, e2e=4000), prices=prices)


def test_it_has_all_sections(made_report: Report) -> None:
    titles = [section.title.rpartition(": ")[2] for section in made_report.sections]
    assert titles == [
        "throughput and latency", "users and devices", "concurrency", "paired ratios",
        "what each machine gives for its roofs", "rooflines", "distributions", "the course of the runs",
        "where the first token waits", "cost", "how it was measured", "definitions",
    ]  # fmt: skip
    assert made_report.about == "23 points · 1 refused · A CPU and Another CPU · 2026-11-26"
    assert any("did not keep up" in note for note in made_report.notes)


def test_it_asks_for_nothing_else_and_quotes_what_is_not_ours(made_report: Report) -> None:
    text = page(made_report)
    assert not re.search(
        r"https?://|//[a-z]+\.|\bsrc=|\bhref=|@import|url\(|fetch\(|XMLHttp|\$(title|about|sections)", text
    )
    assert text.count("<script") == text.count("</script>") == 1
    assert NAME not in text
    assert "a &lt;b&gt; &amp; &quot;c&quot; &lt;/script&gt;" in text
    assert len(text) < 2_000_000


def test_impossible_points_are_listed_and_in_no_chart(made_report: Report, gathered: Gathered) -> None:
    text = page(made_report)
    assert "220% of the limit" in text
    charts = "".join(re.findall(r"<svg.*?</svg>", text, re.S))
    assert "too good" not in charts
    assert "too good" not in csv_of_points(gathered.points)


def test_every_chart_is_there_twice_and_has_names(made_report: Report) -> None:
    text = page(made_report)
    count = sum(not chart.empty for section in made_report.sections for chart in section.charts)
    assert text.count('class="broad" role="img"') == text.count('class="narrow" role="img"') == count
    assert text.count("the client did not keep up</span>") >= 4


def test_nothing_but_refused_points_is_a_page_too() -> None:
    alone = report(of_points([made.point(4, share=3.0)]))
    assert alone.about == "All points were refused: 1."
    assert "Refused" in page(alone)
    assert "300% of the limit" in markdown(alone)


def test_other_figures_have_a_table() -> None:
    plan = msgspec.structs.replace(made.point(4), kind="plan", workload=None, load=None)
    titles = [section.title for section in report(of_points([plan])).sections]
    assert "other figures" in titles


def test_markdown_has_the_same_tables(made_report: Report) -> None:
    text = markdown(made_report)
    for section in made_report.sections:
        assert f"## {section.title}" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    tables = [section.table for section in made_report.sections if section.table is not None]
    assert len(lines) == sum(len(table.rows) + 2 for table in tables)
    assert r"</script> \| engine" in text
    assert markdown_table(Table(("a", "b"), (("1", "2|3"),))) == ["| a | b |", "|---|---|", r"| 1 | 2\|3 |"]


def test_csv_has_a_row_for_each_point(gathered: Gathered) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_of_points(gathered.points))))
    assert [row["id"] for row in rows] == [point.id for point in gathered.points]
    first, point = rows[0], gathered.points[0]
    assert first["system"] == point.system.label
    assert float(first["request_rate_value"]) == point.metrics["request_rate"].value
    assert point.metrics["ttft"].ci95 is not None
    assert float(first["ttft_low"]) == point.metrics["ttft"].ci95[0]
    assert float(first["share_of_measured"]) == pytest.approx(0.16)
    assert first["share_of_sheet"] == ""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(MISSING)
    running = Browser(tmp_path_factory.mktemp("browser"))
    yield running
    running.close()


LOOK = """(() => {
  const problems = [];
  const shown = [...document.querySelectorAll("svg[role=img]")].filter(svg => getComputedStyle(svg).display !== "none");
  for (const svg of shown) {
    const frame = svg.getBoundingClientRect();
    const labels = [...svg.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
    for (const [name, box] of labels)
      if (box.left < frame.left - 1 || box.right > frame.right + 1
          || box.top < frame.top - 1 || box.bottom > frame.bottom + 1)
        problems.push(`${svg.getAttribute("aria-label")}: ${name} lies outside`);
    for (let a = 0; a < labels.length; a++)
      for (let b = 0; b < a; b++) {
        const [p, q] = [labels[a][1], labels[b][1]];
        const over = Math.min(p.right, q.right) - Math.max(p.left, q.left);
        const down = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
        if (over > 1 && down > 3)
          problems.push(`${svg.getAttribute("aria-label")}: ${labels[a][0]} over ${labels[b][0]}`);
      }
  }
  for (const frame of document.querySelectorAll(".wide:not(.tall)"))
    if (frame.scrollHeight > frame.clientHeight + 1)
      problems.push(`the last rows are cut of: ${frame.textContent.slice(0, 60)}`);
  const wide = document.documentElement.scrollWidth;
  return JSON.stringify({charts: shown.length, problems, wide, window: innerWidth});
})()"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 1100, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_it(made_report: Report, browser: Browser, width: int, scheme: str, tmp_path: Path) -> None:
    """No text over another or outside of its chart, nothing wider than the window, nothing asked for, colours of the
    scheme."""
    path = tmp_path / "report.html"
    path.write_text(page(made_report))
    shown = browser.open(path.as_uri(), width, 900, prefers_color_scheme=scheme)
    seen = json.loads(shown.evaluate(LOOK))
    assert seen["problems"] == []
    assert seen["charts"] == sum(not chart.empty for section in made_report.sections for chart in section.charts)
    assert seen["wide"] <= seen["window"]
    assert shown.problems == []
    assert [request for request in shown.requests if not request.startswith("file:")] == []
    dark = shown.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 24)"
    assert dark is (scheme == "dark")
    shown.close()


@pytest.mark.slow
def test_tables_are_copied(made_report: Report, browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page(made_report))
    shown = browser.open(path.as_uri())
    shown.evaluate("copy = async text => { window.copied = text; }")
    shown.click('.copy button[data-form="CSV"]')
    shown.wait("window.copied")
    rows = list(csv.reader(io.StringIO(shown.evaluate("window.copied"))))
    table = next(section.table for section in made_report.sections if section.table is not None)
    assert rows == [list(table.headings), *map(list, table.rows)]
    shown.click('.copy button[data-form="Markdown"]')
    shown.wait("window.copied.startsWith('|')")
    assert shown.evaluate("window.copied").splitlines() == markdown_table(table)
    assert shown.text('.copy button[data-form="Markdown"]') == "Copied"
    shown.close()


def test_figures_stand_to_the_right_and_words_to_the_left() -> None:
    table = Table(("name", "figure", "text"), (("a", "1.5 [1, 2]", "memory"), ("b", "-", "word " * 20)))
    text = page(Report("t", "a", (ReportSection("s", "", (), table),)))
    assert '<td>1.5 <span class="around">[1, 2]</span></td>' in text
    assert '<td class="words long">memory</td>' in text
    assert '<th class="words short">name</th><th>figure</th><th class="words long">text</th>' in text


def test_the_largest_report_is_below_two_megabytes() -> None:
    points = [
        each
        for number in range(10)
        for each in made.curve(tuple(range(1, 51)), label=f"system {number}", most=5 + number / 10)
    ]
    assert len(points) == MOST_POINTS
    prices = Prices(usd_per_hour={"": 2.0}, source="a list", date="2026-11-01")
    assert len(page(report(of_points(points), prices=prices))) < 1_900_000
