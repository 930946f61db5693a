"""Tuning a small model: a planted slow default is replaced, a run can stop and go on, a load takes what fits it."""

import json
import logging
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

native = pytest.importorskip("roofline._native", reason="the C++ core is not built")
sys.path.insert(0, str(Path(__file__).parent))

from cpu_models import checkpoint, executable  # noqa: E402

from roofline.backends.cpu.select import DEFAULT, REGIMES, choose_variants  # noqa: E402
from roofline.backends.cpu.tuning import contest, variants  # noqa: E402
from roofline.backends.cpu.tuning import tune as tuning  # noqa: E402
from roofline.backends.cpu.tuning.tune import Tuner  # noqa: E402
from roofline.common.errors import ConfigError  # noqa: E402
from roofline.hardware import detect  # noqa: E402
from roofline.hardware.tuning import store as tunings  # noqa: E402
from tests.backends import hybrid_models  # noqa: E402

ISA = native.isas()[0]
SLOW = {"linear": "1x1 fetch=off claim=1"}  # one row tile, one token: every weight unpacked again for every token


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path))
    monkeypatch.setattr(contest, "BUSY", float("inf"))
    monkeypatch.setattr(tuning, "VERDICT_ROUNDS", 40)  # steps are short here, and other tests run beside them


def model(threads: int = 1):
    return executable(checkpoint("llama", "Q4_1"), isa=ISA, threads=threads, pages=128)


def stored():
    machine = detect.detect()
    return tunings.load("cpu", machine.fingerprint, machine.chip)


def tune(run, **options):
    """Tunes with the fewest rounds that can decide; the tuner."""
    tuner = Tuner(run, "llama", stored(), **options)
    plan = tuner.plan()
    few = contest.Rounds().scaled(0)
    for contests in plan.contests.values():
        for one in contests:
            one.rounds = few
    list(tuner.run(plan))
    return tuner


def plant_times(run, monkeypatch):
    """Steps really run, and their results are checked, but their times come from the variants that are chosen: an op
    with the planted slow default takes three times as long as with any other. So the machine's noise decides nothing.
    """
    chosen, rng, now = {}, random.Random(7), 0.0

    def op_seconds():
        regime = variants.regime_of(run.batch.tokens)
        slow = [chosen.get((op, regime)) == SLOW["linear"] for op in range(len(run.program.body))]
        return [(3e-4 if is_slow else 1e-4) * rng.uniform(1, 1.01) for is_slow in slow]

    def forward():
        nonlocal now
        type(run).forward(run)
        now += sum(op_seconds())

    def choose(ops, regime, variant):
        type(run).choose(run, ops, regime, variant)
        chosen.update({(op, regime): variant for op in ops})

    for name, function in (("op_seconds", op_seconds), ("forward", forward), ("choose", choose)):
        monkeypatch.setattr(run, name, function)
    monkeypatch.setattr(tuning, "time", SimpleNamespace(perf_counter=lambda: now, monotonic=time.monotonic))
    return run


@pytest.mark.slow
def test_a_planted_slow_default_is_replaced_and_steps_become_faster(monkeypatch):
    tuner = tune(plant_times(model(), monkeypatch), defaults=SLOW, again=True)
    (verdict,) = [v for v in stored().verdicts.values() if v.regime == REGIMES[2]]
    assert verdict.kept, verdict.figures
    assert verdict.figures["high"] < 1
    many = [r for r in stored().records.values() if r.regime == REGIMES[2]]
    assert len([r for r in many if r.variant != r.default]) == len(verdict.choices)
    replaced = [r for r in many if r.kind == "linear" and r.variant != r.default]
    assert replaced
    assert all(r.default == SLOW["linear"] and r.figures["high"] < 1 for r in replaced)
    fresh = model()
    chosen = choose_variants(fresh)
    assert "tuned" in str(chosen.value)
    assert REGIMES[2] in chosen.reason
    assert tuner.executable.fingerprint == fresh.fingerprint  # no choice is part of a result


def test_an_interrupted_run_goes_on_where_it_stopped():
    run = model()
    tuner = Tuner(run, "llama", stored())
    plan = tuner.plan()
    total = sum(len(contests) for contests in plan.contests.values())
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > 25

    list(tuner.run(plan, stop))
    kept = stored()
    assert kept.unfinished
    assert not kept.verdicts
    samples = sum(len(state["same"]) for state in kept.unfinished.values())
    assert samples > 0
    again = Tuner(run, "llama", stored())
    resumed = again.plan()
    assert sum(len(one._same) for contests in resumed.contests.values() for one in contests) == samples
    tune(run)
    done = stored()
    assert not done.unfinished
    assert len(done.records) == total
    assert len(done.verdicts) == len(REGIMES)
    assert Tuner(run, "llama", done).plan().seconds == 0


def test_a_budget_bounds_the_time():
    tuner = Tuner(model(), "llama", stored(), budget=1.0)
    plan = tuner.plan()
    assert plan.seconds <= 1.0
    list(tuner.run(plan))
    assert stored().records or stored().unfinished


def test_what_a_busy_machine_kept_is_measured_again(monkeypatch):
    run = model()
    monkeypatch.setattr(contest, "BUSY", -1.0)
    tune(run)
    kept = [r for r in stored().records.values() if r.variant == DEFAULT]
    assert kept
    assert all(r.figures["busy"] for r in kept)
    again = Tuner(run, "llama", stored()).plan()
    assert sum(len(contests) for contests in again.contests.values()) == len(kept)


