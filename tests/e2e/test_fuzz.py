"""Requests of every kind against a real server: none is answered with 5xx, none harms it, and in between it says the
same as ever."""

import asyncio
import collections
import itertools
import os
from pathlib import Path

import httpx
import pytest
from e2e_serving import ASK, serving
from request_fuzzer import requests, values_in_fields

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

BLOCK, AT_ONCE = 150, 8
CANARY = {"model": "small", "messages": ASK, "temperature": 0, "max_tokens": 12, "logprobs": True}
MOST_GROWTH = 64 << 20  # bytes, of both processes together, after the warm-up


@pytest.mark.slow
def test_class_c_a_sample_of_values_in_fields(environment, model):
    _fuzz(environment, model, count=200, seed=int(os.environ.get("ROOFLINE_FUZZ_SEED", "1")))


@pytest.mark.slow
@pytest.mark.soak
def test_class_c_twenty_thousand_requests_with_every_class_of_value_in_every_field(environment, model):
    count = max(20_000, 2 * len(values_in_fields()))  # every other request has one of them
    _fuzz(environment, model, count, seed=int(os.environ.get("ROOFLINE_FUZZ_SEED", "2")))


@pytest.mark.slow
def test_class_b_no_guard_is_an_assert(environment, model):
    """A server of `python -O`, which leaves out all asserts."""
    _fuzz({**environment, "PYTHONOPTIMIZE": "1"}, model, count=1000, seed=3)


def _fuzz(environment, model, count, seed):
    lines: list[str] = []
    with serving(environment, model, "--cache-tokens", "4096", "--context", "256", lines=lines) as served:
        answer = canary(served)
        fill_the_cache(served)
        statuses, before, generated = collections.Counter(), memory(served), requests(count, seed)
        warm_up = min(1500, count // 2)  # the largest steps and the caches of compiled forms come early
        for block in iter(lambda: list(itertools.islice(generated, BLOCK)), []):
            statuses.update(asyncio.run(send_all(served.address, block)))
            assert canary(served) == answer
            before = memory(served) if sum(statuses.values()) <= warm_up else before
        assert served.stats()["restarts"] == 0
        assert memory(served) - before < MOST_GROWTH
        served.eventually(served.idle)
    assert sum(statuses.values()) == count
    assert not [status for status in statuses if status >= 500], statuses
    assert statuses[200] >= 0.3 * count, statuses
    assert not [line for line in lines if "Traceback" in line or "leaked" in line]


def fill_the_cache(served) -> None:
    """Memory of the cache is the process's from when it is first written."""
    body = {"model": "small", "prompt": [[100 + i] * 250 for i in range(17)], "max_tokens": 1}
    assert httpx.post(f"{served.address}/v1/completions", json=body, timeout=240).status_code == 200


def canary(served) -> object:
    answer = httpx.post(f"{served.address}/v1/chat/completions", json=CANARY, timeout=120)
    assert answer.status_code == 200
    return answer.json()["choices"]


def memory(served) -> int:
    """Bytes of the server and its engine process that are theirs alone."""
    total = 0
    for pid in (served.process.pid, served.stats()["pid"]):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))
    return total


async def send_all(address: str, block: list[tuple[str, dict]]) -> list[int]:
    """The statuses of the answers, which are read to their ends."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def send(client: httpx.AsyncClient, path: str, body: dict) -> int:
        async with turns:
            answer = await client.post(address + path, json=body, timeout=120)
        assert "engine_failed" not in answer.text, body
        assert answer.status_code < 500, (answer.status_code, path, str(body)[:1000], answer.text)
        return answer.status_code

    async with httpx.AsyncClient() as client:
        return await asyncio.gather(*(send(client, *each) for each in block))
