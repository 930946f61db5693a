"""The plot of parity beside drawings that are kept (`python -m tests.train.test_plot` writes them anew)."""

import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from roofline.train.parity import plot
from roofline.train.parity.compare import compare
from roofline.train.parity.findings import HandOver, Noise, Parity
from roofline.train.parity.recorded_run import RecordedRun

GOLDEN = Path(__file__).parent / "golden"
WHY = "a reason with <signs> that is longer than three lines can show: " + "the difference of the losses, " * 14


def run(name: str, steps: int, first: int = 1, difference: float = 0.0) -> RecordedRun:
    at = np.arange(first, first + steps)
    loss = 2 + 3 * np.exp(-at / 9) + difference * np.sin(at)
    return RecordedRun(Path("runs") / name, at, loss, np.ones(steps), (), None, ())


def cases() -> dict[str, tuple[RecordedRun, RecordedRun, Parity]]:
    a, b = run("first", 60), run("a-second-run-whose-name-is-much-longer-than-the-48-letters-of-a-legend", 58, 3, 0.004)
    b.loss[[5, 30]] = math.nan, a.loss[32] + 0.5
    found = replace(compare(a, b), why=WHY)
    noise = Noise(3, 0.001, 0.002, 0.004, 0.0, 0.0, ((3, 20, 0.003), (21, 40, 0.006), (41, 60, 0.002)))
    places = [(8, "cpu"), (25, "gpu"), (28, "a long name without room"), (40, "other"), (43, ""), (58, "x")]
    long = replace(found, noise=noise, handovers=tuple(HandOver(step, name, None) for step, name in places))
    c, d = run("c", 12), run("d", 12, 1, 0.3)
    return {"parity": (a, b, long), "parity-short": (c, d, compare(c, d))}


@pytest.mark.parametrize("name", ["parity", "parity-short"])
def test_the_drawing_is_the_one_that_is_kept(name: str) -> None:
    text = plot.draw(*cases()[name])
    assert text == (GOLDEN / f"{name}.svg").read_text("utf-8")
    ElementTree.fromstring(text)


@pytest.mark.parametrize("steps", [840, 841, 3000])
def test_a_long_line_is_drawn_by_the_least_and_the_greatest_of_its_parts(steps: int) -> None:
    at = np.arange(1, steps + 1)
    values = np.sin(at * 0.7) + at / 500
    values[[4, 5]] = math.nan
    points = list(plot._points(at, values))
    if steps <= 840:
        assert len(points) == steps
        return
    assert 420 < len(points) <= 840
    assert [step for step, _ in points] == sorted(step for step, _ in points)
    assert all(values[int(step) - 1] == value for step, value in points)
    parts = np.array_split(np.arange(steps), 420)
    expected = sorted({float(at[part[np.argmin(values[part])]]) for part in parts[4:]})
    greatest = {float(at[part[np.argmax(values[part])]]) for part in parts[4:]}
    assert {*expected, *greatest} <= {step for step, _ in points}


def test_a_part_without_a_finite_value_leaves_a_gap() -> None:
    values = np.ones(2000)
    values[:10] = math.nan
    points = list(plot._points(np.arange(2000), values))
    assert math.isnan(points[0][1])
    assert points[0][0] == 0
    axes = plot.StepAxes(0.0, 100.0, (0.0, 1999.0), (0.0, 2.0))
    line = plot._line(axes, np.arange(6), np.array([1.0, 1.0, math.nan, 1.0, math.inf, 1.0]), "d")
    assert line.count("M") == 3
    assert line.count("L") == 1


@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [
        (0.0, 6.0, 6, [0, 1, 2, 3, 4, 5, 6]),
        (0.0, 6.1, 6, [0, 2, 4, 6]),
        (0.0, 12.0, 6, [0, 2, 4, 6, 8, 10, 12]),
        (0.0, 13.0, 6, [0, 5, 10]),
        (0.0, 30.0, 6, [0, 5, 10, 15, 20, 25, 30]),
        (0.0, 31.0, 6, [0, 10, 20, 30]),
        (-0.0123, 0.0123, 6, [-0.01, -0.005, 0.0, 0.005, 0.01]),
        (4.0, 4.0, 6, [4]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, count: int, expected: list[float]) -> None:
    assert plot._ticks(low, high, count) == expected


def test_ranges_and_numbers() -> None:
    assert plot._range(np.array([1.0, 3.0])) == pytest.approx((0.88, 3.12))
    assert plot._range(np.array([2.0, 2.0])) == (1.5, 2.5)
    assert plot._range(np.array([])) == pytest.approx((-0.06, 1.06))
    numbers = {0.0: "0", 1e-4: "0.0001", -1e-4: "-0.0001", 9.9e-5: "1e-04", 12345.6: "1.235e+04", 0.125: "0.125"}
    assert {number: plot._short(number) for number in numbers} == numbers


def test_runs_without_a_finite_loss_are_drawn() -> None:
    a = run("a", 1)
    broken = replace(a, loss=np.array([math.nan]))
    ElementTree.fromstring(plot.draw(broken, broken, compare(broken, broken)))


if __name__ == "__main__":
    for case, arguments in cases().items():
        (GOLDEN / f"{case}.svg").write_text(plot.draw(*arguments), "utf-8")
