"""The roofline chart: where points lie, how far the roofs reach, which of them are drawn."""

import msgspec
import pytest

from roofline.bench.plan.arrangements import place_of
from roofline.bench.plan.assumptions import assumed
from roofline.bench.plan.closed_loop import Lengths
from roofline.bench.plan.plan import Case, plan
from roofline.bench.plan.points import points_of
from roofline.bench.report import intensity, words
from roofline.bench.report.gather import of_points
from roofline.bench.results.point import Device, Point
from tests.bench.report import made


def on(point: Point, **changes: object) -> Point:
    """The point on devices with these figures."""
    return msgspec.structs.replace(point, devices=[msgspec.structs.replace(point.devices[0], **changes)])


def test_a_point_lies_at_what_it_computes_for_a_byte_and_in_a_second() -> None:
    """6e10 operations and 2.4e9 bytes a request; 4 requests a second are 40 % of the limit."""
    section = intensity.section(of_points([made.point(4)]))
    assert section is not None
    (mark,) = section.charts[0].series[-1].marks
    assert (mark.x, mark.y) == (pytest.approx(25), pytest.approx(4 * 6e10 / 1e12))
    assert mark.label == "4 workers 40%"
    assert section.table is not None
    assert section.table.rows == (("ours 1.0", "4 workers", "25", "240.0 Gop/s", "40%", "-", "memory"),)


def test_several_devices_share_what_is_reached() -> None:
    section = intensity.section(of_points([on(made.point(4), count=3)]))
    assert section is not None
    assert section.charts[0].series[-1].marks[0].y == pytest.approx(4 * 6e10 / 1e12 / 3)


def test_the_measured_roof_and_the_data_sheet_are_drawn_up_to_their_ridges() -> None:
    point = on(made.point(4), sheet_bytes_per_s=6e10, sheet_flops=3e12)
    section = intensity.section(of_points([point]))
    assert section is not None
    measured, sheet, _ = section.charts[0].series
    assert measured.name == "measured roof (50.0 GB/s, 1000.0 Gop/s)"
    assert [mark.x for mark in measured.marks] == pytest.approx([25 / 3, 20, 75])
    assert [mark.y for mark in measured.marks] == pytest.approx([25 / 3 * 0.05, 1.0, 1.0])
    assert sheet.name == "data sheet (60.0 GB/s, 3.0 Top/s)"
    assert [mark.x for mark in sheet.marks] == pytest.approx([25 / 3, 50, 75])
    assert (measured.dashed, sheet.dashed) == (False, True)
    assert {series.kind for series in (measured, sheet)} == {"line"}


def test_a_roof_without_arithmetic_is_slanted_throughout() -> None:
    section = intensity.section(of_points([on(made.point(4), measured_flops=0.0)]))
    assert section is not None
    roof = section.charts[0].series[0]
    assert roof.name == "measured roof (50.0 GB/s)"
    assert [mark.y / mark.x for mark in roof.marks] == pytest.approx([0.05] * 2)


def test_machines_have_roofs_of_their_own_names_and_looks() -> None:
    section = intensity.section(of_points([made.point(4), made.point(4, chip="Another CPU")]))
    assert section is not None
    first, second, *_ = section.charts[0].series
    assert (first.name[:19], second.name[:25]) == ("A CPU measured roof", "Another CPU measured roof")
    assert (first.look, second.look) == (7, 6)


def test_the_first_and_the_last_point_of_a_curve_are_named() -> None:
    section = intensity.section(of_points(made.curve()))
    assert section is not None
    labels = [mark.label for mark in section.charts[0].series[-1].marks]
    assert labels == ["1 worker 16%", "", "", "", "", "32 workers 71%"]


def test_points_without_what_it_takes_are_left_out() -> None:
    bare = msgspec.structs.replace(made.point(4), limit=None)
    assert intensity.section(of_points([bare])) is None
    limit = made.point(4).limit
    assert limit is not None
    for changes in ({"flops": 0.0}, {"seconds": 0.0}, {"weight_bytes": 0.0, "kv_bytes": 0.0}):
        point = msgspec.structs.replace(made.point(4), limit=msgspec.structs.replace(limit, **changes))
        assert intensity.section(of_points([point])) is None
    unknown = msgspec.structs.replace(made.point(4), devices=list[Device]())
    section = intensity.section(of_points([unknown]))
    assert section is not None
    assert [series.kind for series in section.charts[0].series] == ["dots"]


def test_systems_whose_roofs_differ_have_one_each() -> None:
    """A model of 8-bit integers and one of bf16 on one machine: each lies under the roof of its own products."""
    fast = on(made.point(4, label="int8"), measured_flops=8e12)
    section = intensity.section(of_points([fast, made.point(4, label="bf16"), made.point(8, label="bf16 too")]))
    assert section is not None
    names = [series.name for series in section.charts[0].series if series.kind == "line"]
    assert names == [
        "bf16 1.0, bf16 too 1.0 measured roof (50.0 GB/s, 1000.0 Gop/s)",
        "int8 1.0 measured roof (50.0 GB/s, 8.0 Top/s)",
    ]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_planned_point_lies_where_its_label_says(count: int) -> None:
    """Of copies and of devices that share one: what a device reaches, beside the roofs of a device."""
    case = Case("llama-3.2-1b", "", "MI300X", count, (4,), (Lengths(64, 8),), "64+8", (2048, 256))
    points = points_of(plan(case, place_of("MI300X", count, None), assumed()), "run")
    assert len(points) == count.bit_length()
    for point in points:
        section = intensity.section(of_points([point]))
        assert section is not None
        *_, dots = section.charts[0].series
        (mark,), device = dots.marks, point.devices[0]
        roof = min(mark.x * device.sheet_bytes_per_s, device.sheet_flops) / 1e12
        share = words.share(point)
        assert share is not None
        assert mark.label.endswith(words.percent(share))
        assert mark.y / roof == pytest.approx(share, rel=0.15)  # prompts and answers are bound by different roofs
        assert mark.y < roof
