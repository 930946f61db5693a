"""Clients that do not read, beside the measured requests: which ones, how they end, and what they change: nothing."""

import asyncio
import json
import socket
import struct
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from roofline.bench.load.events import EventsHead, read_events, write_events
from roofline.bench.load.generator import Generator
from roofline.bench.load.plan import read_plan
from roofline.bench.load.run import run_plan
from roofline.bench.load.unread import is_beside
from roofline.bench.results.metrics import all_figures
from roofline.bench.results.recorded import read_run
from roofline.bench.serving.certificate import null_server
from roofline.bench.traffic.traffic import TrafficRequest, read_traffic
from roofline.common.errors import ConfigError
from tests.bench.load.answers import STREAM, end, part


def test_which_requests_have_one_beside_them_follows_from_seed_and_number():
    for share, count in ((0.0, 0), (0.1, 100), (0.25, 250), (1.0, 1000)):
        chosen = [n for n in range(1000) if is_beside(3, n, share)]
        assert len(chosen) == count
        assert all(after - before in (4, 10, 1) for before, after in pairwise(chosen))
    places = {tuple(n for n in range(40) if is_beside(seed, n, 0.1)) for seed in range(20)}
    assert len(places) > 3, "the seed says with which it begins"
    assert len({tuple(n for n in range(40) if is_beside(5, n, 0.1)) for _ in range(3)}) == 1


@pytest.mark.parametrize(
    "arrivals",
    [pytest.param("closed", marks=pytest.mark.slow), "poisson", pytest.param("batch", marks=pytest.mark.slow)],
)
def test_readers_are_measured_as_without_them(make_plan, arrivals):
    """The null server tells when each part was written: what the client adds is the readers' alone."""
    requests = [TrafficRequest(prompt=f"p{n}", prompt_tokens=1, max_tokens=5) for n in range(24)]
    runs = []
    with null_server(first_ms=20, gap_ms=10) as url:
        for share in (0.0, 1 / 3):
            plan = make_plan(url, requests, arrivals=arrivals, rate=50.0, concurrency=4, keep_text=True)
            plan = msgspec.structs.replace(plan, unread=share, unread_tokens=100_000)
            runs.append(run_plan(plan))
    alone, beside = runs
    assert (alone.head.unread_share, alone.head.unread) == (0.0, [])
    assert (beside.head.unread_share, len(beside.head.unread)) == (1 / 3, 8)
    assert {each.closed_by for each in beside.head.unread} == {"client"}, "the run's end closes them"
    assert all(each.headers is not None and each.error is None for each in beside.head.unread)
    for events in runs:
        assert sorted(each.request for each in events.requests) == list(range(24))
        assert all(each.completed and each.completion_tokens == 5 for each in events.requests)
        for each in events.requests:
            words = [word.split(".") for word in each.text.split()]
            assert len(words) == len(each.chunks) == 5
            assert {received for received, _ in words} == {words[0][0]}, "parts of one answer, and no other's"
            assert each.chunks[0] - each.dispatched >= 20e6
            assert each.chunks[-1] - each.dispatched >= 60e6
    figures = [all_figures(events) for events in runs]
    assert figures[0].keys() == figures[1].keys()
    assert [{name: each.definition for name, each in those.items()} for those in figures[:1]] == [
        {name: each.definition for name, each in those.items()} for those in figures[1:]
    ]
    if arrivals == "poisson":
        assert [each.scheduled for each in alone.requests] == [each.scheduled for each in beside.requests]


def test_its_request_is_longer_and_shares_no_prompt(scripted, make_plan, generate):
    bodies = []

    async def answer(body, writer, number):
        bodies.append(body)
        writer.write(STREAM + part("a"))
        if body["max_tokens"] == 3:
            while body["prompt"] == "p3" and len(bodies) < 6:  # the run's end would close what has not been sent
                await asyncio.sleep(0.01)
            writer.write(end())

    events = generate(make_plan(scripted(answer), 4, unread=0.5, unread_tokens=77, seed=1))
    readers = [body["prompt"] for body in bodies if body["max_tokens"] == 3]
    others = [body for body in bodies if body["max_tokens"] != 3]
    assert readers == ["p0", "p1", "p2", "p3"]
    assert {(body["max_tokens"], body["ignore_eos"], body["stream"]) for body in others} == {(77, True, True)}
    assert len(others) == len(events.head.unread) == 2
    assert all(not body["prompt"].startswith("p") for body in others)
    assert sorted(body["prompt"].split()[1] for body in others) == [f"p{each.request}" for each in events.head.unread]


