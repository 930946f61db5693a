"""Charts from raw events: distributions, the course of a run, where the first token waits."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from roofline.bench.load.events import RequestEvents
from roofline.bench.report import moments
from roofline.bench.report.chart import ReportSection
from roofline.bench.report.gather import Gathered, gather
from roofline.bench.report.moments import PARTS, e2e, mean_parts, tpot, ttft
from roofline.bench.results.store import append_points
from tests.bench.report import made

MS = 1_000_000


@pytest.fixture
def gathered(tmp_path: Path) -> Gathered:
    points = [
        made.with_events(point, tmp_path, f"{point.load.concurrency}.jsonl", point.load.concurrency or 1)
        for point in made.curve()
        if point.load is not None
    ]
    append_points(points, tmp_path / "a.jsonl")
    return gather([tmp_path / "a.jsonl"])


def shown(gathered: Gathered) -> dict[str, ReportSection]:
    return {section.title: section for section in moments.sections(gathered)}


def request(**changes: object) -> RequestEvents:
    base = {
        "request": 0, "scheduled": 0, "dispatched": 2 * MS, "connected": 5 * MS, "sent": 6 * MS, "headers": 10 * MS,
        "first_byte": 40 * MS, "chunks": [45 * MS, 65 * MS, 85 * MS], "characters": [1, 1, 1], "end": 90 * MS,
        "completion_tokens": 5,
    }  # fmt: skip
    return RequestEvents(**(base | changes))  # type: ignore[arg-type]


def test_latencies_count_from_the_planned_moment() -> None:
    assert (ttft(request()), tpot(request()), e2e(request())) == (45, 10, 90)
    assert tpot(request(completion_tokens=1)) is None
    assert tpot(request(completion_tokens=2, chunks=[45 * MS, 65 * MS])) == 20
    assert tpot(request(chunks=[45 * MS])) is None


def test_the_parts_add_up_to_the_time_to_the_first_token() -> None:
    assert mean_parts([request()]) == pytest.approx([2, 3, 1, 4, 30, 5])
    assert sum(mean_parts([request(), request(connected=None, headers=None)])) == pytest.approx(45)
    assert mean_parts([request(connected=None)])[:3] == pytest.approx([2, 0, 4]), "the next part has it"
    late = request(headers=50 * MS, first_byte=50 * MS)
    assert sum(mean_parts([late])) == pytest.approx(45), "a head that was read after the first token"
    assert mean_parts([]) == [0.0] * len(PARTS)


def test_where_the_first_token_waits(gathered: Gathered) -> None:
    section = shown(gathered)["where the first token waits"]
    chart = section.charts[0]
    assert len(chart.y.categories) == 6
    for row in range(6):
        spans = [mark.x_interval for series in chart.series for mark in series.marks if mark.y == row]
        ends = [span[1] for span in spans if span is not None]
        starts = [span[0] for span in spans if span is not None]
        assert starts[0] == 0
        assert starts[1:] == pytest.approx(ends[:-1]), "each part begins where the one before ends"
    assert section.table is not None
    assert section.table.rows[0][1:6] == ("1", "1", "1", "2", "67.6")


def test_only_the_span_counts(gathered: Gathered) -> None:
    section = shown(gathered)["distributions"]
    assert section.table is not None
    assert {row[2] for row in section.table.rows} == {"160"}, "of 200 requests, a tenth at each end does not"
    assert [chart.title.partition(":")[0] for chart in section.charts] == ["TTFT", "TPOT", "latency"]
    assert all(chart.x.log for chart in section.charts)
    runs = [series.name for series in section.charts[0].series]
    assert runs == ["ours 1.0, 1 worker", "ours 1.0, 4 workers", "ours 1.0, 32 workers"], "lowest, knee, highest"
    marks = section.charts[0].series[0].marks
    assert (marks[0].y, marks[-1].y) == (0, 100)
    assert [mark.x for mark in marks] == sorted(mark.x for mark in marks)
    assert len(marks) == moments.MOST_STEPS + 1


def test_a_p99_needs_299_requests() -> None:
    values = np.arange(1.0, 299.0)
    assert moments._quantile(values, 0.99) == "-"
    assert moments._quantile(np.arange(1.0, 300.0), 0.99) == "296"  # the interval's upper end lies beyond them
    assert moments._quantile(values, 0.5) == "150 [132, 167]"


def test_the_course_of_a_run_has_all_its_tokens(gathered: Gathered) -> None:
    section = shown(gathered)["the course of the runs"]
    tokens, flying = section.charts
    assert [series.name for series in tokens.series] == ["ours 1.0, 4 workers"], "the knee"
    marks = tokens.series[0].marks
    width = marks[1].x - marks[0].x
    assert (marks[0].x, marks[-1].x) == (pytest.approx(width / 2), pytest.approx(50 - width / 2, abs=0.5)), "seconds"
    assert sum(mark.y for mark in marks) * width == pytest.approx(200 * 40), "tokens of all requests"
    busy = sum(mark.y for mark in flying.series[0].marks) * width
    events = gathered.events[gathered.points[2].id]
    spans = sum((each.end - each.scheduled) / 1e9 for each in events.requests if each.end)
    assert busy == pytest.approx(spans), "requests x seconds"
    assert [(area.low, area.high) for area in tokens.areas] == [(None, 5.0), (45.0, None)]


def test_points_without_events_have_no_such_charts(tmp_path: Path) -> None:
    append_points(made.curve(), tmp_path / "a.jsonl")
    assert moments.sections(gather([tmp_path / "a.jsonl"])) == []


def test_failed_requests_and_probes_are_in_no_distribution() -> None:
    events = made.events()
    events.requests[51] = msgspec.structs.replace(events.requests[51], probe=True)
    events.requests[50] = msgspec.structs.replace(events.requests[50], error="the connection broke", end=None)
    run = moments.NamedEvents(made.point(4), events, "a", 0)
    assert len(run.counted) == 158


def test_a_line_has_a_step_for_each_value_or_for_equal_parts_of_them() -> None:
    few = moments._steps([1.0, 2.0, 4.0])
    assert [(mark.x, mark.y) for mark in few] == [
        (1, 0),
        (1, pytest.approx(100 / 3)),
        (2, pytest.approx(200 / 3)),
        (4, 100),
    ]
    many = moments._steps([float(value) for value in range(1, 1201)])
    assert [mark.x for mark in many[:4]] == [1, 10, 20, 30]
    assert [mark.y for mark in many[-2:]] == pytest.approx([100 * 119 / 120, 100])


def test_the_table_has_a_p99_where_there_are_enough_requests(tmp_path: Path) -> None:
    events = made.events(requests=400)
    run = moments.NamedEvents(made.point(4), events, "a", 0)
    section = moments._distributions([run])
    assert section.table is not None
    assert [row[2] for row in section.table.rows] == ["320"] * 3
    assert section.table.rows[0][3:6] == ("73 [71, 75]", "89.1 [88, 90]", "91")
