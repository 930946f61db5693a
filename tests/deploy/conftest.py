"""Fleets of stub replicas behind the real HAProxy."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roofline.common.errors import RooflineError
from roofline.deploy.supervisor.control import send_command
from roofline.deploy.supervisor.folder import FleetFolder

ROOT = Path(__file__).parents[2]
HAPROXY = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
FREE_PORTS = ("--port=0", "--replica-port=0", "--statistics-port=0", "--metrics-port=0")


class RunningFleet:
    """A supervisor that was started; its log is in `log`."""

    def __init__(self, process: subprocess.Popen, folder: FleetFolder, log: Path) -> None:
        self.process, self.folder, self.log = process, folder, log

    def send(self, **command) -> dict:
        return send_command(self.folder, command)

    def status(self) -> dict:
        return self.send(command="status")

    @property
    def address(self) -> str:
        return self.status()["address"]

    def replica(self, name: str) -> dict:
        return next(replica for replica in self.status()["replicas"] if replica["name"] == name)

    def pids(self) -> list[int]:
        """Of the supervisor and all that it started, in the order of their start."""
        pids, deeper = [], [self.process.pid]
        while deeper:
            pids += deeper
            deeper = [child for pid in deeper for child in children(pid)]
        return pids

    def eventually(self, check: Callable[[], object], seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(RooflineError):
                if check():
                    return
            assert time.monotonic() < end, f"it did not happen in time\n{self.log.read_text()}"
            time.sleep(0.02)

    def wait_ready(self, count: int) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return sum(replica["state"] == "ready" for replica in self.status()["replicas"]) == count

        self.eventually(is_ready, 120)


def children(pid: int) -> list[int]:
    try:
        return [
            int(word)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for word in (task / "children").read_text().split()
        ]
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder with a short path, as sockets need it."""
    with tempfile.TemporaryDirectory(prefix="rf-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def start_fleet(home) -> Iterator[Callable[..., RunningFleet]]:
    """start_fleet(model, *options, program=[...]): a fleet that is ended with the test; of stubs, unless a program is
    named that runs another one."""
    if HAPROXY is None:
        pytest.skip("HAProxy is not installed")
    running: list[RunningFleet] = []

    def start(model: str, *options: str, program=("-m", "tests.deploy.stub_fleet"), **variables: str) -> RunningFleet:
        log = home / f"fleet-{len(running)}.log"
        paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]
        environment = {**os.environ, "ROOFLINE_HOME": str(home), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, *program, model, *FREE_PORTS, *options],
                env={**environment, **variables},
                stdout=stream,
                stderr=stream,
            )
        name = next((word.partition("=")[2] for word in options if word.startswith("--name=")), "default")
        running.append(RunningFleet(process, FleetFolder(name, home / "fleets"), log))
        return running[-1]

    yield start
    for fleet in running:
        pids = fleet.pids()
        fleet.process.kill()
        fleet.process.wait(30)
        end = time.monotonic() + 30
        while any(is_alive(pid) for pid in pids):
            assert time.monotonic() < end, "processes are left"
            time.sleep(0.02)
