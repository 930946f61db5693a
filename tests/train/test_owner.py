"""A run has one owner: its processes end with it, nobody else trains in its folder, a signal saves a checkpoint."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch", reason="training is torch")

from roofline.common.errors import ConfigError  # noqa: E402
from roofline.train.parallel.processes import World  # noqa: E402
from roofline.train.report.console import Console  # noqa: E402
from roofline.train.run import owner  # noqa: E402
from roofline.train.run.loop import train  # noqa: E402
from roofline.train.run_folder import OWNER, read_lines  # noqa: E402
from roofline.train.storage.open import open_store  # noqa: E402
from tests.train.small import config, digest, log_of, mapping, steps_of, stored, write_rows  # noqa: E402

PROGRAM = "import sys; from roofline.cli.main import main; sys.exit(main())"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "data", 40)


def until(condition: Callable[[], Any], process: "subprocess.Popen[str] | None" = None) -> None:
    """Wait for it; a process that ends before has failed."""
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)


def steps(folder: Path) -> int:
    path = folder / "log.jsonl"
    return max((line.get("step", 0) for line in read_lines(path)), default=0) if path.exists() else 0


def workers(config_path: Path) -> list[int]:
    """The processes whose command line names the configuration, but for the launcher."""
    pids = []
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                words = (place / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if "roofline.train" in words and str(config_path) in words:
                pids.append(int(place.name))
    return pids


@contextmanager
def started(data: Path, folder: Path, processes: int, **changes: Any) -> Iterator["tuple[subprocess.Popen[str], Path]"]:
    """`roofline train --nproc` of a run that would take very long, with some steps done."""
    path = folder.with_suffix(".json")
    path.write_text(json.dumps(mapping(data, folder, max_duration="1000000ba", **changes)))
    command = [sys.executable, "-c", PROGRAM, "train", str(path), "--nproc", str(processes)]
    process = subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until(lambda: steps(folder) >= 3, process)
        yield process, path
    finally:
        process.kill()
        process.communicate()


@pytest.mark.e2e
@pytest.mark.slow
def test_workers_end_with_their_parent_and_nobody_else_trains_in_their_folder(data: Path, tmp_path: Path) -> None:
    with started(data, tmp_path / "run", 2, save_interval="2ba") as (process, path):
        pids = workers(path)
        assert len(pids) == 2
        again = config(data, tmp_path / "run", save_interval="2ba", autoresume=True)
        with pytest.raises(
            ConfigError, match=r"run belongs to a run that is training \(process \d+ of .+ on .+, since"
        ):
            train(again)
        elsewhere = config(data, tmp_path / "other", save_interval="2ba", save_folder=str(tmp_path / "run/checkpoints"))
        with pytest.raises(ConfigError, match="checkpoints belongs to a run that is training"):
            train(elsewhere)
        process.kill()
        process.wait()
        until(lambda: not workers(path))  # a zombie has no command line
    done = steps_of(tmp_path / "run" / "checkpoints")[-1]
    assert train(config(data, tmp_path / "run", autoresume=True, max_duration=f"{done + 2}ba")).steps == done + 2
    assert not (tmp_path / "run" / OWNER).exists()


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize(
    ("number", "processes"),
    [(signal.SIGTERM, 2), pytest.param(signal.SIGINT, 2, marks=pytest.mark.soak), (signal.SIGINT, 1)],
)
def test_a_signal_saves_a_checkpoint_of_all_processes(
    data: Path, tmp_path: Path, number: signal.Signals, processes: int
) -> None:
    with started(data, tmp_path / "run", processes) as (process, path):
        process.send_signal(number)
        out, errors = process.communicate(timeout=200)
    assert process.returncode == 128 + number
    step = steps(tmp_path / "run")
    saved = tmp_path / "run" / "checkpoints" / f"step-{step:08d}"
    assert out == f"{number.name}: stopped after step {step:,}, saved in {saved}; autoresume=true goes on from there\n"
    assert "Traceback" not in errors
    assert steps_of(saved.parent) == [step]
    assert workers(path) == []


@pytest.mark.slow
@pytest.mark.e2e
def test_a_process_that_is_killed_is_named_and_ends_the_others(data: Path, tmp_path: Path) -> None:
    with started(data, tmp_path / "run", 2) as (process, path):
        os.kill(max(workers(path)), signal.SIGKILL)
        _, errors = process.communicate(timeout=200)
    assert process.returncode == 128 + signal.SIGKILL
    assert "of 2 was ended by SIGKILL: the system may have run out of memory" in errors
    assert workers(path) == []


def kill_self(step: int, number: int) -> Callable[[dict[str, Any]], None]:
    def watch(line: dict[str, Any]) -> None:
        if line.get("step") == step and "loss" in line:
            os.kill(os.getpid(), number)

    return watch


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_ends_where_an_uninterrupted_one_does(
    data: Path, tmp_path: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    train(config(data, tmp_path / "whole", save_interval="1dur"))
    made = config(data, tmp_path / "parts", autoresume=True)
    finished = train(made, kill_self(3, number))
    assert (finished.steps, finished.signal, finished.status) == (3, number, 128 + number)
    assert steps_of(tmp_path / "parts" / "checkpoints") == [3], "without a save_interval, too"
    Console(made).end(finished)
    assert capsys.readouterr().out.startswith(
        f"{number.name}: stopped after step 3, saved in {finished.saved}; the same command goes on from there"
    )
    assert signal.getsignal(number) == before
    train(config(data, tmp_path / "parts", autoresume=True, save_interval="1dur"))
    ends = [digest(stored(tmp_path / name / "checkpoints")) for name in ("whole", "parts")]
    assert ends[0] == ends[1]
    assert log_of(tmp_path / "whole") == log_of(tmp_path / "parts")


def test_a_stopped_run_leaves_the_checkpoints_of_another_alone(data: Path, tmp_path: Path) -> None:
    train(config(data, tmp_path, save_interval="4ba"))
    finished = train(config(data, tmp_path), kill_self(3, signal.SIGTERM))
    assert (finished.signal, finished.saved) == (signal.SIGTERM, None)
    assert steps_of(tmp_path / "checkpoints") == [4, 8]


def test_a_second_ctrl_c_ends_it_at_once(data: Path, tmp_path: Path) -> None:
    # A shell that starts the tests in the background lets them ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def watch(line: dict[str, Any]) -> None:
        if line.get("step") == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    try:
        with pytest.raises(KeyboardInterrupt):
            train(config(data, tmp_path), watch)
    finally:
        signal.signal(signal.SIGINT, before)
    assert steps(tmp_path) == 3
    assert train(config(data, tmp_path)).steps == 8, "the folder is free again"


def test_a_run_outside_of_the_main_thread_leaves_signals_alone(data: Path, tmp_path: Path) -> None:
    finished = []
    thread = threading.Thread(target=lambda: finished.append(train(config(data, tmp_path, max_duration="2ba"))))
    thread.start()
    thread.join()
    assert finished[0].steps == 2


class Bucket:
    """What a lease uses of an object store. moment: called at every look at the object."""

    url = "s3://bucket/run"

    def __init__(self, moment: Callable[["Bucket"], None] = lambda bucket: None) -> None:
        self.objects: dict[str, bytes] = {}
        self.moment = moment

    def create(self, name: str, data: bytes) -> bool:
        return self.objects.setdefault(name, data) is data

    def get(self, name: str) -> bytes:
        self.moment(self)
        if name not in self.objects:
            raise owner.MissingError("it is missing")
        return self.objects[name]

    def put(self, name: str, data: bytes) -> None:
        self.objects[name] = data

    def delete(self, name: str) -> None:
        self.objects.pop(name, None)

    def tags(self) -> dict[str, str]:
        return dict.fromkeys(self.objects, "")


def lease(bucket: Bucket, **changes: Any) -> owner.Lease:
    return owner.Lease(bucket, {**owner._this_process(), **changes})  # type: ignore[arg-type]


def test_a_lease_refuses_a_second_run_until_it_is_given_back() -> None:
    bucket = Bucket()
    with closing(lease(bucket)) as first:
        first.check()
        with pytest.raises(ConfigError, match=rf"s3://bucket/run belongs to a run .*\(process {os.getpid()} of "):
            lease(bucket)
    assert not bucket.objects
    lease(bucket).close()


def test_a_bucket_that_lists_nothing_is_refused_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "LISTING_SECONDS", 0.1)
    bucket = Bucket()
    monkeypatch.setattr(bucket, "tags", dict)
    with pytest.raises(ConfigError, match=r"s3://bucket/run takes objects and does not list them.*name another bucket"):
        lease(bucket)
    assert not bucket.objects


def test_a_lease_of_a_dead_process_of_this_machine_is_taken_at_once() -> None:
    bucket = Bucket()
    bucket.put(OWNER, json.dumps({**owner._this_process(), "process": "1", "token": "other"}).encode())
    with closing(lease(bucket)) as mine:
        mine.check()


def test_a_lease_of_another_machine_is_taken_if_nobody_renews_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "_POLL", 0.0)
    monkeypatch.setattr(owner, "STALE", 0.05)
    other = {"host": "far", "pid": 7, "machine": "another", "token": "other", "renewed": "1"}
    bucket = Bucket()
    bucket.put(OWNER, json.dumps(other).encode())
    with closing(lease(bucket)):
        assert json.loads(bucket.objects[OWNER])["token"] != "other"

    def renew(bucket: Bucket) -> None:
        other["renewed"] += "1"  # type: ignore[operator]
        bucket.put(OWNER, json.dumps(other).encode())

    monkeypatch.setattr(owner, "STALE", 60.0)
    bucket.put(OWNER, json.dumps(other).encode())
    bucket.moment = renew
    with pytest.raises(ConfigError, match=r"process 7 of .* on far"):
        lease(bucket)


def test_a_lease_that_is_not_renewed_lasts_for_four_renewals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only goes on while the lease is waited for."""
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(owner, "time", clock)
    other = {"host": "far", "pid": 7, "machine": "another", "token": "other"}
    bucket = Bucket()
    bucket.put(OWNER, json.dumps(other).encode())
    with closing(lease(bucket)):
        assert now[0] - 100.0 == 60.0 == 4 * owner.BEAT


