"""The commands of the page on watching several servers, run as they stand but for addresses and ports."""

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from roofline.bench.serving.certificate import null_server
from tests.bench.serving.test_collecting import MetricsServer, running_server
from tests.deploy.collector.prometheus_process import PROMTOOL, needs_promtool

PAGE = Path(__file__).parents[2] / "docs/how-to/fleet-metrics.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.S | re.M)
LINES = [line for language, block in BLOCKS if not language for line in block.splitlines()]
QUICK = " --concurrency 1 --requests 2 --fewest 2 --no-certificate --no-probe"

pytestmark = pytest.mark.slow


@pytest.fixture
def servers() -> Iterator[list[MetricsServer]]:
    with running_server() as one, running_server() as other:
        yield [one, other]


def test_there_are_commands() -> None:
    assert [line.split()[:3] for line in LINES] == [
        ["roofline", "collect", "http://127.0.0.1:8001"],
        ["roofline", "collect", "http://127.0.0.1:8001"],
        ["roofline", "bench", "sweep"],
        ["roofline", "bench", "report"],
        ["roofline", "deploy", "prometheus"],
        ["prometheus", "--config.file=monitoring/prometheus.yml"],
    ]


def run(line: str, folder: Path) -> None:
    words = [sys.executable, "-m", *line.split()]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("roofline collect")])
def test_collecting(line: str, servers: list[MetricsServer], tmp_path: Path) -> None:
    for number, server in enumerate(servers, start=1):
        line = line.replace(f"http://127.0.0.1:800{number}", server.address)
    line = line.replace(" --port 9081", "") + " --port 0"
    process = subprocess.Popen([sys.executable, "-m", *line.split()], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        address = process.stderr.readline().split()[-1].removesuffix("/metrics")
        assert "vllm:generation_tokens_total" in httpx.get(f"{address}/metrics").text
        assert [row["state"] for row in httpx.get(f"{address}/replicas").json()["replicas"]] == ["up", "up"]
        assert httpx.get(f"{address}/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    dataset = pytest.importorskip("pyarrow.dataset")
    if "--series" in line:
        assert dataset.dataset(tmp_path / "fleet.series", format="parquet").count_rows() >= 4


def test_measuring_and_reporting(servers: list[MetricsServer], tmp_path: Path) -> None:
    sweep, report = (line for line in LINES if line.startswith("roofline bench"))
    with null_server(first_ms=5, gap_ms=1) as url:
        sweep = sweep.replace("http://127.0.0.1:9080", url)
        for number, server in enumerate(servers, start=1):
            sweep = sweep.replace(f"http://127.0.0.1:800{number}", server.address)
        run(sweep + QUICK, tmp_path)
    run(report, tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "<h2>replicas over time</h2>" in text
    assert "r2" in text


@needs_promtool
def test_what_prometheus_is_started_with(tmp_path: Path) -> None:
    write, start = LINES[-2:]
    run(write, tmp_path)
    assert shutil.which(start.split()[0]), "prometheus comes with promtool"
    configuration = start.partition("=")[2]
    done = subprocess.run(
        [str(PROMTOOL), "check", "config", configuration], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
