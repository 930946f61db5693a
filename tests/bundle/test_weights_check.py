"""Changed weights are noticed: before the first answer where that is asked for, else while the model serves."""

import asyncio
import hashlib
import json
import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roofline.backends.cpu import weights_check
from roofline.backends.cpu.weights_check import SLICE, StepEdges, WeightsCheck
from roofline.bundle import load
from roofline.bundle.manifest import BundleError
from roofline.bundle.weights_checks import WeightsCheckOutcome, last_problem, outcomes
from roofline.cli.measure.doctor import _weights_line
from roofline.engine.llm import LLM
from roofline.engine.local import LocalEngine
from roofline.engine.process.messages import Checked
from roofline.engine.process.replicas import EngineReplicas
from roofline.engine.process.thread import engine_in_thread
from tests.command_line import call_roofline


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(weights_check, "DELAY", 0.0)


@pytest.fixture
def changed(bundle: Path) -> Path:
    """A bundle with one bit of its weights flipped, where no start looks at it."""
    raw = bytearray((bundle / "weights.bin").read_bytes())
    raw[20_000] ^= 1
    (bundle / "weights.bin").write_bytes(raw)
    return bundle


def ended(loaded: Any) -> WeightsCheck:
    check = loaded.executable.weights_check
    assert isinstance(check, WeightsCheck)
    check.join()
    return check


