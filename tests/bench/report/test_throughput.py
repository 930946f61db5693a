"""Charts of points under load: which curves there are, the knee, the limit, the best trade-offs, promises."""

import csv
import io

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roofline.bench.report import throughput, words
from roofline.bench.report.chart import ReportSection, Series
from roofline.bench.report.gather import of_points
from roofline.bench.report.history import key_of
from roofline.bench.report.page import page
from roofline.bench.report.report import report
from roofline.bench.report.text import csv_of_points
from roofline.bench.report.throughput import Slo, knee, pareto
from roofline.bench.results.point import Load, Point, Validity
from tests.bench.report import made


def sections(points: list[Point], slo: Slo | None = None) -> dict[str, ReportSection]:
    made_of = throughput.sections(of_points(points), slo or Slo())
    return {section.title.rpartition(": ")[2]: section for section in made_of}


def series_of(section: ReportSection, chart: int = 0) -> dict[str, Series]:
    return {series.name: series for series in section.charts[chart].series}


def test_throughput_over_latency_has_intervals_limit_and_knee() -> None:
    section = sections(made.curve())["throughput and latency"]
    series = series_of(section)
    assert list(series) == ["ours 1.0", "limit of A CPU"]
    first = series["ours 1.0"].marks[0]
    assert (first.x, first.y) == (pytest.approx(1.1 * 0.625), pytest.approx(1.6)), "seconds on average, requests/s"
    assert first.y_interval == pytest.approx((1.6 * 0.97, 1.6 * 1.03))
    limit = series["limit of A CPU"].marks
    assert [mark.y for mark in limit] == pytest.approx([10] * 6), "5e10 bytes/s, 5e9 bytes a request"
    assert [mark.x for mark in limit] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2]), "N / 10 seconds"
    assert [mark.label for mark in series["ours 1.0"].marks] == ["1", "2", "4 knee", "8", "16", "32"]
    assert "ours 1.0: 4 workers" in section.text


def test_the_knee_has_the_most_throughput_for_its_latency() -> None:
    points = made.curve()
    best = knee(points)
    powers = [words.metric(each, words.REQUESTS) / each.metrics["e2e"].mean for each in points]  # type: ignore[operator]
    assert best is points[powers.index(max(powers))]
    assert knee([]) is None


def test_a_knee_that_was_not_passed_is_not_reached() -> None:
    rising = [each for each in made.curve() if each.load is not None and each.load.concurrency in (1, 2, 4)]
    section = sections(rising)["throughput and latency"]
    assert [mark.label for mark in series_of(section)["ours 1.0"].marks] == ["1", "2", "4"]
    assert "ours 1.0: not reached by 4 workers, the highest load" in section.text
    repeated = sections([*rising, msgspec.structs.replace(rising[-1], id="again")])["throughput and latency"]
    assert "not reached" in repeated.text, "the same load twice is not a higher one"


def test_systems_with_the_same_limit_share_its_line_and_others_do_not() -> None:
    same = [*made.curve(), *made.curve((1, 2, 64), label="theirs", most=5.0)]
    series = series_of(sections(same)["throughput and latency"])
    assert [name for name in series if name.startswith("limit")] == ["limit of A CPU"]
    assert len(series["limit of A CPU"].marks) == 7, "with the 64 workers of the other one"
    other = [*made.curve(), *made.curve(label="theirs", most=5.0, bandwidth=6e10)]
    names = [name for name in series_of(sections(other)["throughput and latency"]) if name.startswith("limit")]
    assert names == ["limit of ours 1.0", "limit of theirs 1.0"], "they read other weights"


def test_scheduled_arrivals_are_a_curve_of_their_own() -> None:
    points = [*made.curve(), made.point(4, rate=3.0), made.point(8, rate=5.0)]
    series = series_of(sections(points)["throughput and latency"])
    assert [mark.label for mark in series["ours 1.0, poisson"].marks] == ["3/s", "5/s"]
    assert series["ours 1.0, poisson"].dashed
    assert not series["ours 1.0"].dashed


