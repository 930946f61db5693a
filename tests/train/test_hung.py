"""Real processes of a run one of which hangs: it is named in a line, and nothing is left of it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.e2e]
pytest.importorskip("torch", reason="training is torch")

from tests.open_sockets import family_of  # noqa: E402
from tests.train.small import log_of, mapping, write_rows  # noqa: E402

PROGRAM = "import sys; from roofline.cli.main import main; sys.exit(main())"
HUNG = "process 1 of 3 has not answered for 4 s (dist_timeout)"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def state(pid: int) -> str:
    """As the kernel writes it, "" when it is gone or waits to be collected."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""
    return letter.replace("Z", "")


class HungRun:
    """Three processes of which the second was stopped after a step, and their launcher."""

    def __init__(self, launcher: "subprocess.Popen[bytes]", output: Path) -> None:
        self.launcher, self.output = launcher, output
        self.workers = [pid for pid in family_of(launcher.pid) if pid != launcher.pid]
        places = {pid: Path(f"/proc/{pid}/environ").read_text().split("\0") for pid in self.workers}
        (self.stopped,) = (pid for pid, place in places.items() if "RANK=1" in place)
        os.kill(self.stopped, signal.SIGSTOP)
        until(lambda: state(self.stopped) == "T")

    def lines(self) -> list[str]:
        return [line for line in self.output.read_text().splitlines() if line.startswith("roofline: ")]


@contextmanager
def hung(folder: Path, **changes: object) -> Iterator[HungRun]:
    given = mapping(write_rows(folder / "data", 40), folder / "run", max_duration="100000ba", **changes)
    (folder / "run.yaml").write_text(json.dumps(given))
    output = folder / "output"
    command = [sys.executable, "-c", PROGRAM, "train", str(folder / "run.yaml"), "--nproc", "3"]
    with output.open("wb") as file:
        launcher = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        until(lambda: (folder / "run" / "log.jsonl").exists() and len(log_of(folder / "run")) > 3)
        yield HungRun(launcher, output)
    finally:
        launcher.kill()
        launcher.wait()


def test_it_is_named_once_and_all_end(tmp_path: Path) -> None:
    with hung(tmp_path, dist_timeout=4) as run:
        assert run.launcher.wait(240) == 1
        assert not any(state(pid) for pid in run.workers)
    assert len(run.lines()) == 1, run.lines()
    assert HUNG in run.lines()[0]
    assert "Traceback" not in run.output.read_text()


def test_sigterm_to_the_launcher_ends_all(tmp_path: Path) -> None:
    with hung(tmp_path, stop_timeout=3) as run:
        run.launcher.terminate()
        assert run.launcher.wait(240) == 128 + signal.SIGTERM
        assert not any(state(pid) for pid in run.workers)
    (line,) = run.lines()
    assert line.startswith("roofline: the run has not stopped 3 s after SIGTERM, and is ended: ")
    assert line.endswith("process 1 of 3 was stopped and not continued")


def test_a_stopped_process_ends_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with hung(tmp_path) as run:
        run.launcher.kill()
        run.launcher.wait()
        until(lambda: not any(state(pid) for pid in run.workers))