def test_a_lease_is_renewed_and_a_loss_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "BEAT", 0.001)
    renewals = threading.Event()
    bucket = Bucket()
    plain = bucket.put
    monkeypatch.setattr(bucket, "put", lambda *given: (plain(*given), renewals.set()))
    with closing(lease(bucket)) as first:
        assert renewals.wait(60)
        first.check()
        bucket.objects[OWNER] = json.dumps({"token": "other", "host": "far"}).encode()
        with pytest.raises(ConfigError, match="on far"):
            first.check()
    assert json.loads(bucket.objects[OWNER])["token"] == "other", "it is not ours to delete"


def test_a_run_that_lost_its_place_writes_nothing_there(data: Path, tmp_path: Path) -> None:
    from roofline.train.run.loop import Run

    class Lost(owner.Ownership):
        def check(self) -> None:
            raise ConfigError("lost")

    made = config(data, tmp_path, save_interval="2ba")
    lost = Lost(made, World())
    with closing(lost), closing(Run(made, World(), None, lost)) as run, pytest.raises(ConfigError, match="lost"):
        run.fit()
    assert steps_of(tmp_path / "checkpoints") == []


@pytest.mark.slow
def test_a_bucket_has_one_owner(data: Path, tmp_path: Path, s3: str) -> None:
    seen: list[str] = []

    def watch(line: dict[str, Any]) -> None:
        if line.get("step") == 1:
            with pytest.raises(ConfigError, match="belongs to a run that is training"):
                train(config(data, tmp_path / "b", save_folder=s3, save_interval="2ba"))
            seen.extend(entry.name for entry in open_store(s3).list())

    train(config(data, tmp_path / "a", save_folder=s3, save_interval="2ba", max_duration="2ba"), watch)
    assert seen == [OWNER]
    assert OWNER not in [entry.name for entry in open_store(s3).list()]
