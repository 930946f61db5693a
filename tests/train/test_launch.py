"""The processes of a run on this machine: what they are told, how they end, and what their launcher says of it.

Short shell scripts stand in for them: `test_processes.py` has real ones.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from roofline.train.parallel import stopping
from roofline.train.run import launch as launcher
from roofline.train.run.launch import launch

Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Launches so many processes of a script, whose working folder is `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launcher, "cpu_quota", lambda: None)

    def run(count: int, script: str, changes: tuple[str, ...] = (), out: int | None = None) -> int:
        program = tmp_path / "program"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(program))
            return launch(count, Path("run.yaml"), changes, out)

    return run


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def files(folder: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


def test_each_process_is_told_its_place(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
    script = 'echo "$LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $OMP_NUM_THREADS" > place.$RANK; echo "$@" > words.$RANK'
    assert start(2, script, ("seed=1", "a.b=c")) == 0
    assert [(tmp_path / f"place.{rank}").read_text().split() for rank in range(2)] == [list("0223"), list("1223")]
    first, second = ((tmp_path / f"words.{rank}").read_text().split() for rank in range(2))
    assert first == second
    module, parent, store = first[:3], first[3:5], first[5:7]
    assert module == ["-m", "roofline.train", "run.yaml"]
    assert parent == ["--parent", str(os.getpid())]
    assert store[0] == "--store"
    assert Path(store[1]).parent.name.startswith("roofline-train-")
    assert not Path(store[1]).parent.exists(), "it is removed at the end"
    assert first[7:] == ["--set=seed=1", "--set=a.b=c"]


@pytest.mark.parametrize(("given", "expected"), [(None, "1"), ("5", "5")])
def test_a_process_has_a_thread_at_least_or_as_many_as_the_user_says(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert start(2, "echo $OMP_NUM_THREADS > threads.$RANK") == 0
    assert [(tmp_path / f"threads.{rank}").read_text().strip() for rank in range(2)] == [expected] * 2


def test_processes_share_what_the_quota_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(launcher, "cpu_quota", lambda: 4.5)
    assert [launcher.threads_of(count) for count in (1, 2, 3, 8)] == [4, 2, 1, 1]


def test_the_output_goes_where_it_is_to(start: Start, tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as stream:
        assert start(1, "echo words", out=stream.fileno()) == 0
    assert (tmp_path / "out").read_text() == "words\n"


# Tells the launcher that all processes have come together.
MEET = 'for word in "$@"; do [ "$before" = --store ] && touch "$(dirname "$word")/met"; before=$word; done\n'


def test_those_that_wait_for_one_that_failed_are_ended_at_once(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launcher, "GRACE", 1000.0)
    script = (
        'echo $$ > pid.$RANK; [ "$RANK" = 1 ] || exec sleep 300\n'
        "while [ ! -s pid.0 ] || [ ! -s pid.2 ]; do sleep 0.01; done; exit 3"
    )
    started = time.monotonic()
    assert start(3, script) == 3
    assert time.monotonic() - started < 200
    for rank in (0, 2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid.{rank}").read_text()), 0)
    assert not capsys.readouterr().err, "it has spoken for itself"


def test_when_a_process_fails_the_others_may_end_by_themselves_for_a_while(start: Start, tmp_path: Path) -> None:
    script = MEET + '[ "$RANK" = 1 ] && exit 3; sleep 0.5; touch ended; exit 4'
    assert start(2, script) == 4, "the first of those that failed"
    assert (tmp_path / "ended").exists()


def test_those_that_go_on_are_ended(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launcher, "GRACE", 0.2)
    script = MEET + (
        'echo $$ > pid.$RANK; [ "$RANK" = 0 ] && exec sleep 300; while [ ! -s pid.0 ]; do sleep 0.01; done; exit 3'
    )
    assert start(2, script) == 3
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid.0").read_text()), 0)
    assert not capsys.readouterr().err, "it has spoken for itself"


def test_a_process_that_was_killed_is_named(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(3, '[ "$RANK" = 1 ] && kill -KILL $$; exit 0') == 128 + signal.SIGKILL
    assert capsys.readouterr().err.startswith("roofline: process 1 of 3 was ended by ")


def send(number: int, folder: Path, count: int, *patterns: str) -> threading.Thread:
    """A thread that sends this process a signal each time when `count` files of the next pattern are there."""

    def act() -> None:
        for pattern in patterns:
            until(lambda pattern=pattern: len(files(folder, pattern)) == count)  # type: ignore[misc]
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=act)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_goes_to_all_and_is_the_status(start: Start, tmp_path: Path, number: int) -> None:
    """One of them ends as a stopped run does, the other one had just done its work."""
    script = (
        f"trap 'touch got.$RANK; exit $((RANK * {128 + number}))' TERM INT; touch ready.$RANK\n"
        "while true; do sleep 0.02; done"
    )
    sender = send(number, tmp_path, 2, "ready.*")
    assert start(2, script) == 128 + number
    sender.join()
    assert files(tmp_path, "got.*") == ["got.0", "got.1"]


def test_the_second_signal_ends_them_at_once(start: Start, tmp_path: Path) -> None:
    script = "trap 'touch got.$RANK' TERM; touch ready.$RANK\nwhile true; do sleep 0.02; done"
    sender = send(signal.SIGTERM, tmp_path, 2, "ready.*", "got.*")
    assert start(2, script) == 128 + signal.SIGTERM
    sender.join()


@pytest.mark.parametrize(
    ("stuck", "cause"),
    [
        ("kill -STOP $$", "process 1 of 2 was stopped and not continued"),
        (":", "a step takes longer (raise stop_timeout), or a process hangs"),
    ],
)
def test_processes_that_do_not_stop_are_ended_and_said(
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stuck: str,
    cause: str,
) -> None:
    monkeypatch.setattr(stopping, "SECONDS", 0.3)
    script = (
        f"trap 'touch got.$RANK' TERM; echo $$ > pid.$RANK; touch ready.$RANK; [ $RANK = 1 ] && {stuck}\n"
        "while true; do sleep 0.02; done"
    )
    sender = send(signal.SIGTERM, tmp_path, 2, "ready.*")
    assert start(2, script) == 128 + signal.SIGTERM
    sender.join()
    assert capsys.readouterr().err == f"roofline: the run has not stopped 0.3 s after SIGTERM, and is ended: {cause}\n"
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid.{rank}").read_text()), 0)


@pytest.mark.parametrize(("number", "begins"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_processes_that_have_begun_to_stop_may_save_as_long_as_it_takes(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, begins: bool
) -> None:
    """After Ctrl-C also before: whoever pressed it can do so again."""
    monkeypatch.setattr(stopping, "SECONDS", 0.2)
    begin = 'while [ "$1" != --store ]; do shift; done; touch "$(dirname "$2")/stopping"' if begins else ":"
    script = (
        f"trap 'got=1' TERM INT; touch ready.$RANK\nwhile [ ! $got ]; do sleep 0.02; done\n{begin}\n"
        f"sleep 0.8; touch saved.$RANK; exit {128 + number}"
    )
    sender = send(number, tmp_path, 2, "ready.*")
    assert start(2, script) == 128 + number
    sender.join()
    assert files(tmp_path, "saved.*") == ["saved.0", "saved.1"]


def test_one_that_was_stopped_is_not_waited_for_when_another_has_failed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "GRACE", 100.0)
    script = "[ $RANK = 0 ] && { touch stops; kill -STOP $$; }\nwhile [ ! -e stops ]; do sleep 0.01; done; exit 3"
    started = time.monotonic()
    assert start(2, MEET + script) == 3
    assert time.monotonic() - started < launcher.GRACE


def test_a_signal_before_the_last_process_has_started_starts_no_more(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = launcher._Workers.add

    def add(self: launcher._Workers, *rest: object) -> None:
        plain(self, *rest)  # type: ignore[arg-type]
        until((tmp_path / "ready.0").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(launcher._Workers, "add", add)
    script = "trap 'exit 143' TERM; touch ready.$RANK\nwhile true; do sleep 0.02; done"
    assert start(2, script) == 128 + signal.SIGTERM
    assert files(tmp_path, "ready.*") == ["ready.0"]


def test_a_signal_that_comes_while_a_process_is_started_reaches_it(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one of two: the first one gets it as all do, and none is left out."""
    popen = launcher.subprocess.Popen
    begun: list[object] = []

    def started(*words: object, **options: object) -> object:
        begun.append(popen(*words, **options))  # type: ignore[call-overload]
        until((tmp_path / f"ready.{len(begun) - 1}").exists)
        if len(begun) == 2:
            os.kill(os.getpid(), signal.SIGTERM)  # the second process is in no list yet
        return begun[-1]

    monkeypatch.setattr(launcher.subprocess, "Popen", started)
    script = "trap 'exit 143' TERM; touch ready.$RANK\nfor i in $(seq 1000); do sleep 0.02; done; exit 9"
    assert start(2, script) == 128 + signal.SIGTERM
