"""`roofline up` with real servers of a small model behind the real HAProxy."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from roofline.backends.cpu.select import choose_threads
from tests.deploy.conftest import HAPROXY, RunningFleet, home, is_alive, start_fleet  # noqa: F401  (fixtures)
from tests.deploy.load import ask, load_on
from tests.train import sft

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "fleet.md"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.skipif(int(choose_threads().value) < 2, reason="two replicas need two threads"),
    pytest.mark.skipif(HAPROXY is None, reason="HAProxy is not installed"),
]
OURS = ("-m", "roofline", "up")
TOKENS = 60


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A model of two layers with random weights."""
    pytest.importorskip("roofline._native", reason="the native module is not built")
    return sft.write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def start(start_fleet, tiny):  # noqa: F811
    """start(*options): a fleet of real servers, two of them, once all are ready."""

    def run(*options: str, model: Path = tiny, **variables: str) -> RunningFleet:
        words = ("--replicas=2", "--served-model-name=small", "--golden-check=off", "--cache-tokens=4096", *options)
        fleet = start_fleet(str(model), *words, program=OURS, ROOFLINE_BUNDLES="on", **variables)
        fleet.wait_ready(2)
        return fleet

    return run


def stream(number: int) -> dict:
    return {
        "model": "small", "prompt": f"{number} one two", "max_tokens": TOKENS, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, "temperature": 0,
    }  # fmt: skip


def assert_complete(outcomes) -> None:
    for outcome in outcomes:
        usage = [event["usage"] for event in outcome.events if event.get("usage")]
        assert [counts["completion_tokens"] for counts in usage] == [TOKENS]


def engines(fleet: RunningFleet) -> list[int]:
    """The process ids of the replicas' engines, once all are ready, for the proxy too."""
    addresses = [f"http://127.0.0.1:{replica['port']}" for replica in fleet.status()["replicas"]]
    fleet.eventually(lambda: all(httpx.get(f"{at}/ready", timeout=30).status_code == 200 for at in addresses))
    fleet.eventually(lambda: [replica["proxy"] for replica in fleet.status()["replicas"]] == ["UP", "UP"])
    return [httpx.get(f"{at}/stats", timeout=30).json()["engine"]["pid"] for at in addresses]


def test_engines_are_killed_and_no_request_fails(start):
    fleet = start()
    with load_on(fleet.address, stream, workers=6) as load:
        for turn in range(4):
            load.wait_for(6, 120)
            os.kill(engines(fleet)[turn % 2], signal.SIGKILL)
        load.wait_for(12, 120)
    assert load.failed == []
    assert_complete(load.outcomes)
    assert [replica["restarts"] for replica in fleet.status()["replicas"]] == [0, 0]


def test_a_server_is_killed_and_costs_its_open_streams_alone(start):
    fleet = start()
    with load_on(fleet.address, stream, workers=6) as load:
        load.wait_for(6, 120)
        before = fleet.replica("r1")["pid"]
        begun = time.monotonic()
        os.kill(before, signal.SIGKILL)
        fleet.eventually(lambda: fleet.replica("r1")["state"] == "ready" and fleet.replica("r1")["pid"] != before)
        print(f"in the rotation again after {time.monotonic() - begun:.2f} s")
        load.wait_for(18, 120)
    broken = ("IncompleteRead", "the stream ended without [DONE]")
    assert all(error.startswith(broken) for error in load.failed), load.failed
    assert len(load.failed) <= 6
    assert_complete(outcome for outcome in load.outcomes if outcome.error is None)
    fleet.eventually(lambda: (fleet.replica("r1")["figures"] or {"served": 0})["served"] > 0)


@pytest.mark.skipif(shutil.which("ab") is None, reason="ab is not installed: apt-get install apache2-utils")
def test_apache_bench_sees_no_failed_request(start, tmp_path):
    fleet = start("--max-queued-requests=256")
    body = tmp_path / "body.json"
    body.write_text(json.dumps({**stream(0), "stream": False, "stream_options": None, "max_tokens": 16}))
    words = ["ab", "-q", "-l", "-c", "64", "-n", "256", "-p", str(body), "-T", "application/json"]
    done = subprocess.run(
        [*words, f"{fleet.address}/v1/completions"], capture_output=True, text=True, timeout=200, check=True
    )
    assert re.search(r"Complete requests: +256\n", done.stdout), done.stdout
    assert re.search(r"Failed requests: +0\n", done.stdout), done.stdout
    assert "Non-2xx" not in done.stdout
    fleet.eventually(lambda: sum(r["figures"]["served"] for r in fleet.status()["replicas"]) == 256)
    assert all(replica["figures"]["served"] > 0 for replica in fleet.status()["replicas"])