@pytest.fixture
def running(make_plan):
    """running(url, requests, **fields of the plan) -> a generator."""

    def make(url, requests, **fields):
        plan = make_plan(url, requests, **fields)
        return Generator(plan, read_traffic(Path(plan.traffic)))

    return make


async def ended(generator, count):
    """Wait until so many clients that do not read have come to their ends."""
    while sum(each.end is not None for each in generator._unread.records) < count:
        await asyncio.sleep(0.01)


def test_how_they_ended_is_told(scripted, running):
    """Closed by the server, at once with all of the answer, refused, without an answer, and by the run's end."""

    async def answer(body, writer, number):
        if body["max_tokens"] == 3:
            if body["prompt"] == "p4":
                await ended(generator, 4)
            writer.write(STREAM + part("a") + end())
            return
        kind = int(body["prompt"].split()[0])
        if kind == 0:
            writer.write(STREAM + part("a") * 20_000)
            await asyncio.sleep(0.1)
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        elif kind == 1:
            writer.write(STREAM + part("a") + end())
        elif kind == 2:
            writer.write(b"HTTP/1.1 429 Too Many\r\nContent-Length: 9\r\n\r\nslow down")
        elif kind == 3:
            writer.close()
        else:
            writer.write(STREAM + part("a") * 20_000)

    generator = running(scripted(answer), 5, unread=1.0, unread_tokens=9, unread_seconds=60.0)
    events = asyncio.run(generator.run())
    assert all(each.completed for each in events.requests)
    assert [(each.closed_by, each.status, each.error) for each in events.head.unread] == [
        ("server", 200, None),
        ("answer", 200, None),
        ("client", 429, "status 429"),
        ("server", 0, "the server closed the connection without an answer"),
        ("client", 200, None),
    ]
    ends = [each.end for each in events.head.unread]
    assert max(ends[:4]) < min(events.requests[-1].end, ends[4])


def test_a_client_that_does_not_read_gives_up_after_its_seconds(scripted, running):
    async def answer(body, writer, number):
        if body["max_tokens"] == 3:
            await ended(generator, 1)
            writer.write(STREAM + part("a") + end())
        else:
            writer.write(STREAM + part("a"))

    generator = running(scripted(answer), 1, unread=1.0, unread_tokens=9, unread_seconds=0.2)
    events = asyncio.run(generator.run())
    (client,), (reader,) = events.head.unread, events.requests
    assert (client.closed_by, client.error, reader.error) == ("client", None, None)
    assert client.end - client.dispatched >= 0.2e9
    assert client.end < reader.end


def test_they_are_kept_in_the_head_and_older_files_have_none(tmp_path, scripted, running):
    async def answer(body, writer, number):
        if body["prompt"] == "p3":
            await ended(generator, 4)
        writer.write(STREAM + part("a") + end())

    generator = running(scripted(answer), 4, unread=1.0, unread_tokens=9)
    events, path = asyncio.run(generator.run()), tmp_path / "e.jsonl"
    write_events(events, path)
    again = read_events(path)
    assert again.head.unread == events.head.unread
    assert len(again.head.unread) == 4
    (note,) = read_run(path).notes
    assert note == "4 clients beside them did not read: 4 answered at once; they are in no figure."
    head = json.loads(path.read_bytes().splitlines()[0])
    del head["unread"], head["unread_share"]
    old = msgspec.json.decode(json.dumps(head).encode(), type=EventsHead)
    assert (old.unread, old.unread_share) == ([], 0.0)


@pytest.mark.parametrize("fields", [{"unread": 1.5}, {"unread": -0.1}, {"unread_seconds": 0}, {"unread_tokens": -1}])
def test_a_plan_that_cannot_be_is_refused(make_plan, tmp_path, fields):
    path = tmp_path / "plan.json"
    path.write_bytes(msgspec.json.encode(make_plan("http://127.0.0.1:9/v1", 2, **fields)))
    with pytest.raises(ConfigError, match="give a share from 0 to 1, no negative count, and a time above 0"):
        read_plan(Path(path))
