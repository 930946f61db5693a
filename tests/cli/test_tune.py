"""roofline tune: what it prints, Ctrl-C, going on, explain, and the switches that leave the store aside."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.command_line import call_roofline

native = pytest.importorskip("roofline._native", reason="the C++ core is not built")
sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))

from cpu_models import checkpoint, executable  # noqa: E402

from roofline.backends.cpu.tuning import tune as tuning  # noqa: E402
from roofline.cli.tuning import tune  # noqa: E402


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(*words) -> result, over a small random model."""
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path))
    model = executable(checkpoint("llama", "Q4_1"), isa=native.isas()[0], threads=1, pages=128)
    asked = []
    monkeypatch.setattr(tune, "_executable", lambda name, *_: asked.append(name) or model)

    def call(*words):
        result = call_roofline(["tune", *words])
        assert result.exit_code == 0, result.output
        return result.output

    call.asked = asked
    return call


def test_tune_says_how_long_it_takes_measures_stores_and_explains(run):
    before = run("explain", "tiny")
    assert "nothing is tuned" in before
    told = run("--budget", "2", "tiny")
    first = told.splitlines()[0]
    assert "pairs of shape and regime to measure" in first
    assert "within the budget of 2.0 s" in first
    assert "the whole model, 1 row: " in told
    assert "stored in" in told
    again = run("tiny")
    assert "are known already" in again.splitlines()[0] or "stopped before" in told
    explained = run("explain", "tiny")
    for part in ("linear 256x512 Q4_1", "1 row", "2-32 rows", "33+ rows", "against", "default", "time: share of"):
        assert part in explained
    plain = json.loads(run("explain", "tiny", "--json"))
    assert {r["regime"] for r in plain["records"]} == {"1 row", "2-32 rows", "33+ rows"}
    assert all(r["reason"] and r["ignored"] == "" for r in plain["records"])
    assert run.asked == ["tiny"] * len(run.asked)


def test_where_nothing_can_be_kept_that_is_said_and_the_results_are_shown(run, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path / "file"))
    told = run("--budget", "1", "tiny")
    assert "op and shape" in told
    assert "stored in" not in told
    assert "is kept: run" not in told


def test_ctrl_c_that_is_ignored_stays_so():
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with tune._interrupts() as stop:
            signal.raise_signal(signal.SIGINT)
        assert not stop.is_set()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured_and_the_next_run_goes_on(run, monkeypatch):
    slots = 0
    slot = tuning.Tuner._slot

    def interrupted(self, *options):
        nonlocal slots
        slots += 1
        if slots == 30:
            os.kill(os.getpid(), signal.SIGINT)
        return slot(self, *options)

    monkeypatch.setattr(tuning.Tuner, "_slot", interrupted)
    before = signal.getsignal(signal.SIGINT)
    told = run("tiny")
    assert slots == 30
    assert "run the same command again to go on" in told
    assert signal.getsignal(signal.SIGINT) is before
    told = run("tiny")
    assert "stopped before" not in told
    assert "the whole model, 33+ rows: " in told


def test_tune_has_help():
    text = call_roofline(["tune", "--help"]).output
    assert "explain" in text
    assert "--budget" in call_roofline(["tune", "run", "--help"], env={"COLUMNS": "200"}).output