def test_changed_weights_are_found_while_the_model_serves(changed: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        check = ended(load(str(changed), text=False))
    assert check.problem is not None
    assert f"{changed} is a bundle that cannot be used: weights.bin is not as it was written" in check.problem
    assert "roofline compile" in check.problem
    assert [record.getMessage() for record in caplog.records] == [check.problem]
    (outcome,) = outcomes()
    assert (outcome.bundle, outcome.problem) == (str(changed), check.problem)
    assert _weights_line(vars(outcome)).startswith("CHANGED since they were written, compared 2")


def test_weights_as_they_were_written(bundle: Path, home: Path) -> None:
    assert ended(load(str(bundle), text=False)).problem is None
    assert [outcome.problem for outcome in outcomes()] == [None]
    assert _weights_line(vars(outcomes()[0])).startswith("as they were written")
    for values in ({"bundle": 5}, {"bundle": str(bundle), "time": 0.0, "problem": "of older weights"}):
        for file in (home / "weights-checks").iterdir():
            file.write_text(json.dumps(values))
        assert outcomes() == []
        assert last_problem(bundle) is None


def test_a_bundle_that_was_changed_is_used_with_a_warning_until_it_is_verified(
    changed: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roofline.common.log.configure", lambda: None)  # which takes the lines from caplog
    said = call_roofline(["doctor", "--verify", changed])
    assert (said.exit_code, said.stdout) == (1, "")
    with caplog.at_level(logging.WARNING):
        load(str(changed), text=False, check_weights="off")
    (record,) = caplog.records
    assert "weights.bin is not as it was written" in record.getMessage()
    assert record.getMessage().endswith(f"`roofline doctor --verify {changed}` compares it again.")
    caplog.clear()
    raw = bytearray((changed / "weights.bin").read_bytes())
    raw[20_000] ^= 1
    (changed / "weights.bin").write_bytes(raw)
    assert outcomes() == []  # not compared since it was written
    assert "whole" in call_roofline(["doctor", "--verify", changed]).stdout
    assert [outcome.problem for outcome in outcomes()] == [None]
    load(str(changed), text=False, check_weights="off")
    assert caplog.records == []


def test_verify_says_what_is_no_bundle(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roofline.common.log.configure", lambda: None)
    named = call_roofline(["doctor", "--verify", "smollm2-135m"]).stderr
    assert "smollm2-135m is the name of a model, --verify takes the directory of a bundle: no bundle of it" in named
    missing = call_roofline(["doctor", "--verify", tmp_path / "nowhere"]).stderr
    assert missing == f"roofline: {tmp_path}/nowhere: there is no such directory, nor a model of this name\n"
    assert f"{tmp_path} is no bundle" in call_roofline(["doctor", "--verify", tmp_path]).stderr


def test_weights_are_compared_first_where_that_is_asked_for(bundle: Path, changed: Path) -> None:
    with pytest.raises(BundleError, match=r"weights\.bin is not as it was written"):
        load(str(changed), text=False, check_weights="first")
    assert outcomes()[0].problem is not None
    loaded = load(str(changed), text=False, check_weights="off")
    assert loaded.executable.weights_check is None


def test_a_model_that_is_closed_is_checked_no_longer(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_check, "DELAY", 1e6)
    with LLM(str(bundle)) as llm:
        check = llm.engine.executable.weights_check
        assert check.pending
    check.join()
    assert (check.pending, check.problem, outcomes()) == (False, None, [])


class Memory:
    """An image of so many bytes, with more behind them."""

    def __init__(self, size: int) -> None:
        self.data = np.random.default_rng(size).integers(0, 256, size + 70, dtype=np.uint8)

    def view(self) -> np.ndarray:
        return self.data


@pytest.mark.parametrize("size", [0, 1, SLICE - 1, SLICE, SLICE + 1, 700_000])
def test_the_hash_in_slices_is_that_of_all_bytes(size: int) -> None:
    image, problems = Memory(size), []
    for flipped in (0, 1):
        digest = hashlib.sha256(image.data[: max(0, size - flipped)]).hexdigest()
        WeightsCheck(image, size, digest, "wrong", StepEdges(), problems.append).join()  # type: ignore[arg-type]
    assert problems == [None, "wrong" if size else None]


def test_steps_have_the_cores_to_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices are few while steps run, and fewer still than the pauses of an idle machine would allow."""
    pauses: list[float] = []
    steps = StepEdges()

    class Stopped(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is None:  # a thread that starts
                return super().wait()
            pauses.append(timeout)
            if len(pauses) in (3, 4):  # of seven: a step runs, then one has begun and ended
                steps.count += 1 if len(pauses) == 3 else 3
            return False

    monkeypatch.setattr(weights_check.threading, "Event", Stopped)
    monkeypatch.setattr(weights_check.time, "monotonic", iter(range(100)).__next__)  # a slice takes a second
    WeightsCheck(Memory(7 * SLICE), 7 * SLICE, "", "wrong", steps, lambda _: None).join()  # type: ignore[arg-type]
    assert pauses == [0.0, 9, 9, 200, 200, 9, 9]


def test_the_owner_of_an_engine_is_told(changed: Path) -> None:
    """Without a request: an engine that has nothing to do tells it too."""

    async def told() -> Checked:
        engine = engine_in_thread("tiny", LocalEngine(load(str(changed), text=False).executable))
        await engine.start()
        try:
            async with asyncio.timeout(60):
                while engine.checked is None:
                    await asyncio.sleep(0.01)
            return engine.checked
        finally:
            await engine.close()

    checked = asyncio.run(told())
    assert checked.problem is not None
    assert "weights.bin is not as it was written" in checked.problem


def test_of_replicas_the_first_that_is_wrong_counts() -> None:
    class Engine:
        def __init__(self, checked: Checked | None) -> None:
            self.checked = checked

    def together(*checked: Checked | None) -> Checked | None:
        replicas = EngineReplicas.__new__(EngineReplicas)
        replicas.engines = tuple(map(Engine, checked))  # type: ignore[arg-type]
        return replicas.checked

    right, wrong = Checked(None), Checked("weights.bin")
    assert together(right, None) is None
    assert together(right, right) == right
    assert together(None, wrong) == together(right, wrong) == wrong


def test_an_outcome_of_a_bundle_that_is_gone_is_not_shown(bundle: Path) -> None:
    ended(load(str(bundle), text=False))
    assert isinstance(outcomes()[0], WeightsCheckOutcome)
    bundle.rename(bundle.with_name("moved"))
    assert outcomes() == []


@pytest.mark.parametrize("delay", [0.0, 1e6])
def test_a_process_ends_well_while_weights_are_checked(bundle: Path, delay: float) -> None:
    """A thread that comes back to an interpreter that has ended would abort it."""
    program = (
        f"import roofline.backends.cpu.weights_check as check\ncheck.DELAY = {delay}\n"
        f"from roofline.bundle import load\nmodel = load({str(bundle)!r}, text=False)\nprint('loaded')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "loaded\n", "")
