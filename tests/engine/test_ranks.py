"""An engine process whose model several ranks run: when one is lost, the process and all ranks start anew."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from roofline.engine.events import Event
from roofline.engine.params import SamplingParams
from roofline.engine.process.messages import EngineSpec
from roofline.engine.process.remote import RemoteEngine

pytest.importorskip("torch", reason="the reference is written in torch")


def children(pid: int) -> list[int]:
    """The ranks that a process has started, from whichever thread."""
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]


async def answer(engine: RemoteEngine) -> list[Event]:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    return [event async for event in await engine.submit([5, 17], params)]


async def lose_a_rank(spec: EngineSpec, number: signal.Signals, reason: str) -> None:
    engine = RemoteEngine(spec)
    await engine.start()
    try:
        first = await answer(engine)
        assert [event.error for event in first] == [None] * 3
        assert engine.pid is not None
        (other,) = children(engine.pid)
        os.kill(other, number)
        asking = asyncio.create_task(answer(engine))
        async with asyncio.timeout(120):
            while engine.problem is None:
                await asyncio.sleep(0.001)
        assert f"rank 1 of 2 ended ({reason}" in engine.problem
        again = await asking  # of the fresh process
        assert [event.ids for event in again] == [event.ids for event in first]
        assert engine.restarts == 1
        assert children(engine.pid) != [other]
    finally:
        await engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "SIGKILL: "), (signal.SIGSTOP, "it was stopped by a signal")]
)
def test_a_lost_rank_costs_a_restart_and_a_line(
    number: signal.Signals, reason: str, tmp_path: Path, tiny_llama: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_llama))
    options = {"backend": "reference", "weights": "random:7", "cache_tokens": 64, "max_running": 2, "text": False}
    spec = EngineSpec(source=str(tmp_path), options={**options, "threads": 2, "tensor_parallel": 2})
    asyncio.run(lose_a_rank(spec, number, reason))
    told = capfd.readouterr().err
    assert "Traceback" not in told
    assert "leaked" not in told, "by nanobind"
