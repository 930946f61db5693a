"""How often, and after which pauses, an engine that dies is started again."""

import asyncio
import contextlib
import os
import signal
import socket
import threading

import pytest
from engine_streams import collect

from roofline.engine.events import Event
from roofline.engine.params import SamplingParams
from roofline.engine.process.messages import EngineSpec, LoadRefused, Ready, StepReport, frame
from roofline.engine.process.remote import RemoteEngine
from roofline.engine.process.stream import EVENTS_AT_ONCE, incoming
from roofline.engine.stats import EngineStats


class Lives:
    """A worker whose engines say what they are told to, one list of messages a life, and die."""

    pid = None

    def __init__(self, *lives):
        self.lives = list(lives)

    def spawn(self):
        ours, theirs = socket.socketpair()
        with theirs:
            for message in self.lives.pop(0):
                theirs.sendall(message if isinstance(message, bytes) else frame(message))
        return ours

    def kill(self):
        """It is dead already."""

    def end(self):
        return None


PING_SECONDS = 7.0
READY = Ready("toy", 50, 512, "fake", 64, 1024, 0.1, 7, exact=True)
TOKEN = StepReport([Event("a", 0, [1])], EngineStats(steps=1))
NO_TOKEN = StepReport([Event("a", 0, [])], EngineStats(steps=1))


@pytest.mark.parametrize(
    ("lives", "pauses", "failure"),
    [
        ([[READY]] * 6, [0.2, 0.4, 0.8, 1.0, 1.0], "given up after 5 restarts"),
        ([[READY, NO_TOKEN]] * 6, [0.2, 0.4, 0.8, 1.0, 1.0], "given up after 5 restarts"),
        # A token begins the count anew; it is one failure still.
        ([*[[READY]] * 2, [READY, TOKEN], *[[READY]] * 5], [0.2, 0.4, 0.2, 0.4, 0.8, 1.0, 1.0], "given up after 5"),
        ([[READY, TOKEN, b"\x01\0\0\0x"], *[[READY]] * 5], [0.2, 0.4, 0.8, 1.0, 1.0], "given up after 5"),
        ([[READY], *[[]] * 5], [0.2, 0.4, 0.8, 1.0, 1.0], "died while loading"),
        ([[READY], *[[LoadRefused("ConfigError", ["wrong"])]] * 5], [0.2, 0.4, 0.8, 1.0, 1.0], "again: wrong"),
    ],
)
def test_each_restart_without_a_token_waits_twice_as_long_up_to_a_second(monkeypatch, lives, pauses, failure):
    waits, sleep = [], asyncio.sleep

    async def pause(seconds):
        if seconds == PING_SECONDS:  # of who looks whether the process answers
            return await sleep(seconds)
        waits.append(seconds)
        await sleep(0)

    async def body():
        engine = RemoteEngine(EngineSpec(source="toy"), worker=Lives(*lives), max_restarts=5, ping_seconds=PING_SECONDS)
        monkeypatch.setattr(asyncio, "sleep", pause)
        await engine.start()
        async with asyncio.timeout(10):
            await engine._supervisor
        assert waits == pytest.approx(pauses)
        assert engine.restarts == len(pauses)
        assert failure in engine.failure
        assert not engine.ready
        await engine.close()

    asyncio.run(body())


@pytest.mark.e2e
@pytest.mark.usefixtures("fakes_everywhere")
def test_signals_to_the_whole_group_are_for_the_owner():
    async def body():
        spec = EngineSpec(source="toy", options={"step_seconds": 0.005}, factory="engine_fakes:load_fake")
        engine = RemoteEngine(spec)
        await engine.start()
        stream = await engine.submit([1, 2, 3], SamplingParams(max_tokens=20))
        await anext(stream)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(engine.pid, number)
        _, last = await collect(stream)
        assert (last[0].finish_reason, engine.restarts) == ("length", 0)
        await engine.close()

    asyncio.run(body())


def test_requests_wait_for_an_engine_that_is_not_ready():
    async def run():
        engine = RemoteEngine(EngineSpec(source="toy", options={}), worker=Lives())
        waiting = asyncio.create_task(engine.settled())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        engine._give_up("it cannot be loaded")
        await asyncio.wait_for(waiting, 10)

    asyncio.run(run())


def test_a_restart_waits_for_no_thread_that_requests_keep_busy():
    """All threads of the loop are taken by work that goes on until the engine is back."""

    async def body():
        loop, over = asyncio.get_running_loop(), threading.Event()
        busy = [loop.run_in_executor(None, over.wait, 20) for _ in range(64)]
        try:
            engine = RemoteEngine(EngineSpec(source="toy"), worker=Lives([READY], [READY]), max_restarts=1, backoff=0)
            await engine.start()
            async with asyncio.timeout(15):
                await engine._supervisor
            assert engine.restarts == 1
        finally:
            over.set()
            await asyncio.gather(*busy)

    asyncio.run(body())


def test_events_beyond_a_turn_stay_with_the_engine():
    """Whoever waits for events is not behind by more than a turn's, however many have arrived."""
    reports = [StepReport([Event("a", index, [1]) for index in range(8)], EngineStats()) for _ in range(EVENTS_AT_ONCE)]

    async def body():
        reader = asyncio.StreamReader()
        reader.feed_data(b"".join(map(frame, reports)))
        reader.feed_eof()
        taken = turns = most = 0

        async def other():
            nonlocal taken, most
            while True:
                most, taken = max(most, taken), 0
                await asyncio.sleep(0)

        watching = asyncio.create_task(other())
        with contextlib.suppress(asyncio.IncompleteReadError):
            async for report in incoming(reader):
                taken += len(report.events)
                turns += 1
        watching.cancel()
        assert turns == EVENTS_AT_ONCE
        assert most <= EVENTS_AT_ONCE

    asyncio.run(body())
