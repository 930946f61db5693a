"""`roofline serve --dp 2` with a real model: the answers of one engine, shared work, one dying, the drain."""

import contextlib
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from e2e_serving import ROOFLINE, kill_until_one_loads, open_stream, serving

from roofline.backends.cpu.select import choose_threads

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(int(choose_threads().value) < 2, reason="two replicas need two threads"),
]
PROMPTS = ["The sky is", "Once upon a time", "One, two, three,", "def main():", "In the year 1850", "Dear Sir,"]


@pytest.fixture(scope="module")
def pair(environment, model):
    with serving(environment, model, "--cache-tokens", "4096", "--dp", "2") as running:
        yield running


def answers(served) -> list[tuple[list[str], list[float]]]:
    """Tokens and their log-probabilities, greedily, all prompts at the same time."""

    def ask(prompt: str):
        body = {"model": "small", "prompt": prompt, "temperature": 0, "max_tokens": 24, "logprobs": 1}
        answer = httpx.post(f"{served.address}/v1/completions", json=body, timeout=120).json()["choices"][0]
        return answer["logprobs"]["tokens"], answer["logprobs"]["token_logprobs"]

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        return list(threads.map(ask, PROMPTS))


@pytest.mark.slow
def test_two_replicas_answer_like_one(served, pair):
    ready = pair.get("/ready").json()
    assert ready["replicas"] == [True, True]
    assert ready["system_fingerprint"] == served.get("/ready").json()["system_fingerprint"]
    assert answers(pair) == answers(served)
    stats = pair.stats()
    assert all(each["generated_tokens"] for each in stats["replicas"])
    assert stats["generated_tokens"] == sum(each["generated_tokens"] for each in stats["replicas"])
    assert 'roofline:replica_up{model_name="small",replica="1"} 1.0' in pair.get("/metrics").text


@pytest.mark.slow
def test_each_has_cores_of_its_own(pair):
    mine = [os.sched_getaffinity(each["pid"]) for each in pair.stats()["replicas"]]
    allowed = os.sched_getaffinity(pair.process.pid)
    assert mine == [allowed, allowed] or not mine[0] & mine[1], "under a quota they are not pinned"


@pytest.mark.slow
def test_one_dies_and_the_other_goes_on(pair):
    before = pair.stats()["replicas"]
    with open_stream(pair) as one, open_stream(pair) as other:
        pair.eventually(lambda: all(each["running"] for each in pair.stats()["replicas"]))
        killed, stopped = kill_until_one_loads(
            pair, lambda: pair.stats()["replicas"][0]["pid"], lambda: not pair.get("/ready").json()["replicas"][0]
        )
        ready = pair.get("/ready")
        assert (ready.status_code, ready.json()["replicas"]) == (200, [False, True])
        assert answers(pair)
        os.kill(stopped, signal.SIGCONT)
        pair.eventually(lambda: pair.get("/ready").json()["replicas"] == [True, True])
        after = pair.stats()["replicas"]
        assert [each["restarts"] for each in after] == [len(killed), 0]
        assert after[1]["pid"] == before[1]["pid"]
        pair.eventually(lambda: [each["running"] for each in pair.stats()["replicas"]] == [1, 1])
        # A field or a value, not a word of the text, in which quotes are escaped.
        assert not [line for stream in (one, other) for line in read(stream).splitlines() if b'"error"' in line]


def read(stream) -> bytes:
    stream.setblocking(False)
    received = b""
    with contextlib.suppress(BlockingIOError):
        while data := stream.recv(1 << 20):
            received += data
    assert received
    return received


def test_more_replicas_than_threads_are_refused_in_one_line(environment, model):
    command = [*ROOFLINE, "serve", str(model), "--port", "0", "--threads", "2", "--dp", "3"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "--dp 3 needs 3 threads, 2 are available. Lower it to 2" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_running_requests_of_all_finish_when_the_server_is_told_to_stop(environment, model):
    with serving(environment, model, "--cache-tokens", "4096", "--dp", "2") as running:
        with open_stream(running, max_tokens=300) as one, open_stream(running, max_tokens=300) as other:
            running.eventually(lambda: all(each["running"] for each in running.stats()["replicas"]))
            engines = [each["pid"] for each in running.stats()["replicas"]]
            running.process.send_signal(signal.SIGTERM)
            for stream in (one, other):
                received = b""
                while data := stream.recv(65536):
                    received += data
                assert b'"finish_reason":"length"' in received
            assert running.process.wait(30) == 0
        assert not any(os.path.exists(f"/proc/{pid}") for pid in engines)
