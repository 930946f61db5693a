"""Ratios: their intervals, those of systems in turns, and what machines give for their roofs."""

import math
import random

import msgspec
import pytest

from roofline.bench.report import ratios, words
from roofline.bench.report.gather import of_points
from roofline.bench.report.ratios import ratio
from roofline.bench.results.point import Point
from tests.bench.report import made


def with_rate(value: float, around: tuple[float, float] | None) -> Point:
    point = made.point(4)
    figure = msgspec.structs.replace(point.metrics["request_rate"], value=value, ci95=around)
    return msgspec.structs.replace(point, metrics={**point.metrics, "request_rate": figure})


def test_a_ratio_of_two_points_takes_both_intervals() -> None:
    new, old = with_rate(12, (12 / 1.1, 12 * 1.1)), with_rate(10, (10 / 1.2, 10 * 1.2))
    between = ratio([new], [old], words.REQUESTS)
    assert between is not None
    assert between.interval is not None
    assert between.value == pytest.approx(1.2)
    wide = math.hypot(math.log(1.1), math.log(1.2))
    assert between.interval == pytest.approx((1.2 * math.exp(-wide), 1.2 * math.exp(wide)))


def test_without_intervals_there_is_none_and_without_figures_no_ratio() -> None:
    between = ratio([with_rate(12, None)], [with_rate(10, (9, 11))], words.REQUESTS)
    assert between is not None
    assert between.interval is None
    assert ratio([msgspec.structs.replace(made.point(4), metrics={})], [made.point(4)], words.REQUESTS) is None


def test_three_points_say_their_own_spread() -> None:
    """The points' intervals are far too narrow here; what counts is how much they differ from each other."""
    generator, inside = random.Random(2), 0
    for _ in range(300):
        new, old = (
            [with_rate(10 * math.exp(generator.gauss(0, 0.1)), (9.99, 10.01)) for _ in range(8)] for _ in range(2)
        )
        between = ratio(new, old, words.REQUESTS)
        assert between is not None
        assert between.interval is not None
        inside += between.interval[0] <= 1 <= between.interval[1]
    assert 0.9 <= inside / 300 <= 0.98


def test_systems_in_turns() -> None:
    section = ratios.forest(of_points([*made.compared(1.6), *made.compared(1.01, 16, verdict="no difference")]))
    assert section is not None
    chart = section.charts[0]
    assert chart.y.categories[0] == "throughput: ours 1.0 / llama.cpp 1.0, typical, 4 workers"
    assert [(mark.x, mark.y) for mark in chart.series[0].marks] == [(1.6, 0), (1 / 1.6, 1), (1.01, 2), (1 / 1.01, 3)]
    assert chart.series[0].marks[0].x_interval == pytest.approx((1.6 * 0.97, 1.6 * 1.03))
    assert chart.rules[0].value == 1
    assert section.table is not None
    assert section.table.rows[0][2:5] == ("1.6", "1.552", "1.648")
    assert [row[5] for row in section.table.rows] == ["B is higher, which is better", "-", "no difference", "-"]
    assert ratios.forest(of_points(made.curve())) is None


def test_what_a_machine_gives_for_its_roof() -> None:
    """The other machine has twice the roofs and 1.5 times the throughput: it gives 0.75 of its worth."""
    one = [made.point(8, most=8.0)]
    two = [made.point(8, most=12.0, chip="Another CPU", bandwidth=1e11)]
    section = ratios.machines(of_points([*one, *two]))
    assert section is not None
    assert section.table is not None
    ((traffic, system, against, throughput, memory, compute, bound, worth),) = section.table.rows
    assert (system, against) == ("ours 1.0, Another CPU", "ours 1.0, A CPU")
    assert throughput.startswith("1.5 [1.4")
    assert (memory, compute, bound, worth) == ("2", "2", "memory", "0.75")
    assert traffic == "typical (traffic aaaaaaaa)"
    share = 2 / (1 / (8 * 2 / 3 / 10) + 1 / (8 / 20))
    assert f"the best shares of the limit is {share:.0%}" in section.text
    assert ratios.machines(of_points(one)) is None


def test_only_trusted_points_stand_for_a_machine() -> None:
    points = [made.point(4), made.point(64, trusted=False), *made.curve(chip="Another CPU")]
    best = ratios._best(of_points(points).points)
    assert [each.point.load.concurrency for each in best if each.point.load] == [4, 32]


def test_measured_roofs_come_before_data_sheets() -> None:
    points = []
    for chip, read in (("A CPU", 5e10), ("Another CPU", 1e11)):
        point = made.point(8, chip=chip, bandwidth=read)
        devices = [msgspec.structs.replace(point.devices[0], sheet_flops=9e12, sheet_bytes_per_s=9e11)]
        points.append(msgspec.structs.replace(point, devices=devices))
    section = ratios.machines(of_points(points))
    assert section is not None
    assert section.table is not None
    assert section.table.rows[0][4:6] == ("2", "2")


def test_roofs_of_data_sheets_where_one_machine_is_not_measured() -> None:
    sheet = made.point(8, chip="MI300X", most=9.0)
    devices = [
        msgspec.structs.replace(
            sheet.devices[0], measured_flops=0.0, measured_bytes_per_s=0.0, sheet_flops=4e12, sheet_bytes_per_s=4e11
        )
    ]
    base = made.point(8)
    own = [msgspec.structs.replace(base.devices[0], sheet_flops=1e12, sheet_bytes_per_s=1e11)]
    points = [msgspec.structs.replace(base, devices=own), msgspec.structs.replace(sheet, devices=devices)]
    section = ratios.machines(of_points(points))
    assert section is not None
    assert section.table is not None
    assert section.table.rows[0][4:6] == ("4", "4")


def test_without_a_roof_that_bounds_there_is_no_worth() -> None:
    points = []
    for chip in ("A CPU", "Another CPU"):
        point = made.point(8, chip=chip)
        assert point.limit is not None
        points.append(msgspec.structs.replace(point, limit=msgspec.structs.replace(point.limit, bound="links")))
    section = ratios.machines(of_points(points))
    assert section is not None
    assert section.table is not None
    assert section.table.rows[0][-2:] == ("links", "-")


def test_two_points_halve_the_variance_of_their_intervals() -> None:
    new, old = [with_rate(12, (12 / 1.1, 12 * 1.1))] * 2, [with_rate(10, (9.999999, 10.000001))] * 2
    between = ratio(new, old, words.REQUESTS)
    assert between is not None
    assert between.interval is not None
    assert math.log(between.interval[1] / 1.2) == pytest.approx(math.log(1.1) / math.sqrt(2), rel=1e-3)
    below = [with_rate(10, (0.0, 20.0))]
    unknown = ratio(new, below, words.REQUESTS)
    assert unknown is not None
    assert unknown.interval is None, "a logarithm has no interval that begins at 0"