def verdict_of(run, **changes) -> tunings.TuningVerdict:
    group = next(g for g in variants.groups(run.program) if g.kind == "linear")
    setting = tuning.setting_of(run.isa, run.threads)
    choices = (tunings.VariantChoice(group.ops, variants.blocks(ISA, group)[-1]),)
    facts = (run.program_hash, "llama", REGIMES[2], setting, choices, True, "faster", {"ratio": 0.9}, "today")
    return replace(tunings.TuningVerdict(*facts), **changes)


def keep(verdict: tunings.TuningVerdict) -> Path:
    machine = detect.detect()
    return tunings.save(tunings.Tunings("cpu", machine.fingerprint, machine.chip, {}, {verdict.key: verdict}))


def test_a_load_says_which_choices_of_another_build_it_leaves(caplog):
    run = model()
    setting = tuning.setting_of(run.isa, run.threads)
    builds = {"build": replace(setting, build="0" * 16), "compiler": replace(setting, compiler="other 1")}
    for name, other in builds.items():
        path = keep(verdict_of(run, setting=other))
        choose_variants(run)
        assert (
            f"what was tuned is not used: measured with {'kernels' if name == 'build' else 'compiler'}" in caplog.text
        )
        assert "roofline tune llama measures it again" in caplog.text
        caplog.clear()
        path.unlink()
    lost_nothing = (
        {"setting": builds["build"], "kept": False},
        {"setting": replace(setting, run="avx2, 7 threads")},
        {},
    )
    for changes in lost_nothing:
        path = keep(verdict_of(run, **changes))
        choose_variants(run)
        assert not caplog.text, changes
        path.unlink()


def test_a_load_takes_only_what_was_measured_for_it(monkeypatch):
    run = model()
    assert choose_variants(run).reason == "never tuned"
    setting = tuning.setting_of(run.isa, run.threads)
    for changes, reason in (
        ({"setting": replace(setting, build="0" * 16)}, "measured with kernels 0000000000000000"),
        ({"setting": replace(setting, compiler="other 1")}, "measured with compiler other 1"),
        ({"setting": replace(setting, run="avx2, 7 threads")}, "measured with avx2, 7 threads"),
        ({"program": "another"}, "this model was never tuned here"),
        ({"kept": False}, "no choice made this model faster"),
    ):
        path = keep(verdict_of(run, **changes))
        found = choose_variants(run)
        assert found.value == DEFAULT
        assert reason in found.reason
        path.unlink()
    path = keep(verdict_of(run))
    assert choose_variants(run).value == "1 tuned"
    monkeypatch.setenv("ROOFLINE_TUNED", "off")
    assert choose_variants(run).reason == "ROOFLINE_TUNED=off"
    monkeypatch.delenv("ROOFLINE_TUNED")
    raw = json.loads(path.read_text())
    path.rename(path.with_name("cpu-0000.json"))
    assert choose_variants(run).reason == "tuned only on other machines"
    path.write_text(json.dumps(raw | {"chip": "0000"}))
    assert choose_variants(run).value == DEFAULT


@pytest.mark.parametrize(
    "choice",
    [
        tunings.VariantChoice((2,), "9x9"),
        tunings.VariantChoice((2,), "best"),
        tunings.VariantChoice((10**6,), DEFAULT),
        tunings.VariantChoice((0,), "1x1"),
    ],
)
def test_unknown_variants_in_a_store_are_refused_and_nothing_of_it_is_used(choice, caplog, monkeypatch):
    run = model()
    keep(replace(verdict_of(run), choices=(*verdict_of(run).choices, choice)))
    used = {}
    monkeypatch.setattr(
        run, "choose", lambda ops, regime, name: (type(run).choose(run, ops, regime, name), used.update({ops[0]: name}))
    )
    with caplog.at_level(logging.WARNING, "roofline.backends"):
        found = choose_variants(run)
    assert (found.value, found.reason) == (DEFAULT, "the tuning store names a variant that is not there")
    assert "ignored" in caplog.text
    assert set(used.values()) == {DEFAULT}


def test_an_unknown_default_is_refused():
    with pytest.raises(ConfigError, match="have no variant '7x7'"):
        Tuner(model(), "llama", stored(), defaults={"linear": "7x7"})


def test_wrong_bits_stop_a_run(monkeypatch):
    run = model()
    tuner = Tuner(run, "llama", stored())
    plan = tuner.plan()
    tuner._take_references(0)
    point = tuner.points[0][0]
    tuner._logits[point] = tuner._logits[point] + 1
    monkeypatch.setattr(tuner, "_take_references", lambda regime: None)
    with pytest.raises(tuning.TruthError, match="other bits"):
        list(tuner.run(plan))


def test_steps_of_a_model_with_recurrent_state_may_run_again():
    """Every step's logits are compared with those of the first run."""
    run = hybrid_models.executable(hybrid_models.checkpoint("plain", "Q8_0"), ISA, threads=1)
    tuner = Tuner(run, "hybrid", stored())
    points = [point for steps in tuner.points.values() for point in steps]
    assert any(point.context for point in points)
    for point in points:
        tuner._fill(point)
        run.forward()
        first = run.logits().copy()
        run.forward()
        assert run.logits().tobytes() == first.tobytes()
