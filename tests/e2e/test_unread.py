"""Clients of a real `roofline serve` that read nothing, of an engine that is faster than any of them."""

import asyncio
import json
import socket
import time

import httpx
import pytest
from e2e_serving import serving

from roofline.bench.load.generator import Generator
from roofline.bench.load.plan import Plan
from roofline.bench.traffic.traffic import Traffic, TrafficRequest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

BOUND = 250e6  # bytes that the HTTP process may grow by: four streams of 4,096 tokens and what sockets hold


LARGE = {"model": "small", "prompt": ["Once"] * 8, "n": 16, "max_tokens": 8000, "stream": True, "ignore_eos": True}
CONTENT = json.dumps(LARGE).encode()
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(CONTENT), CONTENT)
)


def resident(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_clients_that_read_nothing_cost_neither_memory_nor_others(environment, model):
    options = ("--backend", "simulated", "--device", "MI300X", "--no-access-log")
    ask = {"model": "small", "prompt": "Once", "max_tokens": 32, "ignore_eos": True}
    with serving(environment, model, *options) as served:
        size, before, host = resident(served.process.pid), served.stats()["requests"], httpx.URL(served.address)
        silent = []
        for _ in range(4):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host.host, host.port))
            connection.sendall(REQUEST)
            silent.append(connection)
        served.eventually(lambda: served.stats()["requests"] >= before + 4 * len(LARGE["prompt"]))
        served.eventually(served.idle, 120)
        assert resident(served.process.pid) - size < BOUND
        beside = httpx.post(f"{served.address}/v1/completions", json=ask, timeout=60).json()
        assert beside["usage"]["completion_tokens"] == 32
        for connection in silent:
            connection.close()
        assert served.get("/health").status_code == 200
        served.eventually(served.idle)


def test_a_load_with_clients_that_do_not_read_is_answered_whole(environment, model):
    """A quarter of all clients; what they leave unread is bounded in the HTTP process."""
    options = ("--backend", "simulated", "--device", "MI300X", "--no-access-log")
    requests = [TrafficRequest(prompt=f"Once {n}", prompt_tokens=2, max_tokens=30) for n in range(60)]
    traffic = Traffic(name="test", version=1, seed=0, stop="ignored", source="a test", requests=requests)
    with serving(environment, model, *options) as served:
        before = resident(served.process.pid)
        plan = Plan(
            traffic="", events="", url=f"{served.address}/v1", model="small", arrivals="closed", concurrency=4,
            requests=60, keep_text=True, unread=1 / 3, unread_tokens=8000,
        )  # fmt: skip
        events = asyncio.run(Generator(plan, traffic).run())
        assert len(events.head.unread) == 20
        assert resident(served.process.pid) - before < BOUND
        assert [(each.error, each.completion_tokens) for each in events.requests] == [(None, 30)] * 60
        served.eventually(served.idle, 60)


def test_leaving_in_the_middle_of_an_answer_that_is_not_read_frees_it(environment, model):
    """The engine would be busy with these for minutes."""
    options = ("--backend", "simulated", "--device", "MI300X", "--no-access-log")
    with serving(environment, model, *options) as served:
        host = httpx.URL(served.address)
        with socket.create_connection((host.host, host.port)) as connection:
            connection.sendall(REQUEST)
            served.eventually(lambda: served.stats()["running"] > 0)
            time.sleep(0.5)
        assert served.get("/health").status_code == 200
        served.eventually(served.idle, 30)


def test_a_stream_beside_clients_that_read_nothing_is_what_it_is_alone(served):
    ask = {"model": "small", "prompt": "The bridge is", "max_tokens": 64, "temperature": 0, "ignore_eos": True}
    alone = httpx.post(f"{served.address}/v1/completions", json=ask, timeout=120).json()["choices"][0]["text"]
    content = json.dumps({**LARGE, "prompt": "Once", "n": 8, "max_tokens": 400, "logprobs": 5}).encode()
    host = httpx.URL(served.address)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host.host, host.port))
        connection.sendall(
            REQUEST.replace(b": %d\r\n" % len(CONTENT), b": %d\r\n" % len(content)).replace(CONTENT, content)
        )
        served.eventually(lambda: served.stats()["running"] > 0)
        beside = httpx.post(f"{served.address}/v1/completions", json=ask, timeout=120).json()["choices"][0]["text"]
    assert beside == alone
    served.eventually(served.idle)