def without_certificate(point: Point) -> Point:
    client = msgspec.structs.replace(point.client, trusted=False, ttft_added_ms=None)
    flags = [*point.validity.flags, "client not certified"]
    return msgspec.structs.replace(point, client=client, validity=Validity(grade="C", flags=flags))


def test_why_a_client_is_not_trusted_is_told_as_it_is() -> None:
    late, beyond = made.point(64, trusted=False), made.point(32, trusted=False)
    bare = without_certificate(made.point(4))
    beyond.validity.flags = ["client certified for 16 requests at a time, not 32"]
    assert [words.doubt(each) for each in (late, beyond, bare, made.point(4))] == [
        "the client did not keep up",
        "the client was not certified for this load",
        "the client was not certified",
        "",
    ]
    text = page(report(of_points([without_certificate(point) for point in made.curve()]), "t", Slo(), None))
    assert "did not keep up" not in text
    assert "the client was not certified</span>" in text
    section = sections([bare, made.point(8)])["throughput and latency"]
    assert [row[-2] for row in section.table.rows] == ["not certified", "trusted"]


def depth(prompt: int, batch: int = 1, told: bool = True) -> Point:
    """A point of bench decode, of an older version where its prompts are not told."""
    point = made.point(batch)
    load = Load(arrivals="batch", concurrency=batch)
    lengths = msgspec.structs.replace(point.workload.prompt, mean=prompt - 0.2)
    return msgspec.structs.replace(
        point,
        kind="decode",
        load=load,
        workload=msgspec.structs.replace(point.workload, prompt=lengths),
        extra={"prompt": prompt} if told else {},
    )


@pytest.mark.parametrize("told", [True, False])
def test_points_of_decode_name_their_prompts_and_are_not_joined(told: bool) -> None:
    points = [depth(1, told=told), depth(1024, told=told), depth(1024, 8, told=told)]
    assert [words.load_name(point) for point in points] == [
        "batch of 1, prompts of 1",
        "batch of 1, prompts of 1,024",
        "batch of 8, prompts of 1,024",
    ]
    section = sections(points)["throughput and latency"]
    assert [[mark.label.removesuffix(" knee") for mark in each.marks] for each in section.charts[0].series] == [
        ["1 at 1"],
        ["1 at 1,024", "8 at 1,024"],
    ]
    assert [row[1] for row in section.table.rows] == [words.load_name(point) for point in points]
    rows = list(csv.DictReader(io.StringIO(csv_of_points([*points, made.point(4)]))))
    assert [row["prompt"] for row in rows] == ["1", "1024", "1024", ""]
    assert len({key_of(point) for point in points}) == 3, "each is a load of its own over time"


def test_answers_without_text_are_among_what_failed() -> None:
    points = made.curve((1, 2))
    points[1] = msgspec.structs.replace(
        points[1], counts=msgspec.structs.replace(points[1].counts, completed=300, failed=20, empty=80)
    )
    section = sections(points)["concurrency"]
    assert [row[-1] for row in section.table.rows] == ["0.99 %", "25.00 %"]


def test_marks_of_other_loads_are_named() -> None:
    trace = msgspec.structs.replace(made.point(4), load=Load(arrivals="trace"))
    batch = msgspec.structs.replace(made.point(4), load=Load(arrivals="batch", concurrency=16))
    assert [words.short_load(point) for point in (trace, batch, made.point(4), made.point(4, rate=2.5))] == [
        "trace",
        "16",
        "4",
        "2.5/s",
    ]


def test_the_table_has_the_latency_that_the_chart_names() -> None:
    section = sections(made.curve())["throughput and latency"]
    assert section.charts[0].x.title == "latency of a request, mean, s"
    at = section.table.headings.index("mean latency, s")
    marks = section.charts[0].series[0].marks
    assert [row[at] for row in section.table.rows] == [words.digits(mark.x) for mark in marks]


def test_doubtful_points_are_grey_and_said() -> None:
    section = sections([*made.curve(), made.point(64, trusted=False)])["throughput and latency"]
    assert [mark.trusted for mark in series_of(section)["ours 1.0"].marks] == [True] * 6 + [False]
    assert section.table is not None
    assert section.table.rows[-1][-2:] == ("not trusted", "C, client used 92% of a core")
    assert (
        "the client did not keep up, grade C, client used 92% of a core"
        in series_of(section)["ours 1.0"].marks[-1].note
    )


