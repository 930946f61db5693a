"""What tests of engines behind streams share."""

import asyncio
import time

from engine_fakes import FakeExecutable

from roofline.engine.local import LocalEngine


async def collect(stream):
    ids, last = {}, {}
    async for event in stream:
        assert event.index not in last, "an event after the last"
        ids.setdefault(event.index, []).extend(event.ids)
        if event.finish_reason:
            last[event.index] = event
    return ids, last


async def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.005)


def local(requests):
    engine = LocalEngine(FakeExecutable())
    for i, (ids, params) in enumerate(requests):
        engine.submit(ids, params, request_id=str(i))
    outputs = {}
    while engine.has_work:
        for event in engine.step():
            outputs.setdefault(event.request_id, {}).setdefault(event.index, []).extend(event.ids)
    return [outputs[str(i)] for i in range(len(requests))]
