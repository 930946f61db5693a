"""Several engines behind one interface: where requests go, who ends them, and what is left when one dies."""

import asyncio
import os
import random
import signal
from functools import partial
from types import SimpleNamespace

import pytest
from engine_fakes import FakeExecutable
from engine_streams import collect, local, until
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.common.errors import CapacityError, ConfigError, RequestError, UnsupportedError
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.engine.process.messages import EngineSpec
from roofline.engine.process.remote import RemoteEngine
from roofline.engine.process.replicas import EngineReplicas
from roofline.engine.process.thread import engine_in_thread

pytestmark = pytest.mark.usefixtures("fakes_everywhere")
GREEDY = SamplingParams(temperature=0, max_tokens=20)
LONG = SamplingParams(temperature=0, max_tokens=400)


def processes(*sources, config=None, cores=(), **options):
    sources = sources or ("toy", "toy")
    specs = [
        EngineSpec(
            source=source,
            options=options,
            config=config or EngineConfig(),
            factory="engine_fakes:load_fake",
            cores=list(cores),
        )
        for source in sources
    ]
    return [RemoteEngine(spec, backoff=0.01, max_restarts=2) for spec in specs]


def threads(count=2, **options):
    return [engine_in_thread("toy", LocalEngine(FakeExecutable(**options))) for _ in range(count)]


def run(test, engines):
    """Run an async test with started replicas, closed afterwards."""

    async def body():
        replicas = EngineReplicas(engines)
        try:
            async with asyncio.timeout(60):
                await replicas.start()
                await test(replicas)
        finally:
            await replicas.close()

    asyncio.run(body())


def placed(replicas):
    """The requests of each engine."""
    return [sorted(engine.requests) for engine in replicas.engines]


def test_the_same_ids_as_one_engine_and_work_is_shared():
    requests = [([i, 2, 3] * (i + 1), SamplingParams(seed=i, max_tokens=9, n=1 + i % 2)) for i in range(8)]

    async def test(replicas):
        assert replicas.ready
        assert replicas.description.max_model_len == 512
        streams = [await replicas.submit(ids, params) for ids, params in requests]
        results = await asyncio.gather(*[collect(stream) for stream in streams])
        assert [ids for ids, _ in results] == local(requests)
        each = [engine.stats() for engine in replicas.engines]
        assert all(stats.requests for stats in each)
        whole = replicas.stats()
        assert whole.generated_tokens == sum(stats.generated_tokens for stats in each) == 9 * 12
        assert whole.finished == {"length": 12}
        assert (whole.pages_total, whole.page_bytes) == (128, 1024)
        assert [engine.outstanding for engine in replicas.engines] == [0, 0]

    run(test, threads())


def test_a_conversation_stays_and_an_abort_finds_its_request():
    async def test(replicas):
        first = await replicas.submit([7] * 100, GREEDY, request_id="a")
        await collect(first)
        await replicas.submit([8] * 100, LONG, request_id="b")
        await replicas.submit([7] * 101, LONG, request_id="c")
        assert placed(replicas) == [["c"], ["b"]]
        with pytest.raises(RequestError, match="in use"):
            await replicas.submit([1], GREEDY, request_id="c")
        stream = replicas.engines[0].requests["c"].stream
        replicas.abort("c")
        replicas.abort("never was")
        _, last = await collect(stream)
        assert last[0].finish_reason == "abort"
        assert placed(replicas) == [[], ["b"]]

    run(test, threads(step_seconds=0.002))


@pytest.mark.parametrize(
    ("config", "requests"),
    [
        (EngineConfig(), [2, 0]),
        (EngineConfig(prefix_cache=False), [1, 1]),
        (EngineConfig(cache="naive"), [1, 1]),
    ],
)
def test_without_a_prefix_cache_there_is_no_preference(config, requests):
    async def test(replicas):
        for name in ("a", "b"):
            await collect(await replicas.submit([7] * 100, GREEDY, request_id=name))
        assert [engine.stats().requests for engine in replicas.engines] == requests

    run(test, [engine_in_thread("toy", LocalEngine(FakeExecutable(), config)) for _ in range(2)])


def test_a_request_waits_until_all_are_loaded():
    async def body():
        replicas = EngineReplicas(threads())
        request = asyncio.create_task(replicas.submit([1, 2, 3], GREEDY))
        await asyncio.sleep(0.01)
        assert not request.done()
        assert replicas.description is None
        await replicas.start()
        ids, _ = await collect(await request)
        assert ids == local([([1, 2, 3], GREEDY)])[0]
        await replicas.close()

    asyncio.run(body())