def test_a_single_point_is_a_table_without_a_chart() -> None:
    shown = sections([made.point(4)])
    assert shown["throughput and latency"].charts == ()
    assert shown["users and devices"].charts == ()
    assert "concurrency" not in shown
    table = shown["throughput and latency"].table
    assert table is not None
    assert table.rows[0][:3] == ("ours 1.0", "4 workers", "4 [3.88, 4.12]")


def test_users_and_devices() -> None:
    point = made.point(4)
    four = msgspec.structs.replace(point, devices=[msgspec.structs.replace(point.devices[0], count=4)])
    mark = series_of(sections(made.curve((4, 8)))["users and devices"])["ours 1.0"].marks[-1]
    assert mark.x == pytest.approx(40), "a token of a user takes 25 ms"
    section = sections([*made.curve(), *made.curve(label="theirs", most=4.0)])["users and devices"]
    assert section.table is not None
    best = {(row[0], row[4]) for row in section.table.rows}
    assert ("ours 1.0", "yes") in best
    assert ("theirs 1.0", "yes") not in best
    four_mark = throughput._user_mark(four)
    assert four_mark is not None
    assert four_mark.y == pytest.approx(240 / 4)
    assert four_mark.y_interval == pytest.approx((240 * 0.97 / 4, 240 * 1.03 / 4))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=30))
def test_the_front_is_what_nothing_beats(places: list[tuple[int, int]]) -> None:
    def beaten(x: int, y: int) -> bool:
        return any(a >= x and b >= y and (a, b) != (x, y) for a, b in places)

    assert pareto(places) == sorted({(x, y) for x, y in places if not beaten(x, y)})


def test_concurrency_shows_tokens_ttft_and_failures() -> None:
    section = sections([*made.curve(), made.point(8, rate=5.0)], Slo(ttft=500, tpot=30, e2e=2000))["concurrency"]
    assert [chart.title for chart in section.charts] == [
        "tokens/s of answers", "time to the first token", "requests that failed",
    ]  # fmt: skip
    assert [(chart.x.log, chart.y.log, chart.y.zero) for chart in section.charts] == [
        (True, False, True), (True, True, False), (True, False, True),
    ]  # fmt: skip
    tokens = series_of(section)["ours 1.0"].marks
    assert [mark.x for mark in tokens] == [1, 2, 4, 8, 16, 32], "scheduled arrivals have no workers"
    assert tokens[2].y == pytest.approx(240)
    assert series_of(section, 2)["ours 1.0"].marks[0].y == pytest.approx(100 * 4 / 404)
    assert section.charts[1].rules[0].value == 500
    assert section.table is not None
    assert section.table.rows[0][3:] == ("188", "375", "562", "0.99 %")


def test_promises_are_shaded() -> None:
    shown = sections(made.curve(), Slo(ttft=500, tpot=25, e2e=2000))
    assert shown["throughput and latency"].charts[0].areas[0].low == 2.0, "seconds"
    assert shown["users and devices"].charts[0].areas[0].high == pytest.approx(40), "tokens/s of 25 ms"
    assert sections(made.curve())["throughput and latency"].charts[0].areas == ()


def test_points_without_latency_or_limit() -> None:
    bare = [msgspec.structs.replace(point, metrics={}, limit=None) for point in made.curve()]
    shown = sections(bare)
    assert "throughput and latency" not in shown
    plain = [msgspec.structs.replace(point, limit=None) for point in made.curve()]
    assert list(series_of(sections(plain)["throughput and latency"])) == ["ours 1.0"]


def test_a_limit_far_above_needs_a_logarithm() -> None:
    near = sections(made.curve())["throughput and latency"].charts[0]
    far = sections(made.curve(bandwidth=5e11))["throughput and latency"].charts[0]
    assert (near.y.log, far.y.log) == (False, True)


