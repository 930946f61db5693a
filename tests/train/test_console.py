"""What a run shows on a terminal: a bar that follows its steps, and lines above it."""

import io
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="training is torch")

from roofline.train.report.console import Console
from roofline.train.run.progress import Finished
from tests.train import small

ABOUT = {
    "parameters": 12_345, "steps": 40, "step": 10, "batch_tokens": 192, "processes": 2, "device": "cpu", "memory": None,
    "show_every": 5, "share": {"per_token_s": 1e-3, "name": "of the roof"},
}  # fmt: skip
STEP: dict[str, Any] = {"step": 11, "loss": 2.5, "lr": 1e-3, "tokens_per_s": 500.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        """What was written, without colours and movements of the cursor."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue())


Begin = Callable[..., tuple[Console, Terminal]]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Makes the console of a run whose errors go to a terminal. (pytest gives each part of a test another stderr.)"""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def make(about: dict[str, Any] = ABOUT, **changes: Any) -> tuple[Console, Terminal]:
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        shown = Console(small.config(tmp_path, tmp_path, **changes))
        shown.show({"about": about})
        return shown, terminal

    return make


def finished(folder: Path, **changes: Any) -> Finished:
    values: dict[str, Any] = {"steps": 40, "loss": math.nan, "evaluations": {}, "folder": folder}
    return Finished(**values | changes)


def test_a_run_that_keeps_nothing_says_so_before_it_trains(begin: Begin) -> None:
    words = "nothing of the weights will be saved"
    assert words in begin(ABOUT | {"saves": False})[1].text()
    assert words not in begin(ABOUT | {"saves": True})[1].text()


def test_a_bar_follows_the_steps_and_lines_stand_above_it(tmp_path: Path, begin: Begin) -> None:
    shown, terminal = begin(progress_bar=True)
    bar = shown._bar
    assert bar is not None
    (task,) = bar.tasks
    assert (task.completed, task.total, bar.live.is_started) == (10, 40, True)
    shown.show(STEP)
    assert (task.completed, task.description) == (11, "loss 2.5000, lr 0.001, 500 tokens/s (50.0% of the roof)")
    assert "12,345 parameters, 40 steps of 192 tokens, 2 processes on cpu\n" in terminal.text()
    shown.show({"step": 11, "eval_loss": 2.0, "perplexity": 7.389})
    assert "held-out loss 2.0000, perplexity 7.39" in terminal.text()
    assert task.description.startswith("loss 2.5"), "the bar keeps the line of the step"
    shown.show({"step": 11, "samples": [{"prompt": "a [bold]", "text": "b"}]})
    assert 'step 11: "a [bold]" -> "b"' in terminal.text(), "what the model writes is no markup"
    assert "step 11/40" not in terminal.text(), "a bar is in place of lines"
    shown.end(finished(tmp_path, reason="early_stopper: enough"))
    assert not bar.live.is_started


@pytest.mark.parametrize(("step", "is_shown"), [(14, False), (15, True), (39, False), (40, True)])
def test_lines_are_beside_the_bar_where_they_are_asked_for(
    tmp_path: Path, begin: Begin, step: int, is_shown: bool
) -> None:
    shown, terminal = begin(progress_bar=True, log_to_console=True)
    shown.show(STEP | {"step": step})
    assert (f"step {step}/40: loss 2.5000" in terminal.text()) == is_shown
    shown.end(finished(tmp_path, reason="it is over"))


@pytest.mark.parametrize(
    ("progress_bar", "is_terminal"), [(False, True), (True, False)], ids=["not asked for", "no terminal"]
)
def test_no_bar(begin: Begin, monkeypatch: pytest.MonkeyPatch, progress_bar: bool, is_terminal: bool) -> None:
    monkeypatch.setattr(Terminal, "isatty", lambda self: is_terminal)
    shown, terminal = begin(ABOUT | {"processes": 1}, progress_bar=progress_bar)
    assert shown._bar is None
    assert "1 process on cpu" in terminal.text()
    shown.show(STEP | {"step": 20})
    assert "step 20/40: loss 2.5000, lr 0.001, 500 tokens/s (50.0% of the roof), 0:00:08 left\n" in terminal.text()
    shown.show(STEP | {"step": 40})
    assert terminal.text().endswith("(50.0% of the roof)\n")
    shown.show(STEP | {"step": 45, "tokens_per_s": 1060.0})
    assert "(of the roof: not known)" in terminal.text()


def test_a_run_that_resumes_by_itself_names_no_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Console(small.config(tmp_path, tmp_path, autoresume=True)).end(finished(tmp_path, signal=2, saved="place"))
    assert capsys.readouterr().out == (
        "SIGINT: stopped after step 40, saved in place; the same command goes on from there\n"
    )


def test_one_step_is_one(tmp_path: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("roofline.train.report.console._memory", lambda folder: "")
    shown, terminal = begin(ABOUT | {"steps": 1}, progress_bar=False)
    assert "12,345 parameters, 1 step of 192 tokens" in terminal.text()
    shown.end(finished(tmp_path, steps=1, loss=2.5))
    assert capsys.readouterr().out == f"1 step, loss 2.5000, {tmp_path}\n"


def test_the_end_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = Console(small.config(tmp_path, tmp_path))
    for changes, said in (
        ({}, f"{tmp_path}: all 40 steps were done already"),
        ({"steps": 1}, f"{tmp_path}: its step was done already"),
        ({"reason": "early_stopper: enough"}, "ended after step 40 by early_stopper: enough"),
        ({"signal": 15, "saved": "place"}, "SIGTERM: stopped after step 40, saved in place; autoresume=true goes on"),
        ({"signal": 2}, "SIGINT: stopped after step 40, not saved: the place of its checkpoints"),
    ):
        shown.end(finished(tmp_path, **changes))
        out = capsys.readouterr().out
        assert out.startswith(said)
        assert out.count("\n") == 1
