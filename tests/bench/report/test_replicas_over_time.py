"""Charts of series that were collected beside points: sums, restarts, replicas that are down, levels."""

import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from roofline.bench.report import replicas_over_time
from roofline.bench.report.chart import Chart
from roofline.bench.report.gather import Gathered, gather
from roofline.bench.report.page import page
from roofline.bench.report.report import report
from roofline.bench.results import collected
from roofline.bench.results.store import append_points, with_id
from roofline.deploy.collector.series import Row, write_rows
from tests.bench.report import made
from tests.bench.report.test_page import LOOK
from tests.browser import CHROMIUM, MISSING, Browser

pytest.importorskip("pyarrow")
BEGAN = datetime(2026, 11, 26, 2, tzinfo=UTC)
LEVEL = 60  # seconds, of which 33 are the point's
LABELS = 'model_name="tiny"'


def scrapes(replica: str, rate: float, restart: float = 1e9, down: tuple[float, float] = (1e9, 1e9)) -> Iterator[Row]:
    """What a replica shows every 2 s that makes `rate` tokens a second, begins anew at a moment, and is down for some
    time. Seconds since the first level began."""
    for second in range(-4, 130, 2):
        moment = BEGAN.timestamp() + second
        answers = not down[0] <= second < down[1]
        yield moment, replica, "up", "", float(answers)
        if answers:
            since = second - restart if second >= restart else second + 4
            yield moment, replica, collected.GENERATED, LABELS, rate * since
            yield moment, replica, collected.RUNNING, LABELS, 3.0
            yield moment, replica, collected.RUNNING, 'model_name="other"', 1.0
            yield moment, replica, collected.WAITING, LABELS, 2.0
            yield moment, replica, collected.CACHE, LABELS, 0.5
            yield moment, replica, "vllm:unread_total", LABELS, 1.0


def results(folder: Path, rows: list[Row], files: int = 3) -> Path:
    """A file of three levels, and the series beside it."""
    points = [
        with_id(
            msgspec.structs.replace(
                made.point(workers, started=(BEGAN + timedelta(seconds=number * 40)).isoformat()), run="fleet"
            )
        )
        for number, workers in enumerate((64, 128, 512))
    ]
    append_points(points, folder / "r.jsonl")
    (folder / "r.series").mkdir()
    for number in range(files):
        write_rows(rows[number::files], folder / "r.series" / f"x-{number:06d}.parquet")
    return folder / "r.jsonl"


@pytest.fixture
def gathered(tmp_path: Path) -> Gathered:
    rows = [*scrapes("a", 100.0, restart=50), *scrapes("b", 50.0, down=(60, 90))]
    return gather([results(tmp_path, rows)])


def chart_of(gathered: Gathered, title: str) -> Chart:
    (section,) = replicas_over_time.sections(gathered)
    return next(chart for chart in section.charts if chart.title == title)


def value(chart: Chart, name: str, second: float) -> float:
    """What a line shows nearest to a moment."""
    line = next(series for series in chart.series if series.name == name)
    return min(line.marks, key=lambda mark: abs(mark.x - second)).y


def test_rates_survive_restarts_and_add_up(gathered: Gathered) -> None:
    chart = chart_of(gathered, "tokens of answers")
    assert [series.name for series in chart.series] == ["all replicas", "a", "b"]
    for second in (10, 30, 56, 100):
        assert value(chart, "a", second) == pytest.approx(100, rel=0.01)
        assert value(chart, "all replicas", second) == pytest.approx(150, rel=0.01)
    assert min(mark.y for series in chart.series for mark in series.marks) >= 0


