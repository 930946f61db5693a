"""Bodies that take long to read wait by size and by key, and hold up nothing else."""

import asyncio
import json
import threading
from dataclasses import replace
from functools import partial

import httpx
import pytest

from roofline.server.body import fields_of
from roofline.server.errors import Overloaded
from roofline.server.keys import LOCAL
from roofline.server.limits import Limits
from roofline.server.reading import CLASSES, BodyReading
from roofline.server.routes import adapters
from roofline.server.routes.ollama import api

ALICE, BOB = (replace(LOCAL, name=name) for name in ("alice", "bob"))
LARGE, SMALL = 1 << 20, 20_000


class Gate:
    """Reads that wait until they may go on, and the order in which they began."""

    def __init__(self):
        self.begun: list[str] = []
        self.open = threading.Event()

    def read(self, name: str) -> str:
        self.begun.append(name)
        assert self.open.wait(10)
        return name


async def begun(gate: Gate, count: int) -> None:
    while len(gate.begun) < count:
        await asyncio.sleep(0.001)


async def started(reading, gate, *bodies) -> list[asyncio.Task]:
    """Tasks of reads, in this order: (key, bytes, name) each."""
    tasks = []
    for principal, size, name in bodies:
        tasks.append(asyncio.create_task(reading.read(principal, size, partial(gate.read, name))))
        await asyncio.sleep(0)
    return tasks


def test_bodies_of_each_size_wait_for_none_of_another():
    async def run():
        gate, reading = Gate(), BodyReading(64 << 20)
        sizes = [each for most, _ in CLASSES for each in [most or 8 << 20] * 4]
        tasks = await started(reading, gate, *((ALICE, size, str(size)) for size in sizes))
        await begun(gate, sum(threads for _, threads in CLASSES))
        assert {name: gate.begun.count(name) for name in gate.begun} == {
            str(most or 8 << 20): threads for most, threads in CLASSES
        }
        gate.open.set()
        assert await asyncio.gather(*tasks) == [str(size) for size in sizes]

    asyncio.run(run())


def test_a_key_with_few_bodies_does_not_wait_for_all_of_one_with_many():
    async def run():
        gate, reading = Gate(), BodyReading(64 << 20)
        many = [(ALICE, LARGE, f"a{number}") for number in range(10)]
        tasks = await started(reading, gate, *many, (BOB, LARGE, "b0"), (BOB, LARGE, "b1"))
        gate.open.set()
        await asyncio.gather(*tasks)
        return gate.begun

    order = asyncio.run(run())
    assert {"b0", "b1"} <= set(order[:6]), order
    assert [name for name in order if name[0] == "a"] == [f"a{number}" for number in range(10)]


def test_weights_divide_what_is_read():
    async def run():
        gate, reading = Gate(), BodyReading(64 << 20)
        heavy = replace(BOB, weight=3.0)
        bodies = [(ALICE, 8 << 20, "first")]
        bodies += [(key, 8 << 20, key.name) for _ in range(6) for key in (ALICE, heavy)]
        tasks = await started(reading, gate, *bodies[:1])
        await begun(gate, 1)
        tasks += await started(reading, gate, *bodies[1:8])
        gate.open.set()
        await asyncio.gather(*tasks)
        return gate.begun[1:5]

    assert sorted(asyncio.run(run())) == ["alice", "bob", "bob", "bob"]


def test_the_key_with_most_waiting_gives_way_and_a_full_queue_refuses():
    async def run():
        gate, reading = Gate(), BodyReading(3 * LARGE)
        tasks = await started(reading, gate, *((ALICE, LARGE, f"a{number}") for number in range(5)))
        await begun(gate, 2)
        with pytest.raises(Overloaded) as refused:
            await reading.read(ALICE, LARGE, partial(gate.read, "a5"))
        assert (refused.value.status, refused.value.retry_after >= 1) == (429, True)
        tasks += await started(reading, gate, (BOB, LARGE, "b0"))
        tasks += await started(reading, gate, (replace(ALICE, background=True), LARGE, "batch"))
        gate.open.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = asyncio.run(run())
    assert [each if isinstance(each, str) else type(each) for each in outcomes] == [
        *("a0", "a1", "a2", "a3"), Overloaded, "b0", "batch",
    ]  # fmt: skip


def test_a_client_that_leaves_takes_no_turn_and_no_thread():
    async def run():
        gate, reading = Gate(), BodyReading(3 * LARGE)
        tasks = await started(reading, gate, *((ALICE, LARGE, f"a{number}") for number in range(5)))
        await begun(gate, 2)
        for leaving in (tasks[0], tasks[2], tasks[3]):  # one of them is being read
            leaving.cancel()
        await asyncio.sleep(0)
        more = await started(reading, gate, (ALICE, LARGE, "a5"), (ALICE, LARGE, "a6"))  # there is room again
        assert gate.begun == ["a0", "a1"], "a read that nobody waits for still has its thread"
        gate.open.set()
        await asyncio.gather(*tasks, *more, return_exceptions=True)
        return gate.begun

    assert asyncio.run(run()) == ["a0", "a1", "a4", "a5", "a6"]


def test_what_reading_raises_is_raised_and_frees_the_thread():
    async def run():
        reading = BodyReading(LARGE)
        for _ in range(5):
            with pytest.raises(ZeroDivisionError):
                await reading.read(ALICE, LARGE, lambda: 1 // 0)
        return await reading.read(ALICE, LARGE, lambda: "read")

    assert asyncio.run(run()) == "read"


def test_a_small_request_is_answered_while_many_large_bodies_are_read(live, engine, make_context):
    """None of the large ones is ever read to its end, until the small one has its answer."""
    gate = Gate()
    context = make_context(limits=Limits(waiting_bytes=10 << 20))
    encode = context.text.encode

    def slow(text, most=None, **options):
        return encode(text, most, **options) if len(text) < LARGE // 2 else (gate.read("large"), [])[1]

    context.text.encode = slow
    address = live(text=context.text, limits=context.limits)

    async def run() -> list[int]:
        async with httpx.AsyncClient(timeout=60, base_url=address) as client:
            large = [
                asyncio.create_task(client.post("/tokenize", json={"prompt": "x" * (LARGE - 100)})) for _ in range(16)
            ]
            while not any(each.done() for each in large):
                await asyncio.sleep(0.01)
            prompt = "x" * SMALL
            small = await client.post("/tokenize", json={"prompt": prompt})
            assert (small.status_code, small.json()["count"]) == (200, SMALL)
            answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": "Hi"})
            assert answer.json()["choices"][0]["text"] == "Hello, world."
            gate.open.set()
            return [each.status_code for each in await asyncio.gather(*large)]

    statuses = asyncio.run(run())
    assert sorted(set(statuses)) == [200, 429]
    assert statuses.count(200) == 12, "two are read, ten wait"


@pytest.mark.parametrize(
    ("path", "module", "body"),
    [("/api/show", api, {"model": "tiny"}), ("/v1/adapters", adapters, {"name": "a", "path": "/nowhere"})],
)
def test_every_route_reads_large_bodies_on_threads(call, monkeypatch, path, module, body):
    threads = []

    def noted(raw, limits):
        threads.append(threading.current_thread().name.rpartition("_")[0])
        return fields_of(raw, limits)

    monkeypatch.setattr(module, "fields_of", noted)
    for padding in 0, 20_000:
        call("POST", path, content=json.dumps(body) + " " * padding, headers={"content-type": "application/json"})
    assert threads == ["", "roofline-bodies"]
