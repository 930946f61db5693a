"""The figures of two runs' comparison, each against numpy on series that the tests make up; limits from both sides."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roofline.common.errors import ConfigError
from roofline.train.parity.compare import compare, pair
from roofline.train.parity.findings import Parity
from roofline.train.parity.recorded_run import RecordedRun
from roofline.train.parity.statistics import mean

STEPS = 101


def series(seed: int, steps: int = STEPS, sd: float = 0.002) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(steps) * sd


def run(loss: np.ndarray, norm: Any = 1.0, first: int = 5, name: str = "run", **more: Any) -> RecordedRun:
    steps = np.arange(first, first + len(loss))
    made = RecordedRun(Path(name), steps, 3 + loss, np.ones(len(loss)) * norm, (), None, ())
    return replace(made, **more)


def of(difference: np.ndarray, **options: Any) -> Parity:
    return compare(run(np.zeros(len(difference))), run(difference), **options)


def test_the_figures_of_a_difference() -> None:
    difference = series(1)
    difference[60] = -0.3
    compared = of(difference)
    exact = (3 + difference) - 3
    assert (compared.steps, compared.first, compared.last, compared.margin) == (STEPS, 5, 105, 0.01)
    loss = compared.loss
    assert loss is not None
    assert (loss.sd, loss.largest, loss.at) == (exact.std(), np.abs(exact).max(), 65)
    assert (loss.mean, loss.quarter) == (mean(exact), mean(exact[-25:]))
    assert (loss.early, loss.late) == (np.abs(exact[:25]).mean(), np.abs(exact[-25:]).mean())
    assert compared.spike is not None
    assert compared.spike_at == 65
    assert (compared.noise, compared.layers, compared.joints, compared.samples) == (None, None, (), None)
    plain = of(series(2))
    assert (plain.spike, plain.spike_at) == (None, None)


def test_a_step_is_after_the_last_step_before_it() -> None:
    compared = of(series(3) + 0.05 * (np.arange(STEPS) >= 40))
    assert compared.change is not None
    assert compared.change.stepped
    assert compared.change_at == 5 + compared.change.at - 1
    assert abs(compared.change_at - 44) <= compared.change.batch


@pytest.mark.parametrize(("steps", "is_judged"), [(63, False), (64, True)])
def test_as_many_steps_as_a_verdict_needs(steps: int, is_judged: bool) -> None:
    difference = series(4, steps)
    compared = compare(run(np.zeros(steps)), run(difference, norm=1.01), handovers=(5 + steps // 2,))
    judged = (compared.loss, compared.norm, compared.change)
    assert [each is not None for each in judged] == [is_judged] * 3
    assert compared.steps == steps
    spiked = difference.copy()
    spiked[10] = 9.0
    assert (of(spiked).spike is not None) == is_judged


@pytest.mark.parametrize(("missing", "is_judged"), [(0, True), (1, False)])
def test_norms_are_judged_by_their_own_number(missing: int, is_judged: bool) -> None:
    norms = np.full(64, 2.0)
    norms[:missing] = 0.0  # nothing was trained, and no logarithm is of it
    compared = compare(run(np.zeros(64)), run(series(5, 64), norm=norms))
    assert (compared.norm is not None) == is_judged
    if compared.norm is not None:
        assert compared.norm.mean == pytest.approx(np.log(2))


def test_pairs_leave_out_what_is_not_finite() -> None:
    a, b = run(np.zeros(6)), run(np.arange(6.0), norm=np.array([1, 2, 0, np.inf, np.nan, -1.0]))
    a.loss[1], b.loss[1], b.loss[4] = np.nan, np.inf, np.nan
    compared = pair(a, b)
    assert compared.steps.tolist() == [5, 7, 8, 10]
    assert compared.loss.tolist() == [0, 2, 3, 5]
    assert compared.norm.tolist() == [0.0, np.log(2)]
    assert (compared.bits, compared.broken) == (False, 9), "at step 6 both are not"
    same = pair(a, a)
    assert (same.bits, same.broken) == (True, None)
    assert not pair(a, replace(a, norm=a.norm * 2)).bits
    assert not pair(a, replace(a, loss=a.loss + 1)).bits


def test_steps_without_a_finite_loss_are_none() -> None:
    nothing = run(np.full(3, np.nan))
    compared = compare(nothing, nothing)
    assert (compared.steps, compared.first, compared.last) == (0, 0, 0)
    with pytest.raises(ConfigError, match="--handover 6 is not between"):
        compare(nothing, nothing, handovers=(6,))
    assert compare(replace(nothing, handovers=((6, "b"),)), nothing).handovers == ()


def test_the_noise_is_that_of_all_pairs_of_repeats() -> None:
    losses = [series(seed) for seed in (1, 2, 3)]
    a, *repeats = (run(loss) for loss in losses)
    compared = compare(a, run(series(4)), repeats)
    noise = compared.noise
    assert noise is not None
    x, y, z = ((3 + loss) for loss in losses)
    pairs = [y - x, z - x, z - y]
    everything = np.concatenate(pairs)
    assert (noise.pairs, noise.largest) == (3, np.abs(everything).max())
    assert noise.sd == pytest.approx(np.sqrt(np.mean(everything**2)))
    assert noise.quantile == np.quantile(np.abs(everything), 0.95)
    assert noise.mean == pytest.approx(np.sqrt(np.mean([each.mean() ** 2 for each in pairs])))
    assert noise.quarter == pytest.approx(np.sqrt(np.mean([each[-25:].mean() ** 2 for each in pairs])))
    assert len(noise.bands) == 20
    parts = np.array_split(np.arange(STEPS), 20)
    for band, part in zip(noise.bands, parts, strict=True):
        values = np.abs(np.concatenate([each[part] for each in pairs]))
        assert band == (5 + part[0], 5 + part[-1], np.quantile(values, 0.95))
    assert compared.loss is not None
    assert compared.loss.mean.error >= noise.mean
    assert compared.loss.quarter.error >= noise.quarter


def test_noise_is_of_the_steps_that_the_runs_have_in_common() -> None:
    """Of a few steps each is a band; those that no repeat has are none."""
    a, b = run(series(1, 9)), run(series(2, 4), first=7)
    repeat = run(series(3, 9)[:4], first=5)  # steps 5 to 8, of which 7 and 8 count
    noise = compare(a, b, [repeat]).noise
    assert noise is not None
    apart = (repeat.loss - a.loss[:4])[2:]
    assert noise.bands == ((7, 7, abs(apart[0])), (8, 8, abs(apart[1])))
    assert noise.largest == np.abs(apart).max()
    assert noise.mean == pytest.approx(abs(apart.mean()))
    assert noise.quarter == 0.0, "the repeat has no step of the last quarter"


@pytest.mark.parametrize(("largest", "is_spike"), [(0.1, True), (0.4, False)])
def test_a_leap_counts_beyond_what_repeats_do(largest: float, is_spike: bool) -> None:
    noisy, leaping = series(6, sd=1e-4), series(7, sd=1e-4)
    noisy[20], leaping[50] = largest, 0.3
    compared = compare(run(np.zeros(STEPS)), run(leaping), [run(noisy)])
    assert (compared.spike is not None) == is_spike


@pytest.mark.parametrize(("sd", "around"), [(0.0, "are equal"), (1e-3, "scatter by 0.00")])
def test_a_leap_is_told_from_the_steps_around_it(sd: float, around: str) -> None:
    difference = series(6, sd=sd)
    difference[50] = 3.0
    assert f"where the steps around it {around}" in of(difference).why


def test_handovers_lie_inside_the_common_steps() -> None:
    a = run(series(1), handovers=((4, "early"), (5, "first"), (50, "middle"), (104, "last"), (105, "late")))
    b = run(series(2), handovers=((60, "b"),))
    compared = compare(a, b, handovers=(50, 70))
    named = [(each.step, each.name) for each in compared.handovers]
    assert named == [(5, "first"), (50, "middle"), (60, "b"), (70, ""), (104, "last")]
    for step in (5, 104):
        assert [each.step for each in of(series(1), handovers=(step,)).handovers] == [step]
    for step in (4, 105):
        with pytest.raises(ConfigError, match=f"--handover {step} is not between"):
            of(series(1), handovers=(step,))


def test_a_jump_is_judged_between_its_step_and_the_next() -> None:
    compared = of(series(1, sd=1e-4) + 0.2 * (np.arange(STEPS) >= 50), handovers=(54,))
    (handover,) = compared.handovers
    assert handover.jump is not None
    assert handover.jump.at == 50, "54 is the 50th step"
    assert handover.jump.jump == pytest.approx(0.2, abs=1e-3)


def test_settings_of_where_results_go_do_not_count() -> None:
    a = run(np.zeros(3), settings={"seed": 1, "save_folder": "x", "probes": True, "only.a": 2, "same": 3})
    b = run(np.zeros(3), settings={"seed": 2, "save_folder": "y", "probes": False, "same": 3, "only.b": None})
    assert compare(a, b).settings == (("seed", 1, 2), ("only.a", 2, None))
    assert compare(a, replace(b, settings={})).settings == ()
    assert compare(replace(a, settings={}), b).settings == ()


def line(step: int, value: float = 1.0, **more: Any) -> dict[str, Any]:
    """A line of probes with one tensor of each kind."""
    part = {"name": "layer 0", "size": 64, "sketch": [value, 1.0]}
    kinds = {"activations": [part | {"rms": 1.0}], "gradients": [part | {"norm": 1.0}]}
    return {"step": step, "rows": [1], "tokens": 8, "precision": "fp32", **kinds, **more}


def test_layers_are_compared_at_the_first_common_probe() -> None:
    def layers_of(a: list[Any], b: list[Any], repeats: list[list[Any]] | None = None) -> Any:
        runs = [run(np.zeros(3), probes=tuple(lines)) for lines in (a, b, *(repeats or []))]
        return compare(runs[0], runs[1], runs[2:]).layers

    assert layers_of([line(0)], [line(2)]) is None
    begun = layers_of([line(0), line(2)], [line(2), line(4)])
    assert (begun.step, begun.judged) == (2, True), "B starts there, from A's weights"
    late = layers_of([line(0), line(4)], [line(2), line(4)])
    assert (late.step, late.judged) == (4, False), "both have trained by then"
    beside = layers_of([line(0), line(4)], [line(2), line(4, 1.5)], [[line(4, 1.4)], [line(3)]])
    assert (beside.judged, beside.by_repeats, beside.activation) == (True, True, None)
    other_rows = layers_of([line(0), line(4)], [line(2), line(4)], [[line(4, rows=[2])]])
    assert not other_rows.judged, "a repeat with other rows is none"
    again = layers_of([line(0, 1.0), line(0, 9.0)], [line(0, 1.0), line(0, 9.0)])
    assert again.activation is None
    assert layers_of([line(0, 1.0), line(0, 9.0)], [line(0, 9.0), line(0, 1.0)]).activation == "layer 0"


def test_joints_are_where_a_run_has_probed_a_step_twice() -> None:
    lines = (line(0), line(2), line(2, 1.5), line(2), line(4), line(4, 1.5), line(6), line(6, rows=[2]))
    compared = compare(run(np.zeros(3), probes=lines, name="a"), run(np.zeros(3), name="b"))
    found = [(joint.run, joint.layers.step, joint.layers.activation) for joint in compared.joints]
    assert found == [("a", 2, None), ("a", 4, "layer 0")], "the first beside the last, if of the same rows"
