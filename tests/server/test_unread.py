"""Clients that do not read what they are sent: what waits for them is bounded, and nobody else waits for them."""

import asyncio
import json
import time

import httpx
import pytest

from roofline.bench.load.connection import Address
from roofline.bench.load.events import UnreadClient
from roofline.bench.load.generator import Generator
from roofline.bench.load.plan import Plan
from roofline.bench.load.unread import UnreadClients
from roofline.bench.traffic.traffic import Traffic, TrafficRequest
from roofline.common.errors import RequestError
from roofline.server.admission import Queue
from roofline.server.answers import EVENTS_AT_ONCE, Answers
from roofline.server.limits import Limits
from roofline.server.routes.openai.read import completion
from tests.server.raw_http import Answers as Received
from tests.server.raw_http import connect, request
from tests.server.test_live import eventually

LARGE = {"model": "tiny", "prompt": ["Hi"] * 8, "n": 16, "max_tokens": 900, "stream": True}
TOKENS = 8 * 16 * 900
BUFFER = 1 << 16  # of what the kernel takes for a client: the system's takes megabytes, and seconds to fill


def stream_of(body: dict) -> bytes:
    return request("POST", "/v1/completions", "Connection: close", body=json.dumps(body).encode())


def read(connection, pause: float = 0.0) -> list[dict]:
    """The events of a stream, to its end."""
    data = b""
    while more := connection.recv(1 << 20):
        data += more
        time.sleep(pause)
    ((status, body),) = Received(data).list
    assert status == 200
    assert body.endswith(b"data: [DONE]\n\n")
    return [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]


def test_an_answer_that_is_not_read_is_ended(live, engine):
    """What was waiting comes, when it is read after all, and then why there is no more."""
    engine.answer = b"x" * 900
    address = live(limits=Limits(unread_tokens=500), sent_bytes=BUFFER)
    with connect(address, received_bytes=1 << 16) as connection:
        connection.sendall(stream_of({**LARGE, "logprobs": 5}))
        eventually(lambda: len(engine.submitted) == 8 and not engine.open, 60)
        assert httpx.get(f"{address}/health").status_code == 200
        *events, last = read(connection)
    assert last["error"]["code"] == "answer_not_read"
    assert 0 < sum(len(each["choices"]) for each in events) < TOKENS
    assert {each["choices"][0]["text"].strip("x") for each in events} == {""}


def test_an_answer_that_is_read_late_is_whole(live, engine):
    """Within the bound nothing is lost, however long the client looks away."""
    engine.answer = b"x" * 900
    with connect(live(), received_bytes=1 << 16) as connection:
        connection.sendall(stream_of({**LARGE, "prompt": "Hi", "n": 2}))
        eventually(lambda: engine.submitted and not engine.open)
        events = read(connection)
    assert not engine.aborted
    assert sum(len(each["choices"][0]["text"]) for each in events if each["choices"]) == 1800


def test_an_answer_in_one_piece_has_no_bound(live, engine):
    engine.answer = b"x" * 200
    answer = httpx.post(
        f"{live(limits=Limits(unread_tokens=1))}/v1/completions", json={**LARGE, "stream": False, "n": 1}
    )
    assert [len(choice["text"]) for choice in answer.json()["choices"]] == [200] * 8


def test_a_client_that_leaves_with_much_unread_holds_up_nobody(live, engine):
    """Each part that waits for it is taken in turns with the work of others, and its own requests end."""
    engine.answer = b"x" * 900
    address = live(limits=Limits(unread_seconds=0.3), sent_bytes=BUFFER)
    connections = [connect(address, received_bytes=1 << 16) for _ in range(2)]
    for connection in connections:
        connection.sendall(stream_of(LARGE))
    eventually(lambda: len(engine.submitted) == 16)
    for connection in connections[:1]:
        connection.close()
    assert httpx.get(f"{address}/health", timeout=10).status_code == 200
    other = httpx.post(f"{address}/v1/completions", json={"model": "tiny", "prompt": "Hi"}, timeout=30).json()
    assert other["choices"][0]["text"] == "x" * 16
    eventually(lambda: not engine.open, 30)
    eventually(lambda: httpx.get(f"{address}/stats").json()["queued"] == 0)
    for connection in connections[1:]:
        connection.close()


