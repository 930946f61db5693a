"""Metrics of servers that are kept beside the points of a load, and drawn from there."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from roofline.bench.results.collected import series_folder
from roofline.bench.serving.certificate import null_server
from roofline.bench.serving.collecting import collecting
from roofline.common.errors import ConfigError
from tests.command_line import call_roofline

dataset = pytest.importorskip("pyarrow.dataset")
PAGE = b'# TYPE vllm:generation_tokens counter\nvllm:generation_tokens_total{model_name="m"} %d\n'


class MetricsServer(ThreadingHTTPServer):
    """Shows more tokens with each scrape. keys: that were sent with them."""

    def __init__(self) -> None:
        self.keys: list[str | None] = []
        super().__init__(("127.0.0.1", 0), MetricsHandler)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class MetricsHandler(BaseHTTPRequestHandler):
    server: MetricsServer

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["Authorization"])
        body = PAGE % (100 * len(self.server.keys))
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@contextmanager
def running_server() -> Iterator[MetricsServer]:
    """A server of metrics while the block runs."""
    running = MetricsServer()
    thread = threading.Thread(target=running.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield running
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    with running_server() as running:
        yield running


def rows(folder: Path) -> list[dict]:
    return dataset.dataset(folder, format="parquet").to_table().to_pylist()


def test_what_was_scraped_before_the_load_and_during_it_is_beside_the_results(server, tmp_path):
    results = tmp_path / "r.jsonl"
    with collecting([f"a={server.address}"], results, "secret", 0.1):
        assert len(server.keys) >= 1
        while len(server.keys) < 4:
            threading.Event().wait(0.01)
    assert set(server.keys) == {"Bearer secret"}
    values = [row["value"] for row in rows(series_folder(results)) if row["name"] == "vllm:generation_tokens_total"]
    assert values[:3] == [100, 200, 300]
    assert not [thread for thread in threading.enumerate() if thread.name == "collector"]


def test_it_ends_with_the_measuring_also_where_that_fails(server, tmp_path):
    with pytest.raises(KeyboardInterrupt), collecting([server.address], tmp_path / "r.jsonl", None, 0.1):
        raise KeyboardInterrupt
    assert rows(tmp_path / "r.series")
    assert not [thread for thread in threading.enumerate() if thread.name == "collector"]


def test_a_server_that_is_not_there_holds_up_nothing(tmp_path):
    with collecting(["http://127.0.0.1:9"], tmp_path / "r.jsonl", None, 0.1):
        pass
    assert {(row["name"], row["value"]) for row in rows(tmp_path / "r.series")} == {("up", 0.0)}


def test_without_servers_nothing_is_written(tmp_path):
    with collecting((), tmp_path / "r.jsonl", None, 2.0):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_collected_is_said_before_anything_is_measured(tmp_path):
    with pytest.raises(ConfigError, match="name their file with --out"), collecting(["http://[::1]:9"], None, None, 2):
        pass
    for words, message in (
        (["--collect", "http://127.0.0.1:9"], "--collect writes beside the results: name their file with --out"),
        (["--collect", "127.0.0.1:9", "--out", tmp_path / "r.jsonl"], "is no address of a server"),
    ):
        result = call_roofline(["bench", "sweep", "http://127.0.0.1:9", *words])
        assert result.exit_code != 0
        assert message in result.output.replace("\n", " ")


@pytest.mark.slow
@pytest.mark.parametrize("command", [["sweep", "--concurrency", 2], ["curve", "--workers", 1], ["load"]])
def test_commands_collect_and_the_report_draws_it(server, tmp_path, command):
    with null_server(first_ms=5, gap_ms=1) as url:
        words = ["--collect", f"a={server.address}", "--collect-interval", 0.1, "--out", tmp_path / "r.jsonl"]
        words += ["--requests", 4, "--no-certificate", "--no-probe"]
        result = call_roofline(["bench", command[0], url, *command[1:], *words])
        assert result.exit_code == 0, result.output
    result = call_roofline(["bench", "report", tmp_path / "r.jsonl", "--markdown", tmp_path / "r.md"])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "r.md").read_text()
    assert "## replicas over time" in text
    assert "| a |" in text
