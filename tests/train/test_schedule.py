"""Learning rates against values computed by hand."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from roofline.common.errors import ConfigError
from roofline.train.config.duration import DurationUnits, batches
from roofline.train.config.schema import OptimizerSection, SchedulerSection
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
    at = factor("inv_sqrt_with_warmup", t_warmup="10ba", t_scale="30ba", t_max="20000ba", alpha_f=0.25)
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


# name, options, max_duration; the factors at batches 1, 4, 5, 12, 30 and 39 of 12 rows of 16 tokens, 10 an epoch, by
# the classes of Composer 0.32.1 and LLM Foundry 0.22.0.
THEIRS: list[tuple[str, dict[str, Any], str, list[float]]] = [
    ("cosine_with_warmup", {"t_warmup": "0.11dur"}, "40ba",
     [0.25, 1.0, 0.998097349046, 0.883022221559, 0.178606195157, 0.001902650954]),
    ("cosine_with_warmup", {"t_warmup": "0.29dur", "alpha_f": 0.1}, "100ba",
     [0.035714285714, 0.142857142857, 0.178571428571, 0.428571428571, 0.998287614141, 0.94915487493]),
    ("cosine_with_warmup", {"t_warmup": "0.29dur", "alpha_f": 0.1}, "10ep",
     [0.034482758621, 0.137931034483, 0.172413793103, 0.413793103448, 0.999559551934, 0.956662064937]),
    ("linear_decay_with_warmup", {"t_warmup": "1000tok", "alpha_f": 0.02}, "10000tok",
     [0.192, 0.768, 0.96, 0.858008888889, 0.481688888889, 0.293528888889]),
    ("linear_decay_with_warmup", {"t_warmup": "0.123dur"}, "10000tok",
     [0.156097560976, 0.624390243902, 0.780487804878, 0.877537058153, 0.4834663626, 0.286431014823]),
    ("linear_decay_with_warmup", {"t_warmup": "100sp", "t_max": "700sp"}, "490sp",
     [0.12, 0.48, 0.6, 0.926666666667, 0.566666666667, 0.386666666667]),
    ("linear_decay_with_warmup", {"t_warmup": "0.07dur", "t_max": "1dur", "alpha_f": 0.02}, "605sp",
     [0.285714285714, 0.989555950266, 0.968667850799, 0.822451154529, 0.446465364121, 0.258472468917]),
    ("cosine_with_warmup", {"t_warmup": "1ep", "t_max": "5ep"}, "5ep",
     [0.1, 0.4, 0.5, 0.993844170298, 0.5, 0.175275975835]),
    ("constant_with_warmup", {"t_warmup": "1000tok"}, "7680tok",
     [0.192, 0.768, 0.96, 1.0, 1.0, 1.0]),
    ("inv_sqrt_with_warmup", {"t_warmup": "4ba", "t_scale": "3ba", "t_cooldown": "0ba", "alpha_f_decay": 0.3}, "40ba",
     [0.25, 1.0, 0.906217782649, 0.665563077507, 0.525143632316, 0.496683020432]),
    ("inv_sqrt_with_warmup", {"t_warmup": "4ba", "t_scale": "3ba", "t_cooldown": "10ba",
      "alpha_f_decay": 0.3, "alpha_f_cooldown": 0.1}, "40ba",
     [0.25, 1.0, 0.906217782649, 0.665563077507, 0.525143632316, 0.142514363232]),
    ("inv_sqrt_with_warmup", {"t_warmup": "500tok", "t_scale": "100tok", "t_cooldown": "2500tok",
      "t_max": "6000tok"}, "7680tok",
     [0.384, 0.521286035143, 0.422577127364, 0.229174624257, 0.017242108995, 0.0]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "end", "expected"), THEIRS)
def test_rates_are_those_of_composer_and_llm_foundry(
    name: str, options: dict[str, Any], end: str, expected: list[float]
) -> None:
    units = DurationUnits(samples=12, tokens=16, epoch=120)
    units = replace(units, total=batches("max_duration", end, units), end=end)
    at = schedule(SchedulerSection(name=name, **options), units)  # type: ignore[arg-type]
    assert [at(step) for step in (1, 4, 5, 12, 30, 39)] == pytest.approx(expected, abs=1e-11)


def test_an_epoch_between_batches_is_as_long_as_it_is() -> None:
    units = DurationUnits(samples=12, tokens=16, epoch=102, total=17, end="2ep")  # 8.5 batches an epoch
    at = schedule(SchedulerSection(name="linear_decay_with_warmup", t_warmup="1ep", t_max="2ep"), units)
    assert [at(step) for step in (8, 9, 16, 17)] == [close(v) for v in (8 / 8.5, 1 - 0.5 / 8.5, 1 / 8.5, 0.0)]


def test_keys_of_inverse_roots_belong_to_them() -> None:
    with pytest.raises(ValueError, match="t_cooldown belongs to inv_sqrt_with_warmup, not to cosine_with_warmup"):
        SchedulerSection(name="cosine_with_warmup", t_cooldown="3ba")
    with pytest.raises(ValueError, match="give one of them"):
        SchedulerSection(name="inv_sqrt_with_warmup", alpha_f=0.1, alpha_f_decay=0.1)
    with pytest.raises(ValueError, match="the rate must not rise again"):
        SchedulerSection(name="inv_sqrt_with_warmup", alpha_f_cooldown=0.1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("decoupled_adamw", ((0.9, 0.95), 1e-8, 1e-5)), ("decoupled_lionw", ((0.9, 0.99), 1e-8, 0.0))],
)
def test_defaults_of_optimizers_are_those_of_their_classes(name: str, expected: tuple[Any, ...]) -> None:
    """Of Composer 0.32.1's DecoupledAdamW and LLM Foundry 0.22.0's DecoupledLionW, which has no eps."""
    for more in ({}, {"betas": None, "weight_decay": None}):
        section = OptimizerSection.model_validate({"name": name, "lr": 1e-3, **more})
        assert (section.betas, section.eps, section.weight_decay) == expected
    assert OptimizerSection.model_validate({"name": name, "lr": 1e-3, "weight_decay": 0}).weight_decay == 0
