"""A real engine process with the toy executable: streams, refusals, aborts, and every way to die."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from engine_streams import collect, local, until

from roofline.common.errors import CapacityError, ConfigError, RequestError, RooflineError
from roofline.engine.config import EngineConfig
from roofline.engine.params import SamplingParams
from roofline.engine.process import remote
from roofline.engine.process.messages import EngineSpec, Report
from roofline.engine.process.remote import RemoteEngine

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("fakes_everywhere")]
GREEDY = SamplingParams(temperature=0, max_tokens=20)


def spec(source="toy", config=None, **options):
    return EngineSpec(source=source, options=options, config=config or EngineConfig(), factory="engine_fakes:load_fake")


def run(test, engine_spec=None, **settings):
    """Run an async test with a started engine, closed afterwards."""

    async def body():
        engine = RemoteEngine(engine_spec or spec(), backoff=0.01, **settings)
        await engine.start()
        try:
            async with asyncio.timeout(60):
                await test(engine)
        finally:
            await engine.close()

    asyncio.run(body())


def test_the_same_ids_as_in_this_process_and_the_model_is_described():
    requests = [([i, 2, 3] * (i + 1), SamplingParams(seed=i, max_tokens=9, n=1 + i % 2)) for i in range(8)]

    async def test(engine):
        assert engine.ready
        description = engine.description
        assert (description.name, description.vocab_size, description.max_model_len) == ("toy", 50, 512)
        assert (description.fingerprint, description.num_pages, description.page_bytes) == ("fake", 64, 1024)
        assert description.pid == engine.pid
        assert description.exact
        streams = [await engine.submit(ids, params) for ids, params in requests]
        results = await asyncio.gather(*[collect(stream) for stream in streams])
        assert [ids for ids, _ in results] == local(requests)
        assert all(e.finish_reason == "length" for _, last in results for e in last.values())
        assert engine.stats().pages_used == 0
        assert engine.stats().generated_tokens == sum(9 * p.n for _, p in requests)

    run(test)


def test_each_step_is_one_report(monkeypatch):
    seen, read = [], remote._read

    async def recorded(reader):
        seen.append(await read(reader))
        return seen[-1]

    async def test(engine):
        await collect(await engine.submit([1], GREEDY))
        reports = [message for message in seen if isinstance(message, Report)]
        assert sum(len(e.ids) for report in reports for e in report.events) == 20
        assert reports[-1].stats.steps == len(reports), "one message a step"

    monkeypatch.setattr(remote, "_read", recorded)
    run(test)


def test_refusals_come_back_at_once():
    async def test(engine):
        with pytest.raises(CapacityError, match="513 tokens, 512 are available"):
            await engine.submit([1] * 500, SamplingParams(max_tokens=13))
        with pytest.raises(RequestError) as caught:
            await engine.submit([50])
        assert caught.value.param == "prompt"
        await engine.submit([1], GREEDY, request_id="a")
        with pytest.raises(RequestError, match="in use"):
            await engine.submit([1], GREEDY, request_id="a")

    run(test)


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        ("config error", ConfigError, "toy.gguf: field x is wrong"),
        ("capacity error", CapacityError, "needs 3 pages, 2 are available"),
        ("other error", RooflineError, "ZeroDivisionError: division by zero"),
        ("exit", RooflineError, "died while loading"),
    ],
)
def test_errors_of_loading_arrive_as_what_they_are(source, kind, message):
    async def body():
        engine = RemoteEngine(spec(source))
        with pytest.raises(kind, match=message):
            await engine.start()
        assert not engine.ready
        with pytest.raises(RequestError) as caught:
            await engine.submit([1])
        assert caught.value.status == 503
        await engine.close()

    asyncio.run(body())


def test_an_abort_holds_within_one_step_and_frees_everything():
    async def test(engine):
        endless = SamplingParams(max_tokens=400)
        first, second, waiting = [await engine.submit([i] * 40, endless) for i in (1, 2, 3)]
        other = await engine.submit([4] * 40, SamplingParams(max_tokens=30))
        await anext(first)
        await first.aclose()
        assert [e async for e in first] == [], "a closed stream is over"
        second.abort()
        _, last = await collect(second)
        assert last[0].finish_reason == "abort"
        waiting.abort()
        steps = engine.stats().steps
        _, last = await collect(waiting)
        assert last[0].finish_reason == "abort"
        assert engine.stats().steps <= steps + 2, "the step that was running, and the one that tells"
        _, last = await collect(other)
        assert last[0].finish_reason == "length"
        assert engine.stats().pages_used == 0
        assert engine.stats().running == engine.stats().waiting == 0

    run(test, spec(config=EngineConfig(max_running=3), step_seconds=0.01))


def test_one_answer_of_several_can_be_aborted():
    async def test(engine):
        stream = await engine.submit([1] * 20, SamplingParams(n=2, max_tokens=30))
        await anext(stream)
        stream.abort(index=1)
        _, last = await collect(stream)
        assert {index: event.finish_reason for index, event in last.items()} == {0: "length", 1: "abort"}

    run(test, spec(step_seconds=0.01))


def test_killing_the_process_gives_one_error_an_answer_and_a_fresh_engine():
    async def test(engine):
        streams = [await engine.submit([i] * 4, SamplingParams(max_tokens=400, n=2)) for i in range(3)]
        for stream in streams:
            await anext(stream)
        old = engine.pid
        os.kill(old, signal.SIGKILL)
        for _, last in await asyncio.gather(*[collect(stream) for stream in streams]):
            assert {e.index: e.finish_reason for e in last.values()} == {0: "error", 1: "error"}
            assert "the engine process died (exit status -9)" in last[0].error
        assert not engine.ready
        # A request in the meantime waits for the fresh process.
        ids, _ = await collect(await engine.submit([1, 2, 3], GREEDY))
        assert ids == local([([1, 2, 3], GREEDY)])[0]
        assert engine.pid != old
        assert engine.restarts == 1

    run(test, spec(step_seconds=0.005))


def test_a_process_that_keeps_dying_is_given_up():
    async def test(engine):
        for _ in range(3):
            _, last = await collect(await engine.submit([13], GREEDY))
            assert last[0].finish_reason == "error"
        with pytest.raises(RequestError, match="given up after 2 restarts") as caught:
            await engine.submit([1], GREEDY)
        assert (caught.value.status, caught.value.code) == (503, "engine_unavailable")
        assert engine.restarts == 2

    run(test, spec(die_on_id=13), max_restarts=2)


def test_dying_while_loading_again_is_given_up_too(tmp_path):
    async def test(engine):
        (tmp_path / "gone").touch()
        stream = await engine.submit([1], SamplingParams(max_tokens=400))
        os.kill(engine.pid, signal.SIGKILL)
        await collect(stream)
        with pytest.raises(RequestError, match="could not be loaded again"):
            await engine.submit([1], GREEDY)

    run(test, spec(fail_if=str(tmp_path / "gone"), step_seconds=0.01), max_restarts=2)


def test_a_failing_step_is_contained_in_the_process():
    async def test(engine):
        _, last = await collect(await engine.submit([1], GREEDY))
        assert "told to fail" in last[0].error
        _, last = await collect(await engine.submit([1], GREEDY))
        assert last[0].finish_reason == "length"
        assert engine.restarts == 0

    run(test, spec(fail_at=[3]))


def test_closing_ends_open_streams_and_the_process():
    async def body():
        engine = RemoteEngine(spec(step_seconds=0.01))
        await engine.start()
        stream = await engine.submit([1], SamplingParams(max_tokens=400))
        await anext(stream)
        process = engine._worker._process
        await engine.close()
        _, last = await collect(stream)
        assert last[0].finish_reason == "abort"
        assert process.returncode == 0
        with pytest.raises(RequestError, match="closed"):
            await engine.submit([1])
        await engine.close()

    asyncio.run(body())


def test_closing_while_loading_kills_the_process_and_ends_start():
    async def body():
        engine = RemoteEngine(spec("slow"))
        starting = asyncio.create_task(engine.start())
        await until(lambda: engine.pid is not None)
        process = engine._worker._process
        await engine.close()
        assert process.returncode == -9
        with pytest.raises(RooflineError, match="closed"):
            await starting

    asyncio.run(body())


def test_an_idle_process_burns_no_cpu():
    async def test(engine):
        await collect(await engine.submit([1], GREEDY))

        def cpu_ticks():
            fields = Path(f"/proc/{engine.pid}/stat").read_text().rpartition(")")[2].split()
            return int(fields[11]) + int(fields[12])

        async def idles():
            before = cpu_ticks()
            await asyncio.sleep(0.5)
            return cpu_ticks() - before <= 1  # hundredths of a second

        # The first half second may end what the request began: threads of numpy's BLAS wait spinning for more work.
        assert any([await idles() for _ in range(3)])

    run(test)


@pytest.mark.parametrize("step_seconds", [0.0, 30.0])
def test_the_process_ends_with_its_parent_even_within_a_step(step_seconds):
    program = f"""
        import asyncio, os
        from roofline.engine.process.messages import EngineSpec
        from roofline.engine.params import SamplingParams
        from roofline.engine.process.remote import RemoteEngine
        async def main():
            options = {{"step_seconds": {step_seconds}}}
            spec = EngineSpec(source="toy", options=options, factory="engine_fakes:load_fake")
            engine = RemoteEngine(spec)
            await engine.start()
            await engine.submit([1], SamplingParams(max_tokens=100))
            await asyncio.sleep(0.2)
            print(engine.pid, flush=True)
            os.kill(os.getpid(), 9)
        asyncio.run(main())
    """
    parent = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, timeout=60, check=False
    )
    assert parent.returncode == -9
    pid, end = int(parent.stdout), time.monotonic() + 10

    def gone():
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    while not gone():
        assert time.monotonic() < end, "the engine outlived its parent"
        time.sleep(0.02)


def test_the_engine_process_imports_neither_web_nor_torch():
    program = "import sys, roofline.engine.process.main; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    packages = {name.partition(".")[0] for name in out}
    assert "roofline" in packages
    assert not packages & {"torch", "fastapi", "starlette", "uvicorn", "httpx", "pydantic", "transformers", "asyncio"}


def test_a_broken_stream_ends_the_process_with_a_reason():
    import socket

    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "roofline.engine.process.main", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
        )
        ours.sendall(b"\x05\0\0\0junk!")
        _, error = process.communicate(timeout=20)
    assert process.returncode == 1
    assert b"the stream from the owner is broken" in error
