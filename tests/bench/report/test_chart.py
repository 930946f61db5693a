"""Charts: scales and ticks, and SVG whose marks lie where their values are and whose labels keep apart."""

import itertools
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.bench.report.chart import Area, Axis, Chart, Mark, Rule, Scale, Series, scale
from roofline.bench.report.draw import DASHES, LOOKS, MOST_LABELS, NARROW, ROW, WIDE, draw, legend, tick
from roofline.bench.svg import CHARACTER, FONT, Box, Boxes


def drawn(chart: Chart, width: int = WIDE) -> ElementTree.Element:
    return ElementTree.fromstring(draw(chart, width))


def chart_of(*series: Series, log: bool = False, **more: object) -> Chart:
    return Chart(title="a <title>", x=Axis(title="x", log=log), y=Axis(title="y", zero=True), series=series, **more)  # type: ignore[arg-type]


def test_a_logarithmic_axis_says_so() -> None:
    chart = chart_of(Series(name="a", marks=(Mark(x=1, y=1), Mark(x=8, y=2)), look=0), log=True)
    texts = [each.text for each in drawn(chart).iter("text")]
    assert "x (log scale)" in texts
    assert "y" in texts


def named_labels(root: ElementTree.Element) -> dict[str, Box]:
    """The labels that were placed, by their text, as boxes."""
    return {
        f"{number} {text.text}": Box(
            float(text.get("x", "")), float(text.get("y", "")) - FONT + 1, len(text.text or "") * CHARACTER, FONT + 2
        )
        for number, text in enumerate(root.iter("text"))
        if "name" in text.get("class", "") or text.get("class") == "soft"
    }


@pytest.mark.parametrize(
    ("of", "most", "expected"),
    [
        (Scale(0, 10, False, 0, 100), 6, [0, 2, 4, 6, 8, 10]),
        (Scale(0, 1.06, False, 0, 100), 6, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (Scale(0, 56, False, 0, 100), 6, [0, 10, 20, 30, 40, 50]),
        (Scale(0, 7.1, False, 0, 100), 5, [0, 2, 4, 6]),
        (Scale(0, 2.2, False, 0, 100), 5, [0, 0.5, 1, 1.5, 2]),
        (Scale(1, 1000, True, 0, 100), 6, [1, 10, 100, 1000]),
        (Scale(1, 100, True, 0, 100), 8, [1, 2, 5, 10, 20, 50, 100]),
        (Scale(1e-3, 1e9, True, 0, 100), 5, [1e-3, 1, 1e3, 1e6, 1e9]),
        (Scale(1, 64, True, 0, 100), 5, [1, 3, 10, 30]),
        (Scale(0.9, 1.1, False, 0, 100, integral=True), 8, [1]),
        (Scale(0.8, 3.2, False, 0, 100, integral=True), 8, [1, 2, 3]),
        (Scale(0.9, 17, True, 0, 100, doubling=True), 8, [1, 2, 4, 8, 16]),
        (Scale(0.9, 2100, True, 0, 100, doubling=True), 8, [1, 4, 16, 64, 256, 1024]),
        (Scale(60, 90, True, 0, 100), 6, [60, 65, 70, 75, 80, 85, 90]),
    ],
)
def test_ticks(of: Scale, most: int, expected: list[float]) -> None:
    assert of.ticks(most) == pytest.approx(expected)


@given(st.floats(1e-6, 1e6), st.floats(1.001, 1e6), st.booleans(), st.integers(3, 9))
def test_ticks_lie_inside_and_are_few(low: float, times: float, log: bool, most: int) -> None:
    of = Scale(low, low * times, log, 0, 500)
    ticks = of.ticks(most)
    assert len(ticks) <= most + 1
    assert all(of.holds(tick * (1 - 1e-9)) or of.holds(tick * (1 + 1e-9)) for tick in ticks)
    assert ticks == sorted(set(ticks))


def test_scales_show_all_values() -> None:
    assert scale(Axis(title="", zero=True), [3, 10], 0, 100).low == 0
    assert scale(Axis(title="", zero=True), [-3, 10], 0, 100).low < -3
    log = scale(Axis(title="", log=True), [0, 2, 8], 0, 100)
    assert 0 < log.low < 2, "what is not positive has no place there"
    assert log.at(0) == log.at(log.low)
    assert log.at(4) - log.at(2) == pytest.approx(log.at(8) - log.at(4))
    assert scale(Axis(title="", least=0, most=100), [50, 60], 0, 1).high > 100
    single = scale(Axis(title=""), [5.0], 0, 100)
    assert single.low < 5 < single.high


def test_marks_lie_where_their_values_are() -> None:
    marks = (Mark(x=0, y=0), Mark(x=5, y=10), Mark(x=10, y=20, y_interval=(18, 22)))
    root = drawn(chart_of(Series(name="s", marks=marks, look=1)))
    squares = [each.get("d", "") for each in root.iter("path") if each.get("class") == "marker"]
    places = [tuple(map(float, re.findall(r"[\d.]+", path)[:2])) for path in squares]
    (x1, y1), (x2, y2), (x3, y3) = places
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.2)
    assert y1 > y3, "y grows upwards"
    span = next(each.get("d", "") for each in root.iter("path") if each.get("class") == "span")
    _, low, high = (float(each) for each in re.match(r"M([\d.]+) ([\d.]+)h6m-3 0V([\d.]+)", span).groups())  # type: ignore[union-attr]
    assert (low - (y3 + 4)) == pytest.approx(-(high - (y3 + 4)), abs=0.3), "the interval is around its mark"