def test_events_that_wait_are_taken_in_turns_with_others(make_context, engine, monkeypatch):
    """Nothing here waits for a socket: without turns nothing else would run until the last event."""
    engine.answer = b"x" * 300
    context = make_context()
    body = json.dumps({**LARGE, "prompt": "Hi", "max_tokens": None, "stream": True}).encode()

    async def all_at_once(ids, params, name):
        for step in range(300):
            for index in range(params.n):
                yield engine._event(name, index, step, 300, params, len(ids))

    monkeypatch.setattr(engine, "_events", all_at_once)

    async def run() -> int:
        turns = taken = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        running = asyncio.create_task(other())
        async for _ in Answers(context, completion(body, context), Queue(context.limits, context.window)).pieces():
            taken += 1
        running.cancel()
        assert taken >= 300 * 16
        return turns

    assert asyncio.run(run()) >= 300 * 16 // EVENTS_AT_ONCE


def test_a_load_is_answered_whole_while_a_quarter_of_the_clients_do_not_read(live, engine, tmp_path):
    """The load test's own clients: their streams are ended and their connections reset, and nobody else notices."""
    engine.answer = b"x" * 900
    address = live(limits=Limits(unread_tokens=500, unread_seconds=0.3), sent_bytes=BUFFER)
    requests = [TrafficRequest(prompt=f"Hi {n}", prompt_tokens=4, max_tokens=40) for n in range(24)]
    traffic = Traffic(name="test", version=1, seed=0, stop="ignored", source="a test", requests=requests)
    plan = Plan(
        traffic="", events="", url=f"{address}/v1", model="tiny", arrivals="closed", concurrency=3, requests=24,
        keep_text=True, unread=1 / 3, unread_tokens=900,
    )  # fmt: skip
    generator = Generator(plan, traffic)
    events = asyncio.run(generator.run())
    assert {(each.text, each.completion_tokens, each.error) for each in events.requests} == {("x" * 40, 40, None)}
    assert len(events.requests) == 24
    assert len(events.head.unread) == 8
    eventually(lambda: not engine.open, 30)
    eventually(lambda: httpx.get(f"{address}/stats").json()["queued"] == 0)


def test_a_load_sees_that_the_server_gives_up_on_its_clients_that_do_not_read(live, engine):
    engine.answer = b"x" * 900
    address = live(limits=Limits(unread_tokens=500, unread_seconds=0.3), sent_bytes=BUFFER)

    async def run() -> list[UnreadClient]:
        clients = UnreadClients(time.perf_counter_ns, 60.0)
        for number in range(2):
            clients.start(Address(f"{address}/v1", "/completions"), json.dumps(LARGE).encode(), number, 0)
        async with asyncio.timeout(50):
            while any(each.end is None for each in clients.records):
                await asyncio.sleep(0.01)
        await clients.close()
        return clients.records

    for client in asyncio.run(run()):
        assert (client.closed_by, client.status, client.error) == ("server", 200, None)
        assert client.end - client.headers >= 0.3e9
    eventually(lambda: not engine.open, 30)


@pytest.mark.parametrize(("logprobs", "waiting"), [(None, 11), (5, 6)])
def test_the_bound_counts_alternatives(make_context, engine, logprobs, waiting):
    engine.answer = b"x" * 900
    context = make_context(limits=Limits(unread_tokens=10))
    body = json.dumps({**LARGE, "prompt": "Hi", "logprobs": logprobs}).encode()

    async def run() -> None:
        pieces = Answers(context, completion(body, context), Queue(context.limits, context.window)).pieces()
        async with asyncio.timeout(20):
            async for _ in pieces:
                while engine.open:  # as a send to a client that does not read
                    await asyncio.sleep(0)

    with pytest.raises(RequestError, match=f" {waiting} parts of it waited to be read") as caught:
        asyncio.run(run())
    assert caught.value.status == 408
