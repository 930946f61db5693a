"""Every socket that a command opens is reached by programs of this machine alone.

What listens elsewhere does so because an option names the address (`serve --host`, `MASTER_ADDR` of torchrun); see
docs/reference/security.md.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_serving import ROOFLINE, serving

from roofline.bench import peers
from roofline.bench.traffic.presets import singles
from roofline.bench.traffic.traffic import write_traffic
from tests.open_sockets import OpenSocket, open_sockets, outward_interface
from tests.train import sft
from tests.train.small import mapping, write_rows

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]
pytest.importorskip("torch", reason="ranks and training are torch")


@pytest.fixture
def outward(environment: dict[str, str]) -> dict[str, str]:
    """An environment that names an interface which other machines may reach."""
    return environment | {"GLOO_SOCKET_IFNAME": outward_interface(), "OMP_NUM_THREADS": "1"}


def of_all_time(process: "subprocess.Popen[Any]", seconds: float = 240) -> set[OpenSocket]:
    """What a process and those below it listen on until it ends, looked at again and again."""
    sockets: set[OpenSocket] = set()
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a process has ended meanwhile
            sockets |= set(open_sockets(process.pid))
        time.sleep(0.05)  # what listens does so for as long as its command runs, and looking takes the processor too
    return sockets


@contextlib.contextmanager
def running(command: list[str], environment: dict[str, str], folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.parametrize(
    "options",
    [
        ("--threads", "1"),
        ("--threads", "2", "--tp", "2"),
        ("--threads", "2", "--backend", "reference", "--pp", "2"),
        ("--threads", "2", "--dp", "2"),
    ],
    ids=" ".join,
)
def test_a_server_with_all_that_it_starts(outward: dict[str, str], model: Path, options: tuple[str, ...]) -> None:
    with serving(outward, model, "--cache-tokens", "2048", *options) as served:
        sockets = open_sockets(served.process.pid)
    assert served.address.rpartition(":")[2] in {str(each.port) for each in sockets}
    assert all(each.local for each in sockets), sockets


@pytest.mark.parametrize("changes", [{}, {"fsdp_config": {"sharding_strategy": "FULL_SHARD"}}], ids=["plain", "fsdp"])
@pytest.mark.parametrize("count", [1, 2])
def test_processes_of_training(outward: dict[str, str], tmp_path: Path, count: int, changes: dict[str, Any]) -> None:
    given = mapping(write_rows(tmp_path / "data", 40), tmp_path / "run", **changes)
    (tmp_path / "run.yaml").write_text(json.dumps(given))
    with running([*ROOFLINE, "train", "run.yaml", "--nproc", str(count)], outward, tmp_path) as process:
        sockets = of_all_time(process)
    assert process.returncode == 0, (tmp_path / "output").read_text()
    assert bool(sockets) == (count > 1 or bool(changes)), "gloo listens where there is a group"
    assert all(each.local for each in sockets), sockets


def test_processes_that_torchrun_or_another_launcher_starts(outward: dict[str, str], tmp_path: Path) -> None:
    """They meet at MASTER_ADDR, where rank 0 listens on that address alone."""
    given = mapping(write_rows(tmp_path / "data", 40), tmp_path / "run")
    (tmp_path / "run.yaml").write_text(json.dumps(given))
    script = (
        "import os, subprocess, sys\n"
        "ranks = [subprocess.Popen([sys.executable, '-m', 'roofline.train', 'run.yaml'], "
        "env={**os.environ, 'RANK': str(rank), 'LOCAL_RANK': str(rank)}) for rank in range(2)]\n"
        "sys.exit(sum(rank.wait() for rank in ranks))\n"
    )
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with running([sys.executable, "-c", script], outward | place, tmp_path) as process:
        sockets = of_all_time(process)
    assert process.returncode == 0, (tmp_path / "output").read_text()
    assert port in {each.port for each in sockets}
    assert all(each.local for each in sockets), sockets


@pytest.mark.parametrize("count", [1, 2])
def test_processes_of_fine_tuning(outward: dict[str, str], tmp_path: Path, count: int) -> None:
    data = sft.write_lines(tmp_path / "data.jsonl", [sft.question(number) for number in range(12)])
    command = [*ROOFLINE, "finetune", str(sft.write_model(tmp_path / "tiny")), str(data), "--out", "run", "--ask", "0"]
    command += ["--max-seq-len", "64", "--batch", "2", "--steps", "2", "--precision", "fp32", "--nproc", str(count)]
    with running(command, outward, tmp_path) as process:
        sockets = of_all_time(process)
    assert process.returncode == 0, (tmp_path / "output").read_text()
    assert bool(sockets) == (count > 1), "gloo listens where there is a group"
    assert all(each.local for each in sockets), sockets


def test_the_server_that_puts_openvino_under_load(outward: dict[str, str], tmp_path: Path) -> None:
    fake = Path(__file__).parents[1] / "bench" / "load" / "fake_openvino"
    server = Path(peers.__file__).parent / "openvino_server.py"
    (info := tmp_path / "openvino_genai-2026.9.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: openvino-genai\nVersion: 2026.9\n")
    (tmp_path / "model").mkdir()
    command = [sys.executable, str(server), "model", "--port", "0"]
    with running(command, {**outward, "PYTHONPATH": f"{fake}:{tmp_path}"}, tmp_path) as process:
        sockets, end = list[OpenSocket](), time.monotonic() + 60
        while not sockets and process.poll() is None and time.monotonic() < end:
            sockets = list(open_sockets(process.pid))
            time.sleep(0.02)
    assert sockets, (tmp_path / "output").read_text()
    assert all(each.local for each in sockets), sockets


def test_a_measurement_and_the_server_that_it_starts(outward: dict[str, str], model: Path, tmp_path: Path) -> None:
    command = [*ROOFLINE, "bench", "load", f"roofline:{model} --threads 1 --cache-tokens 2048", "--no-certificate"]
    write_traffic(singles((16,), 8, 2), tmp_path / "traffic.jsonl")
    command += ["--arrivals", "closed", "--requests", "2", "--traffic", str(tmp_path / "traffic.jsonl")]
    with running(command, outward, tmp_path) as process:
        sockets = of_all_time(process)
    assert process.returncode == 0, (tmp_path / "output").read_text()
    assert sockets
    assert all(each.local for each in sockets), sockets


def test_links_that_are_measured_between_processes(outward: dict[str, str], tmp_path: Path) -> None:
    code = "from roofline.backends.gpu.measure.collectives import measure; measure([[0, 1]], [1024], 2)"
    with running([sys.executable, "-c", code], outward, tmp_path) as process:
        sockets = of_all_time(process)
    assert process.returncode == 0, (tmp_path / "output").read_text()
    assert sockets
    assert all(each.local for each in sockets), sockets
