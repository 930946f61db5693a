"""A real engine process with the toy executable: streams, refusals, aborts, and every way to die."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_fakes import SpellingTokenizer
from engine_streams import collect, local, until

from roofline.common.errors import CapacityError, ConfigError, RequestError, RooflineError
from roofline.engine.config import EngineConfig
from roofline.engine.params import SamplingParams
from roofline.engine.process import messages, remote
from roofline.engine.process.messages import EngineSpec, StepReport
from roofline.engine.process.remote import RemoteEngine
from roofline.engine.process.watchdog import BUSY_TICKS, IDLE_TICKS, Watchdog, tree_time

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
    began = time.perf_counter()

    async def test(engine):
        assert engine.ready
        description = engine.description
        assert (description.name, description.vocab_size, description.max_model_len) == ("toy", 50, 512)
        assert (description.fingerprint, description.num_pages, description.page_bytes) == ("fake", 64, 1024)
        assert description.pid == engine.pid
        assert description.exact
        assert 0 < description.load_seconds < time.perf_counter() - began
        streams = [await engine.submit(ids, params) for ids, params in requests]
        results = await asyncio.gather(*[collect(stream) for stream in streams])
        assert [ids for ids, _ in results] == local(requests)
        assert all(e.finish_reason == "length" for _, last in results for e in last.values())
        assert engine.stats().pages_used == 0
        assert engine.stats().generated_tokens == sum(9 * p.n for _, p in requests)

    run(test)


def test_each_step_is_one_report(monkeypatch):
    seen, read = [], remote.messages.read

    async def recorded(reader):
        seen.append(await read(reader))
        return seen[-1]

    async def test(engine):
        await collect(await engine.submit([1], GREEDY))
        reports = [message for message in seen if isinstance(message, StepReport)]
        assert sum(len(e.ids) for report in reports for e in report.events) == 20
        assert reports[-1].stats.steps == len(reports), "one message a step"

    monkeypatch.setattr(remote.messages, "read", recorded)
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
    waited = []  # steps until each abort was told

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
        waited.append(engine.stats().steps - steps)
        _, last = await collect(other)
        assert last[0].finish_reason == "length"
        assert engine.stats().pages_used == 0
        assert engine.stats().running == engine.stats().waiting == 0

    # The step that was running, and the one that tells; where this process did not run meanwhile, more were made.
    for _ in range(5):
        run(test, spec(config=EngineConfig(max_running=3), step_seconds=0.01))
        if waited[-1] <= 2:
            return
    raise AssertionError(waited)


def test_one_answer_of_several_can_be_aborted():
    async def test(engine):
        stream = await engine.submit([1] * 20, SamplingParams(n=2, max_tokens=30))
        await anext(stream)
        stream.abort(index=1)
        _, last = await collect(stream)
        assert {index: event.finish_reason for index, event in last.items()} == {0: "length", 1: "abort"}

    run(test, spec(step_seconds=0.01))


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        pytest.param(signal.SIGKILL, "out of memory", marks=pytest.mark.slow),
        (signal.SIGBUS, "a file that it had mapped was truncated"),
    ],
)
def test_streams_of_a_killed_process_go_on_in_a_fresh_one(number, cause, caplog):
    requests = [([i] * 4, SamplingParams(seed=i, max_tokens=150, n=2, logprobs=2)) for i in range(3)]

    async def test(engine):
        streams = [await engine.submit(ids, params) for ids, params in requests]
        firsts = [await anext(stream) for stream in streams]
        old = engine.pid
        os.kill(old, number)
        await until(lambda: engine.problem is not None)
        assert not engine.ready
        assert f"the engine process died ({number.name}: " in engine.problem
        assert cause in engine.problem
        # A request in the meantime waits for the fresh process.
        ids, _ = await collect(await engine.submit([1, 2, 3], GREEDY))
        assert ids == local([([1, 2, 3], GREEDY)])[0]
        for first, stream, solo in zip(firsts, streams, local(requests), strict=True):
            events = [first, *[event async for event in stream]]
            for index in range(2):
                mine = [event for event in events if event.index == index]
                assert [token for event in mine for token in event.ids] == solo[index]
                assert [entry.id for event in mine for entry in event.logprobs or ()] == solo[index]
                assert [event.finish_reason for event in mine if event.finish_reason] == ["length"]
                assert mine[-1].usage[:2] == (4, 150)
        assert engine.pid != old
        assert (engine.restarts, engine.requests) == (1, {})
        assert engine.stats().pages_used == 0

    run(test, spec(step_seconds=0.002))


def test_what_was_aborted_stays_so_and_what_has_ended_is_not_computed_again():
    # Of its two answers one ends long before the other.
    def answers(params):
        return sorted(local([([5], params)])[0].values(), key=len)

    sampled = [SamplingParams(seed=seed, n=2, max_tokens=60, stop_token_ids=(49,)) for seed in range(200)]
    params = next(each for each in sampled if len(answers(each)[0]) < 9 and len(answers(each)[1]) > 50)

    async def test(engine):
        stream, aborted, left = [await engine.submit([5], params) for _ in range(3)]
        events = []
        while not any(event.finish_reason for event in events):
            events.append(await anext(stream))
        os.kill(engine.pid, signal.SIGSTOP)  # it takes no message any more
        aborted.abort()
        await left.aclose()
        os.kill(engine.pid, signal.SIGKILL)
        _, last = await collect(aborted)
        assert sorted(event.finish_reason for event in last.values()) == ["abort", "stop"]
        usage = next(event.usage for event in last.values() if event.finish_reason == "abort")
        assert 0 < usage.completion_tokens < 60
        events += [event async for event in stream]
        for index in range(2):
            assert [token for event in events if event.index == index for token in event.ids] == solo[index]
        assert sum(engine.stats().finished.values()) == 1, "the rest was not sent again"
        assert (engine.restarts, engine.requests) == (1, {})

    solo = local([([5], params)])[0]
    run(test, spec(step_seconds=0.005))


def test_what_an_engine_has_not_read_is_outstanding_until_a_report_counts_its_end():
    async def test(engine):
        await collect(await engine.submit([1], GREEDY))
        assert engine.outstanding == 0
        reported = engine.stats()
        os.kill(engine.pid, signal.SIGSTOP)  # it takes no message any more
        for prompt in range(3):
            await (await engine.submit([prompt], GREEDY)).aclose()
        assert engine.stats() == reported
        assert engine.outstanding > 0
        os.kill(engine.pid, signal.SIGCONT)
        await until(lambda: not engine.outstanding)
        assert engine.stats().finished == {"length": 1, "abort": 3}
        assert engine.stats().requests == 4

    run(test)


@pytest.mark.slow
def test_one_request_that_kills_processes_ends_with_an_error_and_all_others_with_their_ids():
    requests = [([i, 2, 3] * (1 + i % 4), SamplingParams(seed=i, max_tokens=12, n=1 + i % 2)) for i in range(12)]
    bias = {13: -100.0}  # nobody else says the id that kills
    requests = [(ids, replace(params, logit_bias=bias)) for ids, params in requests]

    async def test(engine):
        streams = [await engine.submit(ids, params) for ids, params in requests[:7]]
        poison = await engine.submit([1, 13], SamplingParams(n=2, max_tokens=12))
        streams += [await engine.submit(ids, params) for ids, params in requests[7:]]
        results = await asyncio.gather(*[collect(stream) for stream in streams])
        assert [ids for ids, _ in results] == local(requests)
        ids, last = await collect(poison)
        assert ids == {0: [], 1: []}
        assert {event.finish_reason for event in last.values()} == {"error"}
        assert "SIGSEGV" in last[0].error
        assert "this request has ended 3 in a row that computed nothing else" in last[0].error
        assert engine.restarts <= 3 + 4 + 3, "twelve are halved four times"
        ids, _ = await collect(await engine.submit([1, 2, 3], GREEDY))
        assert ids == local([([1, 2, 3], GREEDY)])[0]

    run(test, spec(die_on_id=13, die_with="SIGSEGV"), max_restarts=2)


def test_a_process_whose_device_is_lost_is_one_that_died():
    requests = [([i] * 9, SamplingParams(seed=i, max_tokens=20, n=2)) for i in range(3)]

    async def test(engine):
        streams = [await engine.submit(ids, params) for ids, params in requests]
        results = await asyncio.gather(*[collect(stream) for stream in streams])
        assert [ids for ids, _ in results] == local(requests)
        assert engine.restarts >= 2

    run(test, spec(lose_at=[9]))


def test_closing_ends_also_what_no_process_computes():
    async def body():
        engine = RemoteEngine(spec(), backoff=30.0)
        await engine.start()
        stream = await engine.submit([1], SamplingParams(max_tokens=400, n=2))
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: engine.problem is not None and not engine.requests[stream.request_id].sent)
        await engine.close()
        _, last = await collect(stream)
        assert {event.finish_reason for event in last.values()} == {"abort"}

    asyncio.run(body())


def test_a_process_that_can_compute_nothing_is_given_up():
    async def test(engine):
        _, last = await collect(await engine.submit([13], GREEDY))
        assert "given up after 2 restarts" in last[0].error
        with pytest.raises(RequestError, match="given up after 2 restarts") as caught:
            await engine.submit([1], GREEDY)
        assert (caught.value.status, caught.value.code) == (503, "engine_unavailable")
        assert engine.restarts == 2

    run(test, spec(die_on_id=[0, 13]), max_restarts=2)


@pytest.mark.parametrize("broken", ["tree_time", "outlive"])
def test_a_fault_of_the_supervisor_ends_the_streams_or_is_survived(monkeypatch, broken):
    """A watch that fails leaves the process to be replaced when it dies; a supervisor that fails gives up openly."""

    def fail(*_):
        raise ValueError("a fault of ours")

    async def test(engine):
        await until(lambda: broken != "tree_time" or failed)
        stream = await engine.submit([1], SamplingParams(max_tokens=150))
        if broken == "outlive":
            monkeypatch.setattr(engine._recovery, "outlive", fail)
        os.kill(engine.pid, signal.SIGKILL)
        _, last = await collect(stream)
        if broken == "tree_time":
            assert last[0].finish_reason == "length"
            return
        assert "not looked after any more: ValueError: a fault of ours" in last[0].error
        with pytest.raises(RequestError, match="not looked after any more"):
            await engine.submit([1], GREEDY)

    failed: list[bool] = []
    if broken == "tree_time":
        monkeypatch.setattr(Watchdog, "tick", lambda _: (failed.append(True), fail()))
    run(test, spec(step_seconds=0.002), ping_seconds=0.01 if broken == "tree_time" else 5.0)


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


@pytest.mark.parametrize("busy", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_process_that_was_stopped_is_replaced(busy):
    async def test(engine):
        stream = await engine.submit([1], SamplingParams(max_tokens=400 if busy else 1))
        first = await anext(stream)
        assert len(first.ids) == 1
        old = engine.pid
        os.kill(old, signal.SIGSTOP)
        await until(lambda: engine.problem is not None)
        assert not engine.ready
        assert "the engine process answered nothing for" in engine.problem
        assert "SIGKILL" not in engine.problem, "nobody need look for whoever killed it"
        if busy:
            rest, last = await collect(stream)
            assert len(rest[0]) + 1 == last[0].usage.completion_tokens == 400
        ids, _ = await collect(await engine.submit([1, 2, 3], GREEDY))
        assert ids == local([([1, 2, 3], GREEDY)])[0]
        assert (engine.pid != old, engine.restarts, engine.problem) == (True, 1, None)

    run(test, spec(step_seconds=0.005), ping_seconds=0.2)


@pytest.mark.slow
def test_a_process_with_nothing_to_do_answers_pings():
    async def test(engine):
        await asyncio.sleep(1.0)
        assert (engine.restarts, engine.ready) == (0, True)

    run(test, ping_seconds=0.1)


def test_who_waits_for_the_end_of_an_engine_is_told_the_reason():
    async def test(engine):
        ending = asyncio.create_task(engine.failed())
        await collect(await engine.submit([13], GREEDY))
        assert "given up after 0 restarts" in await ending

    run(test, spec(die_on_id=13), max_restarts=0)


@pytest.mark.parametrize("ticks", [1, 3])
def test_silence_is_asked_about_once(ticks):
    """At its first tick; what ends the process is told to whoever reads from it."""
    sent, killed = [], []
    engine = RemoteEngine(spec(), worker=SimpleNamespace(pid=7, kill=lambda: killed.append(True)))
    engine._writer = SimpleNamespace(write=sent.append)
    reasons = iter([*[None] * ticks, "it is silent"])

    class Silent:
        tick_seconds, silent = 0.0, 0

        def heard(self):
            """Something has come."""

        def tick(self):
            self.silent += 1
            return next(reasons)

    engine._watchdog = Silent()
    assert asyncio.run(engine._watch()) == "it is silent"
    assert (sent, killed) == ([messages.frame(messages.Ping())], [True])
    assert engine._stall.seconds > 0


def test_silence_is_borne_longer_from_whoever_computes():
    def ticks(processor_times):
        """How many ticks of silence are borne."""
        watchdog, times = Watchdog(5.0, lambda: next(times)), iter(processor_times)
        return next((tick, reason) for tick in range(1, 1000) if (reason := watchdog.tick()) is not None)

    tick, reason = ticks([7] * 1000)
    assert tick == IDLE_TICKS + 1
    assert f"for {5 * tick} s and computed nothing" in reason
    tick, reason = ticks(range(1000))
    assert (tick, "for 600 s," in reason) == (BUSY_TICKS, True)
    assert ticks([None] * 1000)[0] == BUSY_TICKS, "where it is not known"
    assert ticks([1, 1, 1, *range(2, 20), *[20] * 1000])[0] == 3 + 18 + 1 + IDLE_TICKS


def test_processor_time_is_of_a_process_and_its_ranks():
    busy = "[sys.executable, '-c', 'while True: pass']"
    program = f"import subprocess, sys; subprocess.run({busy}, start_new_session=True)"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        try:
            end = time.monotonic() + 20
            while (tree_time(process.pid) or 0) < 50:  # hundredths of a second; the parent uses fewer
                assert time.monotonic() < end
                time.sleep(0.05)
        finally:
            for pid in children.read_text().split():
                os.kill(int(pid), signal.SIGKILL)
    assert tree_time(process.pid) is None
    assert tree_time(None) is None


def test_processes_whose_names_are_no_utf_8_are_counted_too():
    """The kernel cuts names after 15 bytes, also in the middle of a character."""
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b'caf\\xc3', 0, 0, 0); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert b"(caf\xc3)" in Path(f"/proc/{process.pid}/stat").read_bytes()
        assert tree_time(process.pid) is not None
        process.stdin.close()


def test_a_constraint_is_compiled_there_and_one_that_cannot_be_refuses_its_request():
    requests = [([i + 1], SamplingParams(seed=i, max_tokens=60, guided_regex="[a-z]{5}|[0-9]+x")) for i in range(4)]

    async def test(engine):
        streams = await asyncio.gather(*[engine.submit(ids, params, eos_ids=[270]) for ids, params in requests])
        for stream in streams:
            ids, last = await collect(stream)
            assert re.fullmatch("[a-z]{5}|[0-9]+x", SpellingTokenizer().decode(ids[0]))
            assert last[0].finish_reason == "stop"
        with pytest.raises(RequestError, match="the regex cannot be compiled") as caught:
            await engine.submit([1], SamplingParams(guided_regex="(a"))
        assert (caught.value.status, caught.value.param) == (400, "constraint")
        await until(lambda: not engine.requests)
        assert (await collect(await engine.submit([1], GREEDY)))[1][0].finish_reason == "length"

    run(test, spec(vocab_size=300, num_pages=400, max_context=3000))


def test_an_engine_that_is_stopped_is_idle_whatever_its_ranks_use():
    times, stopped = iter(range(100)), iter([True] * (IDLE_TICKS - 1) + [False] + [True] * IDLE_TICKS)
    watchdog = Watchdog(5.0, lambda: next(times), lambda: next(stopped))
    told = [watchdog.tick() for _ in range(2 * IDLE_TICKS)]
    assert [reason is not None for reason in told] == [False] * (2 * IDLE_TICKS - 1) + [True]
    assert "computed nothing, so it was ended" in told[-1]
