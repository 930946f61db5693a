"""What is killed leaves nothing behind: clients and engine of a real `roofline serve`, its memory, its Python share."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from e2e_serving import ASK, ROOFLINE, Served, kill_until_one_loads, serving, streaming_request

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

FILLING = pytest.mark.timeout(900)  # of tests that may be the first with a full cache, beside other tests
CLIENTS = 200  # killed one after the other, each in mid-stream
MARGIN = 4e6  # bytes by which the two processes together may differ from before
# Bare sockets: two hundred processes that import an HTTP library would take minutes.
CLIENT = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=60)
connection.sendall(sys.stdin.buffer.read())
while data := connection.recv(4096):
    sys.stdout.buffer.write(data)
    sys.stdout.flush()
"""


@pytest.fixture(scope="module")
def full(environment, model) -> Iterator[Served]:
    """A server whose cache of 16,000 tokens (369 MB in 16 bit) has been filled to the last page."""
    with serving(environment, model, "--cache-tokens", "16000", "--golden-check", "off") as running:
        body = {"model": "small", "prompt": [[100 + i] * 980 for i in range(17)], "max_tokens": 16, "ignore_eos": True}
        answer = httpx.post(f"{running.address}/v1/completions", json=body, timeout=600)
        assert answer.status_code == 200
        stats = running.stats()
        assert stats["pages_total"] == 1000
        assert stats["prefill_tokens"] >= 16000
        yield running


def resident_bytes(served: Served) -> float:
    """Memory of server and engine process. Pages of files count in full in each: a share of them would grow where a
    server of another test, which has the same files mapped, ends meanwhile."""
    total = 0
    for pid in (served.process.pid, served.stats()["pid"]):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))
    return total


@pytest.mark.slow
@FILLING
def test_both_processes_stay_under_650_mb_with_a_full_cache(full):
    used = resident_bytes(full)
    print(f"both processes: {used / 1e6:.1f} MB")
    assert used < 650e6


@pytest.mark.slow
@pytest.mark.timeout(900)  # the reference runs at the lowest priority, beside other tests
def test_the_check_on_golden_prompts_gives_its_memory_back(environment, model):
    with serving(environment, model, "--cache-tokens", "1024") as running:
        body = {"model": "small", "prompt": [100] * 1000, "max_tokens": 16, "ignore_eos": True}  # fills the cache
        assert httpx.post(f"{running.address}/v1/completions", json=body, timeout=240).status_code == 200
        before = resident_bytes(running)
        running.eventually(lambda: running.get("/ready").json()["golden"]["status"] == "passed", seconds=800)
        change = resident_bytes(running) - before
    print(f"memory after the check on golden prompts: {change / 1e6:+.2f} MB")
    assert change < 30e6  # it left 75 MB while all logits were kept and named one by one


def kill_a_streaming_client(served: Served) -> None:
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", CLIENT, served.address.rpartition(":")[2]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child.stdin, child.stdout:
        child.stdin.write(streaming_request(served.model))
        child.stdin.close()
        assert child.stdout.read(1)  # the answer has begun
        child.kill()
        assert child.wait() == -signal.SIGKILL


@pytest.mark.slow
@FILLING
def test_killed_clients_leave_no_page_and_no_memory(full):
    for _ in range(5):
        kill_a_streaming_client(full)
    full.eventually(full.idle)
    before, counted = resident_bytes(full), full.stats()
    for _ in range(CLIENTS):
        kill_a_streaming_client(full)
    full.eventually(full.idle)
    stats = full.stats()
    assert stats["finished"]["abort"] == counted["finished"]["abort"] + CLIENTS
    assert stats["requests"] == counted["requests"] + CLIENTS
    assert sum(stats["finished"].values()) == stats["requests"], "each ended once"
    change = resident_bytes(full) - before
    print(f"memory after {CLIENTS} killed clients: {change / 1e6:+.2f} MB")
    assert abs(change) < MARGIN


def greedy(served: Served) -> str:
    client = openai.OpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0, timeout=60)
    answer = client.chat.completions.create(model="small", messages=ASK, temperature=0, max_tokens=24)
    return answer.choices[0].message.content


@pytest.mark.slow
def test_a_server_whose_engine_dies_eleven_times_without_a_token_ends_with_the_reason(environment, model):
    """Each fresh process is killed as soon as it is known: ten restarts, then status 1 and one line that says why."""
    lines: list[str] = []
    with serving(environment, model, "--cache-tokens", "1024", lines=lines) as running:
        killed: list[int] = []
        end = time.monotonic() + 200
        while running.process.poll() is None:
            assert time.monotonic() < end, "".join(lines)
            with contextlib.suppress(httpx.TransportError):
                pid = running.stats()["pid"]
                if pid is not None and pid not in killed:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
            time.sleep(0.02)
        assert running.process.wait() == 1
        running.eventually(lambda: "the engine is gone: " in "".join(lines))
    said = "".join(lines)
    assert "SIGKILL" in said
    assert "given up after 10 restarts" in said
    assert "Traceback" not in said
    assert len(killed) == 11


@pytest.mark.slow
def test_a_log_that_nobody_reads_stops_nobody(environment, model):
    """Lines of the access log fill the pipe of standard error; requests, probes and the drain go on."""
    command = [*ROOFLINE, "serve", str(model), "--port", "0", "--served-model-name", "small", "--cache-tokens", "1024"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)
        line = b""
        while b"Listening on " not in line:
            line = process.stderr.readline()
            assert line, "it did not start"
        address = line.split()[-1].decode()
        with httpx.Client(base_url=address, timeout=20) as client:
            while client.get("/ready").status_code != 200:
                time.sleep(0.05)
            for _ in range(100):  # about 120 bytes of log each
                assert client.get("/v1/models").status_code == 200
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.stderr.close()


@pytest.mark.slow
def test_an_engine_killed_while_it_loads_is_started_again(served):
    answer = greedy(served)
    killed, stopped = kill_until_one_loads(
        served, lambda: served.stats()["pid"], lambda: served.get("/ready").status_code == 503
    )
    os.kill(stopped, signal.SIGKILL)
    served.eventually(lambda: served.get("/ready").status_code == 200, 60)
    assert served.stats()["pid"] not in (*killed, stopped)
    assert greedy(served) == answer


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_python_is_less_than_a_tenth_of_a_decode_step(model, temperature):
    """With 32 running requests. A ratio of two times of the same steps, so a busy machine matters little."""
    from roofline.bundle import load
    from roofline.engine.config import EngineConfig
    from roofline.engine.local import LocalEngine
    from roofline.engine.params import SamplingParams

    loaded = load(str(model), text=False, cache_tokens=8192, max_model_len=1024)
    engine = LocalEngine(loaded.executable, EngineConfig())
    rng = np.random.default_rng(0)
    for seed in range(32):
        params = SamplingParams(temperature=temperature, top_p=0.9, max_tokens=40, ignore_eos=True, seed=seed)
        engine.submit(rng.integers(20, 40000, 32).tolist(), params)
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert stats.decode_tokens >= 32 * 32
    share = stats.decode_python_seconds / stats.decode_seconds
    print(f"Python's share of a decode step: {share:.2%}")
    assert share < 0.1