def test_what_is_not_trusted_is_grey_and_hollow() -> None:
    root = drawn(chart_of(Series(name="s", marks=(Mark(x=1, y=1), Mark(x=2, y=2, trusted=False, label="b")), look=0)))
    looks = [each.get("class") for each in root.iter("path") if "marker" in each.get("class", "")]
    assert looks == ["marker", "marker hollow"]
    assert [each.get("class") for each in root.iter("g") if each.get("class") == "grey"] == ["grey"]
    assert next(each for each in root.iter("text") if each.text == "b").get("class") == "grey name"


def test_every_look_has_a_marker_and_a_dash_of_its_own() -> None:
    series = [Series(name=str(look), marks=(Mark(x=1, y=1),), look=look) for look in range(LOOKS)]
    markers = {
        re.sub(r"[\d.]+ [\d.]+", "", re.search(r'class="marker" d="M([^"]+)"', legend(each))[1]) for each in series
    }  # type: ignore[index]
    assert len(markers) == LOOKS
    assert len(set(DASHES)) == LOOKS
    steps = Series(name="a", marks=(Mark(x=1, y=1),), look=1, kind="steps")
    assert 'stroke-dasharray="7 3"' in legend(steps)


def test_steps_are_level_between_marks() -> None:
    root = drawn(
        chart_of(Series(name="s", marks=(Mark(x=1, y=0), Mark(x=2, y=50), Mark(x=3, y=100)), look=0, kind="steps"))
    )
    path = next(each.get("d", "") for each in root.iter("path") if each.get("class") == "curve")
    assert re.fullmatch(r"M[\d.]+ [\d.]+(H[\d.]+V[\d.]+){2}", path)


def test_categories_run_downwards_and_bars_have_their_width() -> None:
    marks = tuple(Mark(x=0, y=number, x_interval=(0, 10.0 * (number + 1))) for number in range(3))
    chart = Chart(
        title="t", x=Axis(title="ms", zero=True), y=Axis(title="", categories=("a", "b" * 200, "c")),
        series=(Series(name="s", marks=marks, look=0, kind="bars"),),
    )  # fmt: skip
    root = drawn(chart, NARROW)
    bars = [each for each in root.iter("rect") if each.get("class") == "bar"]
    widths = [float(each.get("width", "")) for each in bars]
    assert widths == pytest.approx([widths[0], 2 * widths[0], 3 * widths[0]], abs=0.3)
    rows = [float(each.get("y", "")) for each in bars]
    assert rows == pytest.approx([rows[0], rows[0] + ROW, rows[0] + 2 * ROW], abs=0.2)
    cut = next(each.text for each in root.iter("text") if (each.text or "").startswith("bbb"))
    assert cut is not None
    assert cut.endswith("…")


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 100)), min_size=1, max_size=25),
    st.sampled_from([WIDE, NARROW]),
)
def test_labels_keep_apart_and_inside(places: list[tuple[float, float]], width: int) -> None:
    marks = tuple(Mark(x=x, y=y, label=f"point {number}") for number, (x, y) in enumerate(places))
    chart = chart_of(
        Series(name="s", marks=marks, look=0), log=True, rules=(Rule("y", 50, "promised"), Rule("x", 10, "a rule")),
        areas=(Area("x", 20, None, "later than promised"),),
    )  # fmt: skip
    root = drawn(chart, width)
    boxes = named_labels(root)
    assert boxes
    height = float(root.get("viewBox", "").split()[3])
    for name, box in boxes.items():
        assert box.inside(Box(0, 0, width, height)), name
    for (a, first), (b, second) in itertools.combinations(boxes.items(), 2):
        assert not first.meets(second, 0), f"{a} over {b}"
    for path in root.iter("path"):
        if "marker" in path.get("class", ""):
            x, y = map(float, re.findall(r"[\d.]+", path.get("d", ""))[:2])
            dot = Box(x + 2.5, y - 2, 4, 4)
            assert not any(dot.meets(box, 0) for box in boxes.values()), "a label lies on a marker"


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("categories", [(), ("a", "b")])
def test_grid_and_titles(width: int, categories: tuple[str, ...]) -> None:
    marks = (Mark(x=0, y=0), Mark(x=10, y=1))
    chart = Chart(
        title="t", x=Axis(title="the x axis"), y=Axis(title="the y axis", categories=categories),
        series=(Series(name="s", marks=marks, look=0, kind="dots"),), rules=(Rule("x", 5, "a"), Rule("y", 0.5, "b")),
    )  # fmt: skip
    root = drawn(chart, width)
    height = float(root.get("viewBox", "").split()[3])
    lines = [[float(each.get(name, "")) for name in ("x1", "y1", "x2", "y2")] for each in root.iter("line")]
    assert all(0 <= x1 <= x2 <= width and 0 <= y1 <= y2 <= height for x1, y1, x2, y2 in lines)
    level = {round(y1) for x1, y1, x2, y2 in lines if y1 == y2 and x2 - x1 > width / 2}
    assert len(level) >= (2 if categories else 5)
    titles = {each.text: each for each in root.iter("text")}
    middle = titles["the x axis"]
    assert abs(float(middle.get("x", "")) - width / 2) < 30
    assert height - 12 < float(middle.get("y", "")) < height
    assert ("the y axis" in titles) is (not categories)
    if not categories:
        x, y = map(float, re.findall(r"[\d.]+", titles["the y axis"].get("transform", ""))[:2])
        assert x < 20
        assert abs(y - height / 2) < 30


