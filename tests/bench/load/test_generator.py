"""The generator against servers that do what a test says: moments, failures, conversations, probes."""

import asyncio
import time

import msgspec
import pytest

from roofline.bench.load.plan import Probe
from roofline.bench.results.metrics import figures
from roofline.bench.traffic.traffic import TrafficRequest
from tests.bench.load.answers import STREAM, end, part, piece


async def three_parts(body, writer, number):
    writer.write(STREAM)
    for text in ("a", "b", "c"):
        await asyncio.sleep(0.01)
        writer.write(part(text))
    writer.write(end())


def test_a_closed_loop_keeps_its_workers_busy(scripted, make_plan, generate):
    bodies, open_now, most = [], 0, 0

    async def answer(body, writer, number):
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        bodies.append((body, number))
        await three_parts(body, writer, number)
        open_now -= 1

    began = time.perf_counter_ns()
    events = generate(make_plan(scripted(answer), 9, concurrency=3))
    spent = time.perf_counter_ns() - began
    assert (len(events.requests), most, {number for _, number in bodies}) == (9, 3, {1, 2, 3})
    expected = {"model": "m", "max_tokens": 3, "temperature": 0, "stream": True, "ignore_eos": True}
    assert bodies[0][0] == {**expected, "stream_options": {"include_usage": True}, "prompt": "p0"}
    for each in events.requests:
        moments = [each.scheduled, each.dispatched, each.sent, each.headers, each.first_byte, *each.chunks, each.end]
        assert moments == sorted(moments)
        assert len(each.chunks) == 3
        assert each.completed
        assert each.chunks[2] - each.dispatched >= 29e6, "the server waits three times for 10 ms"
        assert 0 <= each.dispatched < each.end < spent
        assert (each.status, each.prompt_tokens, each.completion_tokens) == (200, 7, 3)
    assert events.head.concurrency == 3
    assert events.head.end <= max(each.end for each in events.requests) + 5e6  # when a worker runs out of work
    assert sum(each.connected is not None for each in events.requests) == 3  # connections are kept


def test_an_open_loop_does_not_wait_for_answers(scripted, make_plan, generate):
    bodies = []

    async def slow(body, writer, number):
        bodies.append(body)
        while len(bodies) < 5:  # no answer comes before the last request was sent
            await asyncio.sleep(0.01)
        await three_parts(body, writer, number)

    events = generate(make_plan(scripted(slow), 5, arrivals="constant", rate=50.0))
    assert [each.scheduled for each in events.requests] == [0, 20_000_000, 40_000_000, 60_000_000, 80_000_000]
    assert all(each.dispatched >= each.scheduled for each in events.requests)
    assert all(each.completed for each in events.requests)
    first_answer = min(each.chunks[0] for each in events.requests)
    assert (events.head.rate, events.head.concurrency) == (50.0, None)
    assert max(each.dispatched for each in events.requests) <= events.head.end < first_answer


def test_a_batch_is_sent_at_once_and_awaited(scripted, make_plan, generate):
    events = generate(make_plan(scripted(three_parts), 6, arrivals="batch", concurrency=3))
    first, second = events.requests[:3], events.requests[3:]
    assert min(each.dispatched for each in second) >= max(each.end for each in first)
    assert len({each.scheduled for each in first}) == 1


def test_seconds_end_a_run(scripted, make_plan, generate):
    events = generate(make_plan(scripted(three_parts), 50, concurrency=1, seconds=0.5))
    assert 1 < len(events.requests) < 20
    assert all(each.completed for each in events.requests)


@pytest.mark.parametrize("arrivals", ["constant", "poisson"])
def test_an_open_loop_that_time_ends_has_its_rate(scripted, make_plan, generate, arrivals):
    events = generate(make_plan(scripted(three_parts), 500, arrivals=arrivals, rate=50.0, seconds=0.4))
    assert len(events.requests) == 20
    assert events.requests[-1].scheduled == (380_000_000 if arrivals == "constant" else 400_000_000)
    assert figures(events)["request_rate"].value == pytest.approx(50)