def test_gauges_are_summed_over_models_and_0_while_a_replica_is_down(gathered: Gathered) -> None:
    chart = chart_of(gathered, "answers that are computed")
    assert [value(chart, name, 20) for name in ("all replicas", "a", "b")] == [8, 4, 4]
    assert [value(chart, name, 80) for name in ("all replicas", "a", "b")] == [4, 4, 0]
    assert value(chart_of(gathered, "answers that wait"), "all replicas", 20) == 4
    cache = chart_of(gathered, "key-value cache in use")
    assert [series.name for series in cache.series] == ["a", "b"]
    assert value(cache, "a", 20) == 50
    looks = {series.name: series.look for series in chart.series}
    assert {series.name: series.look for series in cache.series} == {"a": looks["a"], "b": looks["b"]}


def test_levels_are_marked_and_replicas_are_in_a_table(gathered: Gathered) -> None:
    chart = chart_of(gathered, "tokens of answers")
    assert [(rule.value, rule.text) for rule in chart.rules] == [(0, "64"), (40, "128"), (80, "512")]
    (section,) = replicas_over_time.sections(gathered)
    assert section.table is not None
    a, b = section.table.rows
    # What a made in the two seconds before it began anew, nobody has seen: 11,200 of 11,400 tokens.
    assert a == ("a", "64", "0", "98.2", "4", "2", "50%")
    assert b[:3] == ("b", "64", "15")
    assert [chart.title for chart in section.charts] == [
        "tokens of answers", "answers that are computed", "answers that wait", "key-value cache in use",
    ]  # fmt: skip  # and none of prompts, of which there is no series
    assert "replicas over time" in [section.title for section in report(gathered).sections]


def test_one_server_has_one_line_and_many_have_their_sum(tmp_path: Path) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir(), many.mkdir()
    chart = chart_of(gather([results(one, [*scrapes("a", 10.0)])]), "tokens of answers")
    assert [series.name for series in chart.series] == ["all replicas"]
    rows = [row for number in range(9) for row in scrapes(f"r{number}", 10.0)]
    gathered = gather([results(many, rows)])
    chart = chart_of(gathered, "tokens of answers")
    assert len(chart.series) == 1 + replicas_over_time.MOST_LINES
    assert value(chart, "all replicas", 20) == pytest.approx(90, rel=0.01)
    assert "2 more replicas are in the sum alone" in replicas_over_time.sections(gathered)[0].text


def test_files_that_are_damaged_are_noted_and_the_others_drawn(tmp_path: Path) -> None:
    path = results(tmp_path, [*scrapes("a", 10.0)], files=1)
    (tmp_path / "r.series" / "y-000001.parquet").write_bytes(b"PAR1 cut off")
    (tmp_path / "r.series" / "y-000002.part").write_bytes(b"as of a run that was killed")
    gathered = gather([path])
    (note,) = gathered.notes
    assert "y-000001.parquet is no file of series" in note
    assert value(chart_of(gathered, "tokens of answers"), "all replicas", 20) == pytest.approx(10, rel=0.01)


def test_points_of_another_time_have_no_series(tmp_path: Path) -> None:
    path = results(tmp_path, [*scrapes("a", 10.0)])
    late = (BEGAN + timedelta(days=1)).isoformat()
    append_points([with_id(msgspec.structs.replace(made.point(4, started=late), run="other"))], path)
    assert [run.name for run in gather([path]).collected] == ["fleet"]


def test_more_rows_than_can_be_drawn_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collected, "MOST_ROWS", 200)
    gathered = gather([results(tmp_path, [*scrapes("a", 10.0)])])
    assert any("has more than 200 rows to draw" in note for note in gathered.notes)


def test_without_pyarrow_a_note_says_what_brings_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = results(tmp_path, [*scrapes("a", 10.0)])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert any("pip install 'roofline[series]'" in note for note in gather([path]).notes)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_draws_it(gathered: Gathered, width: int, tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip(MISSING)
    browser = Browser(tmp_path)
    try:
        (tmp_path / "report.html").write_text(page(report(gathered)))
        shown = browser.open((tmp_path / "report.html").as_uri(), width, 900)
        assert json.loads(shown.evaluate(LOOK))["problems"] == []
        assert shown.evaluate("document.body.innerText").count("replicas over time") == 1
    finally:
        browser.close()