def test_texts_of_others_are_escaped() -> None:
    text = draw(chart_of(Series(name="s", marks=(Mark(x=1, y=1, note="<b>", label="<i>"),), look=0)), WIDE)
    assert "<b>" not in text
    assert "<i>" not in text
    assert "&lt;b&gt;" in text
    assert 'aria-label="a &lt;title&gt;"' in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.25"), (2000, "2000"), (20000, "20k"), (3e6, "3M"), (-5e9, "-5G"), (1e12, "1T")],
)
def test_tick_texts(value: float, text: str) -> None:
    assert tick(value) == text
    assert math.isfinite(value)


def test_areas_cover_their_range_up_to_the_edges() -> None:
    marks = (Mark(x=0, y=0), Mark(x=100, y=100))
    areas = (Area("x", None, 50, "left"), Area("y", 50, None, "above"), Area("x", 500, None, "beyond"))
    root = drawn(chart_of(Series(name="s", marks=marks, look=0), areas=areas))
    first, second, beyond = (
        {name: float(each.get(name, "")) for name in ("x", "y", "width", "height")}
        for each in root.iter("rect")
        if each.get("class") == "area"
    )
    assert first["height"] > 2 * second["height"] * 0.9
    assert first["x"] + first["width"] == pytest.approx(second["x"] + second["width"] / 2, abs=1), "half of the x axis"
    assert second["height"] == pytest.approx(first["height"] * 0.53, rel=0.02), "half of the y axis, and its room"
    assert second["y"] == pytest.approx(first["y"], abs=0.2), "above is at the top"
    assert beyond["width"] == pytest.approx(0, abs=0.2)


def test_a_band_goes_round_its_intervals() -> None:
    marks = tuple(Mark(x=x, y=10, y_interval=(5, 15)) for x in (0, 1, 2))
    root = drawn(chart_of(Series(name="s", marks=marks, look=0, band=True)))
    (band,) = (each.get("d", "") for each in root.iter("path") if each.get("class") == "band")
    corners = [tuple(map(float, corner.split())) for corner in band.strip("MZ").split("L")]
    assert len(corners) == 6
    assert [x for x, _ in corners[:3]] == [x for x, _ in reversed(corners[3:])]
    assert {y for _, y in corners[:3]} != {y for _, y in corners[3:]}
    assert not [each for each in root.iter("path") if each.get("class") == "span"]


def test_axes_begin_at_zero_only_where_they_are_told_to() -> None:
    assert scale(Axis(title=""), [10, 11], 0, 1).low > 9
    assert scale(Axis(title="", zero=True), [10, 11], 0, 1).low == 0


@given(
    st.lists(st.tuples(*[st.floats(-100, 900)] * 2, *[st.floats(0, 120)] * 2), min_size=2, max_size=30), st.floats(0, 9)
)
def test_boxes_find_all_neighbours(corners: list[tuple[float, float, float, float]], gap: float) -> None:
    boxes = [Box(*each) for each in corners]
    kept = Boxes()
    kept += boxes[1:]
    assert kept.meet(boxes[0], gap) is any(boxes[0].meets(other, gap) for other in boxes[1:])


def test_a_crowd_of_marks_is_not_labelled() -> None:
    def labels(count: int) -> int:
        marks = tuple(Mark(x=number, y=number, label="a") for number in range(count))
        return len(named_labels(drawn(chart_of(Series(name="s", marks=marks, look=0)))))

    assert labels(MOST_LABELS) > 10
    assert labels(MOST_LABELS + 1) == 0