def test_failures_are_results(scripted, make_plan, generate):
    async def answer(body, writer, number):
        which = body["prompt"]
        if which == "p0":
            writer.write(b"HTTP/1.1 429 Too Many\r\nContent-Length: 9\r\n\r\nslow down")
        elif which == "p1":
            writer.write(STREAM + part("a"))
            await writer.drain()
            writer.close()
        elif which == "p2":
            writer.close()
        elif which == "p3":
            writer.write(STREAM + part("a"))
            await asyncio.sleep(5)
        elif which == "p4":
            writer.write(b"nonsense\r\n\r\n")
        elif which == "p5":
            writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"choices": []}')
        elif which == "p6":
            writer.write(STREAM + piece(b'data: {"error": {"message": "no memory"}}\n\ndata: [DONE]\n\n') + piece(b""))
        else:
            await three_parts(body, writer, number)

    events = generate(make_plan(scripted(answer), 8, timeout=0.5))
    errors = [each.error for each in events.requests]
    assert errors[0] == "status 429: slow down"
    assert events.requests[0].status == 429
    assert errors[1] == "the server closed the connection in the middle of the answer"
    assert errors[2] == "the server closed the connection without an answer"
    assert errors[3] == "no complete answer within 0.5 s"
    assert errors[4].startswith("the answer is no HTTP")
    assert errors[5] == "the answer is no stream that ends with [DONE]"
    assert "no memory" in errors[6]
    assert errors[7] is None
    assert events.requests[7].completed
    assert not any(each.completed for each in events.requests[:7])
    assert all(each.end is not None for each in events.requests)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_streams_that_end_with_their_connection_are_read(scripted, make_plan, generate, version):
    """As servers of HTTP/1.0 send them, and many in Python: only [DONE] tells whether they were cut."""
    top = f"HTTP/{version} %s\r\nContent-Type: text/event-stream\r\n\r\n".encode()
    event = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'

    async def answer(body, writer, number):
        if body["prompt"] == "p2":
            writer.write(top % b"503 Busy" + b"come back later")
        else:
            writer.write(top % b"200 OK" + event)
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.write(event + (b"" if body["prompt"] == "p1" else b"data: [DONE]\n\n"))
        await writer.drain()
        writer.close()

    events = generate(make_plan(scripted(answer), 4, concurrency=1))
    assert [each.error for each in events.requests] == [
        None,
        "the server closed the connection before [DONE]",
        "status 503: come back later",
        None,
    ]
    whole = events.requests[3]
    assert whole.completed
    assert whole.characters == [1, 1]
    assert whole.sent < whole.headers <= whole.first_byte < whole.chunks[1] <= whole.end


def test_an_idle_connection_that_was_closed_is_opened_again(scripted, make_plan, generate):
    async def answer(body, writer, number):
        await three_parts(body, writer, number)
        if body["prompt"] == "p0":
            await writer.drain()
            writer.close()

    events = generate(make_plan(scripted(answer), 2))
    assert [each.error for each in events.requests] == [None, None]


def test_several_servers_take_requests_in_turn(scripted, make_plan, generate):
    taken = [], []

    def of(number):
        async def answer(body, writer, _):
            taken[number].append(body["prompt"])
            await three_parts(body, writer, _)

        return scripted(answer)

    first, second = of(0), of(1)
    events = generate(make_plan(first, 5, further_urls=[second]))
    assert taken == (["p0", "p2", "p4"], ["p1", "p3"])
    assert [each.server for each in events.requests] == [0, 1, 0, 1, 0]
    assert [each.error for each in events.requests] == [None] * 5
    assert events.head.target == f"{first},{second}"
    turns = [
        TrafficRequest(prompt=f"s{session}t{turn}", prompt_tokens=1, max_tokens=2, session=session, turn=turn)
        for session in (0, 1)
        for turn in (0, 1)
    ]
    for each in taken:
        each.clear()
    generate(make_plan(first, turns, further_urls=[second]))
    assert [[prompt.split()[0][:2] for prompt in each] for each in taken] == [["s0", "s0"], ["s1", "s1"]]


def test_nobody_listens(make_plan, generate):
    events = generate(make_plan("http://127.0.0.1:9/v1", 2))
    assert all(each.error.startswith("no connection") and each.status == 0 for each in events.requests)


def test_turns_send_what_was_said_before(scripted, make_plan, generate):
    bodies = []

    async def answer(body, writer, number):
        bodies.append(body)
        writer.write(STREAM)
        writer.write(piece(b'data: {"choices": [{"delta": {"content": "yes"}}]}\n\n') + end())

    turns = [
        TrafficRequest(prompt=f"s{session}t{turn}", prompt_tokens=1, max_tokens=2, session=session, turn=turn)
        for session in (0, 1)
        for turn in (0, 1)
    ]
    events = generate(make_plan(scripted(answer), turns, route="chat"))
    assert [body["messages"] for body in bodies[:2]] == [
        [{"role": "user", "content": "s0t0"}],
        [
            {"role": "user", "content": "s0t0"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "s0t1"},
        ],
    ]
    assert [each.request for each in events.requests] == [0, 1, 2, 3]
    assert events.requests[1].scheduled >= events.requests[0].end


def test_a_conversation_ends_with_a_turn_that_fails(scripted, make_plan, generate):
    async def refuse(body, writer, number):
        writer.write(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n")

    turns = [TrafficRequest(prompt="x", prompt_tokens=1, max_tokens=2, session=0, turn=turn) for turn in (0, 1, 2)]
    assert len(generate(make_plan(scripted(refuse), turns)).requests) == 1


@pytest.mark.parametrize("arrivals", ["closed", "constant", "batch"])
def test_probes_are_mixed_in_and_keep_their_text(scripted, make_plan, generate, arrivals):
    async def echo(body, writer, number):
        writer.write(STREAM + part(body["prompt"].upper()) + end())

    probes = [Probe("one", 5), Probe("two", 5)]
    plan = make_plan(scripted(echo), 8, arrivals=arrivals, rate=200.0, probes=probes, probe_every=3)
    events = generate(plan)
    probed = [(each.request, each.text) for each in events.requests if each.probe]
    assert probed == [(0, "ONE"), (1, "TWO"), (0, "ONE")]
    assert [each.request for each in events.requests if not each.probe] == list(range(8))
    assert all(each.text is None for each in events.requests if not each.probe)


def test_traffic_begins_again_where_it_ends(scripted, make_plan, generate):
    plan = msgspec.structs.replace(make_plan(scripted(three_parts), 3), first=2, requests=4)
    assert [each.request for each in generate(plan).requests] == [2, 0, 1, 2]
