"""Two real servers of a tiny random model behind `roofline collect`, read by the real Prometheus."""

import asyncio
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2e_serving import ROOFLINE, Served, serving

from roofline.bench.results.collected import GENERATED, UP, read_collected
from tests.deploy.collector.prometheus_process import needs_prometheus, prometheus
from tests.deploy.collector.test_prometheus import written

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
TOKENS = "sum by (model_name) (vllm:generation_tokens_total)"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    pytest.importorskip("transformers", reason="transformers makes the model")
    pytest.importorskip("roofline._native", reason="the native module is not built")
    from tests.train.objective_cases import write_tiny

    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def collector(environment, tmp_path, tiny) -> Iterator[tuple[int, list[Served], Path]]:
    """The port of a collector over two servers, the servers, and the folder of its series."""
    with serving(environment, tiny, "--threads", "1") as a, serving(environment, tiny, "--threads", "1") as b:
        words = ["collect", f"a={a.address}", f"b={b.address}", "--port", "0", "--interval", "0.2", "--timeout", "5"]
        command = [*ROOFLINE, *words, "--series", str(tmp_path / "fleet.series")]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            told = re.search(r":(\d+)/metrics", process.stderr.readline())
            assert told is not None
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield int(told[1]), [a, b], tmp_path / "fleet.series"
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
    begin = time.time() - 600
    series = {
        (each.replica, each.name): each
        for each in read_collected(tmp_path / "fleet.series", (GENERATED, UP), begin, begin + 1200, pytest.fail)
    }
    assert series["a", GENERATED].values[-1] > 0
    assert set(series["b", UP].values) == {0, 1}


def generate(served: Served, tokens: int) -> int:
    """Have a server answer. Returns the tokens that it says it has generated."""
    body = {"model": "small", "prompt": "a", "max_tokens": tokens, "ignore_eos": True}
    answer = httpx.post(f"{served.address}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["completion_tokens"]


@needs_prometheus
def test_prometheus_counts_what_the_servers_answered_also_after_one_was_killed(collector, environment, tiny, tmp_path):
    port, (a, b), _ = collector

    async def run() -> None:
        answered = 0
        async with prometheus(written(port, tmp_path, every="1s"), tmp_path) as judge:
            await judge.becomes(TOKENS, 0)
            for tokens, served in ((5, a), (7, b), (9, a)):
                answered += await asyncio.to_thread(generate, served, tokens)
            await judge.becomes(TOKENS, answered)
            assert answered == 21
            await judge.becomes("sum(rate(vllm:generation_tokens_total[1m])) > bool 0", 1)
            assert await judge.value('count(up{replica!=""} == 1)') == 2
            assert await judge.value('sum(roofline:http_responses_total{status="2xx"})') == 3
            b.process.kill()
            await judge.becomes('up{replica="b"}', 0)
            assert await judge.value(TOKENS) == answered
            await judge.becomes('count(ALERTS{alertname="RooflineReplicaDown",replica="b"})', 1)
            again = serving(environment, tiny, "--threads", "1", "--port", b.address.rpartition(":")[2])
            with again as b_again:
                answered += await asyncio.to_thread(generate, b_again, 3)
                await judge.becomes(TOKENS, answered)
                await judge.becomes('up{replica="b"}', 1)
                assert await judge.value("resets(vllm:generation_tokens_total[10m])") == 0
                assert await judge.value('replica:vllm:generation_tokens_total{replica="b"}') == 3
                await judge.becomes("roofline_fleet_restarts_total", 1)

    asyncio.run(run())
