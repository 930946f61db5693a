"""`python -m roofline.train`: what it hands to the run, and how it ends."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training is torch")

from roofline.common.errors import ConfigError, RooflineError, SaidElsewhere  # noqa: E402
from roofline.train import __main__ as program  # noqa: E402
from roofline.train.report.console import Console  # noqa: E402
from roofline.train.run import loop, preflight  # noqa: E402

Start = Callable[..., tuple[int, SimpleNamespace]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Runs the program with a loop that only notes what it got; returns its status and the notes."""
    for name in ("RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    seen = SimpleNamespace(parents=[], shown=None, store=None, ended=False, status=0, error=None, config=None)

    def read_config(path: Path, changes: list[str], check: object) -> SimpleNamespace:
        seen.config = (path, changes, check)
        return SimpleNamespace()

    def train(config: object, watch: object, store: Path | None) -> SimpleNamespace:
        seen.shown, seen.store = watch, store
        if seen.error is not None:
            raise seen.error
        return SimpleNamespace(status=seen.status)

    monkeypatch.setattr(program, "read_config", read_config)
    monkeypatch.setattr(program, "die_with_parent", seen.parents.append)
    monkeypatch.setattr(program.log, "configure", lambda: None)
    monkeypatch.setattr(loop, "train", train)
    monkeypatch.setattr(Console, "end", lambda self, finished: setattr(seen, "ended", True))

    def run(*words: str, **changes: Any) -> tuple[int, SimpleNamespace]:
        for name, value in changes.items():
            setattr(seen, name, value)
        monkeypatch.setattr(sys, "argv", ["roofline.train", "run.yaml", *words])
        return program.main(), seen

    return run


def test_a_process_alone_checks_its_configuration_and_shows_the_run(start: Start) -> None:
    status, seen = start("--set", "a=1", "--set=b=2")
    assert status == 0
    assert seen.config == (Path("run.yaml"), ["a=1", "b=2"], preflight.faults)
    assert (seen.shown is not None, seen.ended) == (True, True)
    assert (seen.parents, seen.store) == ([], None)


def test_without_changes_there_are_none(start: Start) -> None:
    assert start()[1].config[1] == []


def test_a_process_of_our_launcher_dies_with_it_and_is_checked_already(start: Start) -> None:
    status, seen = start("--parent", "77", "--store", "place", status=143)
    assert status == 143
    assert seen.parents == [77]
    assert seen.store == Path("place")
    assert seen.config[2] is None


def test_a_process_of_torchrun_dies_with_it(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert start()[1].parents == [None]


@pytest.mark.parametrize(("rank", "shows"), [("0", True), ("1", False)])
def test_the_first_process_shows_the_run(start: Start, monkeypatch: pytest.MonkeyPatch, rank: str, shows: bool) -> None:
    monkeypatch.setenv("RANK", rank)
    seen = start()[1]
    assert (seen.shown is not None, seen.ended) == (shows, shows)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (SaidElsewhere("rank 0 has said it"), 1, ""),
        (RooflineError("a cause: a remedy"), 1, "roofline: a cause: a remedy\n"),
        (ConfigError("a cause: a remedy"), 1, "roofline: a cause: a remedy\n"),
        (KeyboardInterrupt(), 128 + signal.SIGINT, ""),
    ],
)
def test_errors_are_a_line_and_a_status(
    start: Start, capsys: pytest.CaptureFixture[str], error: BaseException, status: int, said: str
) -> None:
    assert start(error=error)[0] == status
    assert capsys.readouterr().err == said


def test_what_is_no_error_of_ours_has_its_traceback(start: Start) -> None:
    with pytest.raises(ZeroDivisionError):
        start(error=ZeroDivisionError())


def test_help_names_no_option_of_the_launcher(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        start("--help")
    said = capsys.readouterr().out
    assert "--set KEY=VALUE" in said
    assert "--parent" not in said
    assert "--store" not in said
