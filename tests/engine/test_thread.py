"""The engine in a thread of this process, through the interface of the one in a process of its own."""

import asyncio
from dataclasses import replace

import pytest
from engine_fakes import FakeExecutable

from roofline.common.errors import RequestError
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.engine.process.thread import engine_in_thread

GREEDY = SamplingParams(temperature=0, max_tokens=20)


def run(test, engine=None):
    """Run an async test with a started engine, closed afterwards; the LocalEngine it had."""
    local = engine or LocalEngine(FakeExecutable())

    async def body():
        threaded = engine_in_thread("toy", local)
        async with asyncio.timeout(30):
            described = await threaded.start()
            try:
                await test(threaded, described)
            finally:
                await threaded.close()

    asyncio.run(body())
    return local


async def ids_of(stream):
    return [token async for event in stream for token in event.ids]


def test_the_same_ids_as_without_a_thread_also_beside_others():
    alone = LocalEngine(FakeExecutable())
    wanted = []
    for prompt in ([1, 2, 3], [4]):
        alone.submit(prompt, GREEDY)
        wanted.append([token for _ in range(40) for event in alone.step() for token in event.ids])

    async def test(engine, described):
        assert described.name == "toy"
        streams = [await engine.submit(prompt, GREEDY) for prompt in ([1, 2, 3], [4])]
        assert await asyncio.gather(*map(ids_of, streams)) == wanted

    local = run(test)
    assert not local.has_work
    local.submit([1], GREEDY)  # it is left usable
    assert local.step()


def test_a_request_that_is_left_is_aborted_and_closing_aborts_the_rest():
    async def test(engine, _):
        endless = SamplingParams(temperature=0, max_tokens=4000)
        left = await engine.submit([1], endless)
        await anext(left)
        await left.aclose()
        while engine.stats().running:  # each report brings the counters
            await asyncio.sleep(0.01)
        await engine.submit([2], endless)

    local = run(test, LocalEngine(FakeExecutable(num_pages=1000, max_context=8000)))
    assert not local.state.running
    assert not local.has_work


def test_a_lost_device_ends_all_requests_with_what_is_known(caplog):
    async def test(engine, _):
        events = [event async for event in await engine.submit([1], replace(GREEDY, n=2))]
        for index in range(2):
            last = [event for event in events if event.index == index][-1]
            assert "the toy has no device" in last.error

    executable = FakeExecutable()
    executable.lose_at = {4}
    run(test, LocalEngine(executable))
    assert not [record for record in caplog.records if record.exc_info], "the line of the loss is enough"


def test_a_thread_that_dies_takes_its_requests_with_it_and_is_not_started_again(monkeypatch):
    local = LocalEngine(FakeExecutable())

    async def test(engine, _):
        def broken():
            raise RuntimeError("broken")

        monkeypatch.setattr(local, "step", broken)
        stream = await engine.submit([1], GREEDY)
        events = [event async for event in stream]
        assert events[-1].finish_reason == "error"
        with pytest.raises(RequestError, match="died"):
            await engine.submit([1], GREEDY)
        assert not engine.ready
        assert engine.restarts == 0

    run(test, local)