def test_a_roll_to_another_model_fails_no_request(start, tmp_path):
    fleet = start()
    other = sft.write_model(tmp_path / "other", std=0.2)
    with load_on(fleet.address, stream, workers=6) as load:
        load.wait_for(6, 120)
        fleet.send(command="roll", model=str(other))
        load.wait_for(12, 120)
    assert load.failed == []
    assert_complete(load.outcomes)
    prints = [outcome.events[0]["system_fingerprint"] for outcome in load.outcomes]
    assert len({prints[0], prints[-1]}) == len(set(prints)) == 2
    assert {replica["model"] for replica in fleet.status()["replicas"]} == {str(other)}


def test_sigterm_completes_streams_and_leaves_nothing(start):
    fleet = start()
    pids = fleet.pids()
    assert len(pids) >= 6  # the supervisor, HAProxy, two servers, two engines
    with load_on(fleet.address, stream, workers=6) as load:
        load.wait_for(6, 120)
        fleet.process.terminate()
        fleet.process.wait(120)
    begun = [outcome for outcome in load.outcomes if outcome.events]
    assert [outcome.error for outcome in begun] == [None] * len(begun)
    assert_complete(begun)
    assert not any(is_alive(pid) for pid in pids)


def test_what_is_not_complete_in_time_ends_with_an_error_that_clients_see(start):
    fleet = start("--drain-seconds=0")
    with load_on(fleet.address, lambda number: {**stream(number), "max_tokens": 450}, workers=8) as load:
        load.wait_for(8, 120)
        fleet.process.terminate()
        fleet.process.wait(120)
    begun = [outcome.error or "complete" for outcome in load.outcomes if outcome.events]
    assert all(error == "complete" or "server_stopping" in error for error in begun), begun


def test_nothing_is_left_of_a_killed_supervisor(start):
    fleet = start()
    pids = fleet.pids()
    with load_on(fleet.address, stream, workers=4) as load:
        load.wait_for(4, 120)
        os.kill(fleet.process.pid, signal.SIGKILL)
        fleet.process.wait(10)
        fleet.eventually(lambda: not any(is_alive(pid) for pid in pids), 30)
        load._stop.set()


def test_keys_are_asked_for_and_health_is_not_refused(start):
    fleet = start(ROOFLINE_API_KEY="the'key%d")
    time.sleep(3)  # several checks of HAProxy's
    assert ask(fleet.address, {**stream(0), "stream": False}).status == 401
    answer = ask(fleet.address, stream(0), headers={"Authorization": "Bearer the'key%d"})
    assert answer.error is None
    fleet.eventually(lambda: sum(r["figures"]["served"] for r in fleet.status()["replicas"] if r["figures"]) == 1)
    commands = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "the'key%d" not in commands


def test_a_model_that_cannot_be_loaded_ends_the_fleet_with_the_reason(start_fleet, tmp_path):  # noqa: F811
    (tmp_path / "config.json").write_text("{}")
    fleet = start_fleet(str(tmp_path), "--replicas=1", program=OURS)
    assert fleet.process.wait(120) == 1
    assert "tokenizer.json" in fleet.log.read_text()  # what the server says is missing
    assert "Traceback" not in fleet.log.read_text()


@pytest.fixture
def shell(environment, home, smollm2_path) -> Iterator:  # noqa: F811
    """run(line): a command line of the page, with `roofline` on PATH and the model in a ROOFLINE_HOME of its own."""
    from tests.e2e.conftest import Shell

    folder = home / "shell"
    folder.mkdir()
    made = Shell(environment, folder)
    made.variables |= {"ROOFLINE_HOME": str(home / "h"), "ROOFLINE_BUNDLES": "on"}
    del made.variables["ROOFLINE_THREADS"]
    made.store(smollm2_path)
    yield made
    made("roofline down --now || true")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_commands_of_the_page_do_what_it_says(shell):
    commands = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    ports = {"9080": free_port(), "8001": free_port()}
    outputs = []
    for text in commands:
        line = text.replace("9080", ports["9080"])
        if line.startswith("roofline up"):
            line = f"{line.strip()} --port {ports['9080']} --replica-port 0 --statistics-port 0 --metrics-port 0"
        done = shell(line)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        outputs.append(done.stdout)
    answer = next(text for text in outputs if "text_completion" in text)
    assert 1 <= json.loads(answer)["usage"]["completion_tokens"] <= 8  # it is sampled, and may end before
    assert any("2 of 2 ready" in text or "1 of 2 ready" in text for text in outputs)
    assert "r2: replaced" in "".join(outputs)
    assert shell("roofline status || true").stderr.startswith("roofline: no fleet named 'default' runs here")
    printed = shell("roofline up smollm2-135m --replicas 2 --print").stdout
    assert "balance leastconn" in printed


def free_port() -> str:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])
