"""Learning rates against values computed by hand."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from roofline.common.errors import ConfigError
from roofline.train.config.duration import DurationUnits
from roofline.train.config.schema import SchedulerSection
from roofline.train.run.schedule import schedule

RUN = DurationUnits(samples=8, tokens=16, epoch=400, total=100)  # 50 batches an epoch


def factor(name: str, **options: Any) -> Callable[[int], float]:
    return schedule(SchedulerSection(name=name, **options), RUN)


def close(expected: float) -> Any:
    return pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(
    "name",
    [
        *("constant_with_warmup", "cosine_with_warmup", "linear_decay_with_warmup", "inv_sqrt_with_warmup"),
        "warmup_stable_decay",
    ],
)
def test_warmup_rises_from_zero_to_one(name: str) -> None:
    at = factor(name, t_warmup="10ba", alpha_f=0.1)
    assert [at(step) for step in (0, 1, 5, 9, 10)] == [0.0, 0.1, 0.5, 0.9, 1.0]
    assert factor(name)(0) == 1.0, "without warmup the first step takes the whole rate"


def test_constant() -> None:
    at = factor("constant_with_warmup", t_warmup="0.1dur", alpha_f=0.5)
    assert {at(step) for step in range(10, 300)} == {1.0}


def test_cosine() -> None:
    at = factor("cosine_with_warmup", t_warmup="20ba", alpha_f=0.1)
    assert at(20) == 1.0
    assert at(40) == close(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)  # a quarter of 80 batches
    assert at(60) == close(0.55)
    assert at(100) == close(0.1)
    assert at(5000) == close(0.1)


def test_linear() -> None:
    at = factor("linear_decay_with_warmup", t_warmup="20ba", alpha_f=0.2)
    assert [at(step) for step in (20, 40, 60, 100, 101)] == [close(v) for v in (1.0, 0.8, 0.6, 0.2, 0.2)]


def test_inverse_square_root() -> None:
    at = factor("inv_sqrt_with_warmup", t_warmup="10ba", t_scale="30ba", alpha_f=0.25)
    assert [at(step) for step in (10, 100, 280)] == [close(v) for v in (1.0, 0.5, math.sqrt(0.1))]
    assert at(459) > 0.25
    assert at(460) == close(0.25)
    assert at(10_000) == 0.25


@pytest.mark.parametrize(("decay", "half"), [("cosine", 0.5), ("linear", 0.5), ("1-sqrt", 1 - math.sqrt(0.5))], ids=str)
def test_warmup_stable_decay(decay: str, half: float) -> None:
    at = factor("warmup_stable_decay", t_warmup="10ba", t_decay="20ba", alpha_f=0.1, decay=decay)
    assert {at(step) for step in range(10, 81)} == {1.0}
    assert at(81) < 1.0
    assert at(90) == close(0.1 + 0.9 * half)
    assert at(100) == close(0.1)
    assert at(120) == close(0.1)


def test_a_decay_longer_than_the_run_begins_behind_the_warmup() -> None:
    at = factor("warmup_stable_decay", t_warmup="20ba", t_decay="1dur", decay="linear")
    assert [at(step) for step in (19, 20, 60, 100)] == [close(v) for v in (0.95, 1.0, 0.5, 0.0)]


def test_lengths_in_every_unit() -> None:
    at = factor("linear_decay_with_warmup", t_warmup="80sp", t_max="1ep")  # 10 and 50 batches
    assert [at(step) for step in (5, 10, 30, 50, 99)] == [close(v) for v in (0.5, 1.0, 0.5, 0.0, 0.0)]
    at = factor("linear_decay_with_warmup", t_warmup="1280tok", t_max="200ba")  # a horizon behind the run's end
    assert [at(step) for step in (5, 100)] == [close(v) for v in (0.5, 1 - 90 / 190)]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cosine_with_warmup", {"t_warmup": "1dur"}),
        ("linear_decay_with_warmup", {"t_warmup": "30ba", "t_max": "20ba"}),
        ("inv_sqrt_with_warmup", {"t_warmup": "30ba", "t_max": "20ba"}),
    ],
)
def test_a_warmup_that_does_not_fit_is_refused(name: str, options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.t_warmup: \d+ batches of warmup leave nothing of \d+"):
        factor(name, **options)


@pytest.mark.parametrize("name", ["cosine_with_warmup", "inv_sqrt_with_warmup", "warmup_stable_decay"])
def test_a_run_may_end_inside_its_warmup(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """As LLM Foundry's mpt-small-cpu.yaml does: 10 batches, of 100 of warmup."""
    rate = factor(name, t_warmup="200ba")
    assert [rate(step) for step in (0, 50, 99)] == [0, 0.25, 0.495]
    assert "ends inside its warmup of 200" in caplog.text


def test_a_warmup_of_the_whole_run_is_a_constant_schedule_all_the_same() -> None:
    assert factor("constant_with_warmup", t_warmup="1dur")(50) == 0.5


def test_wrong_lengths_are_named() -> None:
    for key in ("t_warmup", "t_max", "t_decay", "t_scale"):
        with pytest.raises(ValueError, match=rf"{key}\n.*'soon' is no duration"):
            factor("cosine_with_warmup", **{key: "soon"})
