"""What an engine that is up, and computes nothing, is seen by; and the token that an idle one is asked for."""

import asyncio
import os
import signal
import socket
import threading

import pytest
from engine_streams import collect, until

from roofline.engine.params import SamplingParams
from roofline.engine.process import watchdog
from roofline.engine.process.main import Channel
from roofline.engine.process.messages import Close, EngineSpec, Pong, Ready, StepReport
from roofline.engine.process.remote import RemoteEngine
from roofline.engine.process.watchdog import Stall
from roofline.engine.stats import EngineStats

NEVER = 1e9
GREEDY = SamplingParams(temperature=0, max_tokens=20)


def run(test, worker=None, ping_seconds=600.0, **options):
    """Run an async test with a started engine, closed afterwards."""

    async def body():
        spec = EngineSpec(source="toy", options=options, factory="engine_fakes:load_fake")
        engine = RemoteEngine(spec, worker=worker, backoff=0.01, ping_seconds=ping_seconds)
        await engine.start()
        try:
            async with asyncio.timeout(60):
                await test(engine)
        finally:
            await engine.close()

    asyncio.run(body())


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(watchdog, "time", self)

    def monotonic(self):
        return self.now


def test_time_counts_from_the_first_question_without_an_answer(monkeypatch):
    clock, stall = Clock(monkeypatch), Stall()

    def seconds_after(pause):
        clock.now += pause
        return stall.seconds

    assert seconds_after(50.0) == 0, "nothing waits"
    stall.asked()
    assert seconds_after(3.0) == 3
    stall.asked()
    assert seconds_after(2.0) == 5, "a second one waits no longer than the first"
    stall.computed()
    assert seconds_after(4.0) == 4, "the rest waits since that step"
    stall.settled()
    assert seconds_after(50.0) == 0
    stall.computed()
    assert seconds_after(50.0) == 0


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.usefixtures("fakes_everywhere")
def test_an_engine_that_is_stopped_within_an_answer_is_in_trouble_until_it_goes_on():
    async def test(engine):
        stream = await engine.submit([1], SamplingParams(max_tokens=400))
        await anext(stream)
        os.kill(engine.pid, signal.SIGSTOP)
        try:
            await until(lambda: engine.trouble(0.3) is not None)
            assert "computed nothing for 0 s while 1 requests wait" in engine.trouble(0.3)
            assert engine.trouble(NEVER) is None
            assert engine.ready, "it is not the watchdog that says so"
        finally:
            os.kill(engine.pid, signal.SIGCONT)
        await collect(stream)
        assert engine.trouble(0.0) is None

    run(test, step_seconds=0.005)


@pytest.mark.e2e
@pytest.mark.usefixtures("fakes_everywhere")
def test_an_idle_engine_is_asked_for_a_token_and_its_silence_is_seen():
    async def test(engine):
        engine.prove(NEVER)  # it has only just started
        assert not engine._canary.runs
        os.kill(engine.pid, signal.SIGSTOP)
        try:
            assert engine.trouble(0.0) is None, "nobody can know yet"
            engine.prove(0.0)
            engine.prove(0.0)
            assert engine._canary.runs
            await until(lambda: engine.trouble(0.3) is not None)
            assert "while it was asked for a sign of life" in engine.trouble(0.3)
        finally:
            os.kill(engine.pid, signal.SIGCONT)
        await until(lambda: engine.trouble(0.0) is None)
        assert engine.last_token_at is not None
        assert (engine.stats().requests, engine.stats().generated_tokens) == (1, 1)
        engine.prove(NEVER)
        assert not engine._canary.runs, "a token was computed lately"
        stream = await engine.submit([1], GREEDY)
        engine.prove(0.0)
        assert not engine._canary.runs, "something runs, which proves as much"
        await collect(stream)

    run(test)


@pytest.mark.e2e
@pytest.mark.usefixtures("fakes_everywhere")
def test_a_token_that_could_not_be_computed_is_trouble_until_one_is():
    async def test(engine):
        engine.prove(0.0)
        await until(lambda: engine.trouble(NEVER) is not None)
        assert "could not compute a token: RuntimeError: the toy was told to fail" in engine.trouble(NEVER)
        await collect(await engine.submit([1], GREEDY))
        assert engine.trouble(NEVER) is None

    run(test, fail_at=[1])


class Polite:
    """A worker that sends Pongs and Reports all the time, tells of a step when `step` is set, and computes nothing."""

    pid = None

    def __init__(self):
        self.step = threading.Event()

    def spawn(self):
        ours, theirs = socket.socketpair()
        threading.Thread(target=self._work, args=(theirs,), daemon=True).start()
        return ours

    def _work(self, sock):
        with sock:
            channel, steps = Channel(sock), 0
            channel.send(Ready("toy", 50, 512, "fake", 64, 1024, 0.1, 7, exact=True))
            while not channel.closed:
                if any(isinstance(message, Close) for message in channel.receive(wait=True, seconds=0.01)):
                    return
                channel.send(Pong())
                channel.send(StepReport([], EngineStats(steps=steps)))
                if self.step.is_set():
                    self.step.clear()
                    steps += 1
                    channel.send(StepReport([], EngineStats(steps=steps)))

    def kill(self):
        """The closed socket ends it."""

    def end(self):
        return None


def test_answers_to_pings_and_reports_without_a_step_are_no_progress():
    worker = Polite()

    async def test(engine):
        engine._stall.asked()  # as by a ping
        await until(lambda: engine.trouble(0.0) is None)  # which is answered, and nothing else waits
        await engine.submit([1], GREEDY)
        await until(lambda: engine.trouble(0.3) is not None)
        while engine.trouble(0.3) is not None:
            worker.step.set()
            await asyncio.sleep(0.01)

    run(test, worker=worker)