def test_refusals_come_back_at_once_and_leave_nothing():
    async def test(replicas):
        with pytest.raises(CapacityError, match="513 tokens, 512 are available"):
            await replicas.submit([1] * 500, SamplingParams(max_tokens=13))
        for ids in ([], [50], [1 << 40], [-1], ["x"]):
            with pytest.raises(RequestError):
                await replicas.submit(ids)
        assert placed(replicas) == [[], []]

    run(test, threads())


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 3), st.integers(1, 12), st.sampled_from(["", "abort", "leave"])),
        max_size=12,
    ),
    st.integers(1, 3),
)
def test_every_answer_ends_exactly_once(requests, count):
    """Prompts of few kinds, n answers each, some aborted or left: one last event for each answer, books empty."""

    async def one(replicas, length, n, most, then):
        params = SamplingParams(n=n, max_tokens=most, temperature=0)
        stream = await replicas.submit([length % 3] * length, params)
        await asyncio.sleep(0)
        if then == "abort":
            replicas.abort(stream.request_id)
        if then == "leave":
            await stream.aclose()
            return
        ids, last = await collect(stream)
        assert sorted(last) == list(range(n))
        assert all(len(ids[i]) == most for i in last if last[i].finish_reason == "length")

    async def test(replicas):
        await asyncio.gather(*(one(replicas, *request) for request in requests))
        await until(lambda: placed(replicas) == [[]] * count)
        assert [engine.outstanding for engine in replicas.engines] == [0] * count

    run(test, threads(count))


@pytest.mark.e2e
@pytest.mark.slow
def test_one_dies_while_the_others_serve_and_comes_back():
    async def test(replicas):
        streams = [await replicas.submit([i] * 40, LONG, request_id=str(i)) for i in range(4)]
        firsts = [await anext(stream) for stream in streams]
        assert placed(replicas) == [["0", "2"], ["1", "3"]]
        dead, alive = replicas.engines
        old = dead.pid
        os.kill(old, signal.SIGKILL)
        await until(lambda: not dead.ready)
        assert replicas.ready
        meanwhile = await replicas.submit([0] * 40, GREEDY, request_id="meanwhile")
        assert "meanwhile" in alive.requests, "its pages were on the one that died"
        ids, _ = await collect(meanwhile)
        assert ids == local([([0] * 40, GREEDY)])[0]
        await until(lambda: dead.ready)
        assert dead.pid != old
        assert replicas.restarts == 1
        assert placed(replicas) == [["0", "2"], ["1", "3"]]
        results = await asyncio.gather(*[collect(stream) for stream in streams])
        for i, (ids, last) in enumerate(results):
            assert firsts[i].ids + ids[0] == local([([i] * 40, LONG)])[0][0]
            assert last[0].finish_reason == "length"

    run(test, processes(step_seconds=0.005))


@pytest.mark.e2e
def test_when_all_are_down_requests_wait_and_when_all_are_given_up_they_are_refused():
    async def test(replicas):
        for _ in replicas.engines:
            await replicas.submit([13], GREEDY)  # whoever computes it dies, and as this toy cannot bear id 0 either ...
        await until(lambda: all(engine.failure for engine in replicas.engines))
        with pytest.raises(RequestError, match="given up after 2 restarts") as caught:
            await replicas.submit([1], GREEDY)
        assert caught.value.status == 503
        assert not replicas.ready
        assert replicas.restarts == 4

    run(test, processes(die_on_id=(0, 13)))


@pytest.mark.e2e
@pytest.mark.slow
def test_requests_of_one_that_is_given_up_go_on_at_another(tmp_path):
    async def test(replicas):
        dead, alive = replicas.engines
        streams = [await replicas.submit([i] * 40, LONG, request_id=str(i)) for i in range(4)]
        firsts = [await anext(stream) for stream in streams]
        assert placed(replicas) == [["0", "2"], ["1", "3"]]
        (tmp_path / "gone").touch()
        os.kill(dead.pid, signal.SIGKILL)
        await until(lambda: dead.failure is not None)
        assert placed(replicas) == [[], ["1", "3", "0", "2"]] or placed(replicas) == [[], ["0", "1", "2", "3"]]
        streams[2].abort()
        _, last = await collect(streams[2])
        assert last[0].finish_reason == "abort"
        for i in (0, 1, 3):
            ids, _ = await collect(streams[i])
            assert firsts[i].ids + ids[0] == local([([i] * 40, LONG)])[0][0]
        assert (alive.restarts, dead.restarts) == (0, 2)

    run(test, processes(step_seconds=0.005, fail_if=str(tmp_path / "gone")))


@pytest.mark.slow
@pytest.mark.e2e
def test_under_random_deaths_every_answer_is_the_same():
    async def one(replicas, rng):
        prompt, params = [rng.randrange(3)] * rng.randint(1, 60), SamplingParams(n=2, max_tokens=20, seed=7)
        ids, last = await collect(await replicas.submit(prompt, params))
        assert ids == local([(prompt, params)])[0]
        assert [last[index].finish_reason for index in (0, 1)] == ["length"] * 2

    async def test(replicas):
        rng = random.Random(5)
        asked = []
        for victim in (*replicas.engines, None):
            asked += [asyncio.create_task(one(replicas, rng)) for _ in range(12)]
            await asyncio.sleep(rng.random() / 10)
            if victim is not None and victim.pid is not None:
                os.kill(victim.pid, signal.SIGKILL)
        await asyncio.gather(*asked)
        assert placed(replicas) == [[], []]
        assert replicas.restarts == 2

    run(test, processes(step_seconds=0.005))