def test_latencies_count_from_the_planned_moment_where_that_is_known() -> None:
    point = made.point(4)
    late = msgspec.structs.replace(
        point,
        metrics={**point.metrics, "e2e_corrected": made.latencies(4000.0), "ttft_corrected": made.latencies(900.0)},
    )
    assert words.metric(late, words.TTFT) == 900
    marks = series_of(sections([late, made.point(8)])["throughput and latency"])["ours 1.0"].marks
    assert marks[0].x == pytest.approx(4.4), "seconds on average"


def test_the_limit_is_dashed_and_of_closed_loops_alone() -> None:
    series = series_of(sections([*made.curve((1, 2, 4, 8)), made.point(4, rate=3.0)])["throughput and latency"])
    assert series["limit of A CPU"].dashed
    assert len(series["limit of A CPU"].marks) == 4
    assert [mark.label for mark in series["ours 1.0"].marks] == ["1", "2", "4 knee", "8"]
    two = series_of(sections(made.curve((1, 2)))["throughput and latency"])["ours 1.0"]
    assert [mark.label for mark in two.marks] == ["1", "2"], "two points have no knee"


def test_a_median_that_stands_for_the_mean_has_its_interval() -> None:
    point = made.point(4)
    figure = msgspec.structs.replace(point.metrics["e2e"], mean=None)
    point = msgspec.structs.replace(point, metrics={**point.metrics, "e2e": figure})
    marks = series_of(sections([point, made.point(8)])["throughput and latency"])["ours 1.0"].marks
    assert (marks[0].x, marks[0].x_interval) == (pytest.approx(1.0), pytest.approx((0.97, 1.03)))
    assert marks[1].x_interval is None, "the interval of a median is none of the mean"


def test_unknown_devices_count_as_one() -> None:
    assert throughput.devices(made.point(4)) == 1
    assert throughput.devices(msgspec.structs.replace(made.point(4), devices=[])) == 1


def test_traffic_that_nobody_sent_has_no_hash() -> None:
    assert throughput.traffic_name("typical", "abcdef0123") == "typical (traffic abcdef01)"
    assert throughput.traffic_name("512+256", "") == "512+256"


def test_goodput_has_a_column_where_something_was_promised() -> None:
    point = made.point(4)
    good = msgspec.structs.replace(point, metrics={**point.metrics, "goodput": made.figure(3.5, "requests/s")})
    table = sections([good, made.point(8)])["concurrency"].table
    assert table is not None
    assert table.headings[-1] == "goodput, requests/s"
    assert [row[-1] for row in table.rows] == ["3.5 [3.4, 3.6]", "-"]
    plain = sections(made.curve())["concurrency"].table
    assert plain is not None
    assert plain.headings[-1] == "failed"


def test_open_loops_have_goodput_too() -> None:
    point = made.point(4)
    load = msgspec.structs.replace(point.load, arrivals="poisson", concurrency=None, offered=4.0)
    metrics = {**point.metrics, "goodput": made.figure(3.5, "requests/s")}
    table = sections([msgspec.structs.replace(point, load=load, metrics=metrics)])["throughput and latency"].table
    assert table is not None
    assert dict(zip(table.headings, table.rows[0], strict=True))["goodput, requests/s"] == "3.5 [3.4, 3.6]"
    plain = sections(made.curve())["throughput and latency"].table
    assert plain is not None
    assert "goodput, requests/s" not in plain.headings


def test_definitions_say_of_which_loads_they_are() -> None:
    closed = made.point(4)
    load = msgspec.structs.replace(closed.load, arrivals="poisson", concurrency=None, offered=4.0)
    rate = msgspec.structs.replace(closed.metrics["request_rate"], definition="another formula")
    opened = msgspec.structs.replace(closed, load=load, metrics={**closed.metrics, "request_rate": rate})
    table = report(of_points([closed, opened]), "", throughput.Slo(), None).sections[-1].table
    assert table is not None
    rows = {(row[0], row[2]): row[3] for row in table.rows}
    assert rows["request_rate", "another formula"] == "scheduled arrivals"
    assert rows["request_rate", closed.metrics["request_rate"].definition] == "workers"
    assert rows["ttft", closed.metrics["ttft"].definition] == "all"
    alone = report(of_points([closed]), "", throughput.Slo(), None).sections[-1].table
    assert alone is not None
    assert alone.headings == ("metric", "unit", "definition")
