"""Comments in streams that are silent, so that nothing on the way takes them for dead."""

import asyncio
import json
import selectors

import httpx

from roofline.server.response import PING, CancelledWithClient, KeptAlive

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True}


class InstantSelector(selectors.DefaultSelector):
    """For a loop in which nobody waits: time is what its timers ask for."""

    now = 0.0

    def select(self, timeout=None):
        self.now += timeout or 0.0
        return super().select(0)


def bodies(seconds, chunks):
    """(time, bytes) of what a KeptAlive sends of `chunks`, with a silence of one second after each."""
    selector, sent = InstantSelector(), []

    def instant_loop():
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = lambda: selector.now
        return loop

    async def send(message):
        sent.append((selector.now, message["body"]))

    async def run():
        stream = KeptAlive(send, seconds)
        for chunk in chunks:
            await stream.send(chunk)
            await asyncio.sleep(1.0)
        stream.stop()
        await asyncio.sleep(5.0)

    with asyncio.Runner(loop_factory=instant_loop) as runner:
        runner.run(run())
    return sent


def test_a_ping_comes_after_so_much_silence_and_again_after_as_much():
    assert bodies(0.375, [b"a"]) == [(0, b"a"), (0.375, PING), (0.75, PING)]
    assert bodies(0.625, [b"a", b"b"]) == [(0, b"a"), (0.625, PING), (1, b"b"), (1.625, PING)], "counted from the last"


def test_an_empty_chunk_sends_nothing_and_starts_the_count():
    assert bodies(0.5, [b""]) == [(0.5, PING)]


def test_what_speaks_often_enough_says_nothing_else_and_0_is_never():
    assert bodies(1.5, [b"a", b"b", b"c"]) == [(0, b"a"), (1, b"b"), (2, b"c")]
    assert bodies(0, [b"a"]) == [(0, b"a")]


def test_a_stream_that_waits_for_its_first_token_has_headers_and_pings(live, engine):
    engine.gate.clear()
    address = live(ping_seconds=0.02)
    pieces = []
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=CHAT, timeout=30) as answer:
        for line in answer.iter_lines():
            pieces.append(line)
            if pieces.count(": ping") == 2:
                engine.gate.set()
    events = [json.loads(line[6:]) for line in pieces if line.startswith("data: {")]
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert (pieces[0], text, pieces[-2]) == (": ping", "Hello, world.", "data: [DONE]")


def test_other_streams_have_no_comments():
    def seconds_of(kind):
        return CancelledWithClient(None, chunks=iter, media_type=kind, ping_seconds=3.0)._ping_seconds

    assert [seconds_of(kind) for kind in ("text/event-stream", "application/x-ndjson")] == [3.0, 0.0]