@pytest.mark.e2e
def test_what_cannot_be_loaded_ends_the_start():
    async def body(*sources):
        replicas = EngineReplicas(processes(*sources))
        replicas.launch()
        try:
            await replicas.start()
        finally:
            assert not replicas.ready
            await replicas.close()
            with pytest.raises(RequestError, match=r"closed|loaded"):
                await replicas.submit([1])

    with pytest.raises(ConfigError, match="field x is wrong"):
        asyncio.run(body("slow", "config error"))


def test_engines_that_compute_differently_are_refused():
    engines = threads()
    engines[1]._worker._engine.executable.fingerprint = "other"
    with pytest.raises(UnsupportedError, match="replicas that compute differently"):
        run(None, engines)


def test_an_adapter_that_one_of_them_cannot_load_is_left_in_none():
    forgotten = []

    def replicas(*loads):
        engines = threads(len(loads))
        for number, (engine, load) in enumerate(zip(engines, loads, strict=True)):
            engine.load_adapter = lambda path, most, load=load: load(path, most)
            engine.unload_adapter = lambda digest, number=number: forgotten.append((number, digest))
        return EngineReplicas(engines)

    async def loaded(path, most, digest="a"):
        return SimpleNamespace(digest=digest, words=(path, most))

    async def refused(path, most):
        raise ConfigError("no adapter")

    async def slow(path, most):
        await asyncio.Event().wait()

    assert asyncio.run(replicas(loaded, loaded).load_adapter("p", 5)).words == ("p", 5)
    assert not forgotten
    with pytest.raises(ConfigError, match="no adapter"):
        asyncio.run(replicas(loaded, refused, loaded).load_adapter("p"))
    assert forgotten == [(0, "a"), (2, "a")]
    forgotten.clear()
    with pytest.raises(ConfigError, match="p changed while it was loaded"):
        asyncio.run(replicas(loaded, partial(loaded, digest="b")).load_adapter("p"))
    assert forgotten == [(0, "a"), (1, "b")]
    forgotten.clear()

    async def left():
        await asyncio.wait_for(replicas(slow, loaded).load_adapter("p"), 0.01)

    with pytest.raises(TimeoutError):
        asyncio.run(left())
    assert forgotten == [(1, "a")]


def test_what_is_wrong_with_all_of_them_is_what_is_wrong_with_the_first():
    async def failed(reason):
        await asyncio.sleep(0)
        return reason

    for first, second in (("a", "b"), ("b", "a")):
        engines = threads()
        engines[0].failed, engines[1].failed = partial(failed, first), partial(failed, second)
        assert asyncio.run(EngineReplicas(engines).failed()) == first


@pytest.mark.e2e
def test_closing_ends_all_of_them():
    async def body():
        replicas = EngineReplicas(processes(step_seconds=0.01))
        await replicas.start()
        streams = [await replicas.submit([i], LONG) for i in range(2)]
        for stream in streams:
            await anext(stream)
        ends = [engine._worker._process for engine in replicas.engines]
        await replicas.close()
        for stream in streams:
            _, last = await collect(stream)
            assert last[0].finish_reason == "abort"
        assert [process.returncode for process in ends] == [0, 0]
        with pytest.raises(RequestError, match="closed"):
            await replicas.submit([1])

    asyncio.run(body())


@pytest.mark.e2e
def test_a_process_keeps_to_its_cores():
    one = min(os.sched_getaffinity(0))

    async def test(replicas):
        assert os.sched_getaffinity(replicas.engines[0].pid) == {one}

    run(test, processes("toy", cores=[one]))


def test_one_that_computes_is_enough_and_each_is_tried():
    engines = threads()
    replicas = EngineReplicas(engines)
    troubles, proofs = ["it hangs", "it hangs too"], []
    for number, engine in enumerate(engines):
        engine.ready = True
        engine.trouble = lambda patience, number=number: troubles[number] if patience == 7.0 else "another patience"
        engine.prove = proofs.append
    assert replicas.trouble(7.0) == "it hangs"
    troubles[1] = None
    assert replicas.trouble(7.0) is None
    engines[1].ready = False  # it is being started: what it was asked for is gone
    assert replicas.trouble(7.0) == "it hangs"
    replicas.prove(3.0)
    assert proofs == [3.0, 3.0]


def test_who_goes_on_is_ready_and_has_least_to_do():
    engines = threads(3)
    replicas = EngineReplicas(engines)
    assert replicas._least_busy() is None  # none has its model
    for engine in engines:
        engine.description = object()
    engines[2].ready = True
    assert replicas._least_busy() is engines[2]
    engines[2].failure = "it is given up"
    assert replicas._least_busy() is engines[0]
    engines[0].failure = engines[1].failure = "it too"
    assert replicas._least_busy() is None


def test_where_all_are_given_up_the_first_says_why_no_adapter_is_loaded():
    engines = threads()
    for number, engine in enumerate(engines):
        engine.failure = f"given up for reason {number}"
    with pytest.raises(RequestError, match="given up for reason 0") as refused:
        asyncio.run(EngineReplicas(engines).load_adapter("folder"))
    assert (refused.value.status, refused.value.code) == (503, "engine_unavailable")
