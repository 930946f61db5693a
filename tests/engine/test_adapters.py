"""Adapters in an engine: pages of the prefix cache, unloading what is in use, a fresh process after a crash."""

import asyncio
import json
import os
import signal

import pytest
from engine_fakes import FakeTemplate, FakeTokenizer, Loaded

from roofline import LLM, BeamSearchParams
from roofline.bundle import load
from roofline.common.errors import CapacityError, ConfigError, RequestError
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.engine.process.messages import EngineSpec
from roofline.engine.process.remote import RemoteEngine
from roofline.engine.process.remote_adapters import RemoteAdapters
from roofline.engine.process.replicas import EngineReplicas
from roofline.engine.process.thread import engine_in_thread
from roofline.weights.adapter_gguf import write_gguf_adapter
from roofline.weights.adapters import read_adapter
from roofline.weights.checkpoint import read_config
from tests.adapter_files import matrices, write_adapter

SIZES = {"cache_tokens": 512, "max_batch_tokens": 32, "max_running": 4, "threads": 1, "weights": "random:1"}
PROMPT = list(range(40))
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory, tiny_llama):
    place = tmp_path_factory.mktemp("tiny")
    (place / "config.json").write_text(json.dumps(tiny_llama))
    return str(place)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_llama):
    place = tmp_path_factory.mktemp("adapters")
    return [write_adapter(place / str(seed), matrices(tiny_llama, seed)) for seed in range(3)]


@pytest.fixture
def engine(model):
    executable = load(model, max_adapters=2, text=False, **SIZES).executable
    engine = LocalEngine(executable, EngineConfig(max_adapters=2))
    yield engine
    engine.close()


def answers(engine, *adapters):
    """(ids, prompt tokens found in the cache) of the same prompt with each adapter, computed together."""
    names = [engine.submit(PROMPT, GREEDY, adapter=adapter) for adapter in adapters]
    ids, cached = {name: [] for name in names}, {}
    while engine.has_work:
        for event in engine.step():
            ids[event.request_id] += event.ids
            if event.usage is not None:
                cached[event.request_id] = event.usage.cached_tokens
    return [(ids[name], cached[name]) for name in names]


def test_pages_are_shared_only_under_one_adapter(engine, folders):
    one, two = (engine.adapters.load(folder).digest for folder in folders[:2])
    (base, _), (first, _), (second, _) = together = answers(engine, "", one, two)
    assert len({tuple(ids) for ids in (base, first, second)}) == 3
    assert [cached for _, cached in together] == [0, 0, 0]
    # 32 of the 40 tokens lie in full pages that a second request of the same adapter finds; the answers are the same.
    assert answers(engine, two, "", one) == [(second, 32), (base, 32), (first, 32)]
    engine.adapters.unload(one)
    other = engine.adapters.load(folders[2]).digest  # takes the slot, and must not find the pages
    assert answers(engine, other)[0][1] == 0
    assert answers(engine, two) == [(second, 32)]


def test_a_gguf_file_answers_as_the_folder_that_it_was_made_from(engine, folders, model, tmp_path):
    config = read_config(model)
    write_gguf_adapter(tmp_path / "a.gguf", config, read_adapter(folders[0]).matrices)
    of_folder = engine.adapters.load(folders[0]).digest
    of_file = engine.adapters.load(str(tmp_path / "a.gguf")).digest
    assert of_file != of_folder, "its rows of q and k lie in another order"
    (base, _), (first, _), (second, _) = answers(engine, "", of_folder, of_file)
    assert first == second != base


def test_what_is_in_use_is_unloaded_when_its_requests_have_ended(engine, folders):
    one = engine.adapters.load(folders[0])
    assert engine.adapters.load(folders[0]) == one  # the same content takes one slot
    (expected, _), *_ = answers(engine, one.digest)
    name = engine.submit(PROMPT, GREEDY, adapter=one.digest)
    engine.step()
    engine.adapters.unload(one.digest)
    with pytest.raises(RequestError, match="unloaded") as refused:
        engine.submit(PROMPT, GREEDY, adapter=one.digest)
    assert refused.value.status == 404
    assert len(engine.executable.adapters.placed) == 1
    ids = []
    while engine.has_work:
        ids += [token for event in engine.step() if event.request_id == name for token in event.ids]
    assert ids == expected[-len(ids) :]
    assert engine.executable.adapters.placed == {}


def test_one_that_is_loaded_again_before_its_requests_have_ended_stays(engine, folders):
    one = engine.adapters.load(folders[0])
    engine.submit(PROMPT, GREEDY, adapter=one.digest)
    engine.step()
    engine.adapters.unload(one.digest)
    assert engine.adapters.load(folders[0]) == one
    while engine.has_work:
        engine.step()
    assert len(answers(engine, one.digest)[0][0]) == 6
    assert len(engine.executable.adapters.placed) == 1


def test_a_load_that_the_process_does_not_outlive_is_refused_unless_nobody_waits_for_it():
    async def run():
        sent = []
        adapters = RemoteAdapters(sent.append, set)
        waits, gone = [asyncio.create_task(adapters.load(path, None)) for path in ("a", "b")]
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert [each.path for each in sent] == ["a", "b"]
        adapters.died()
        with pytest.raises(RequestError, match="died while it loaded the adapter") as refused:
            await asyncio.wait_for(waits, 10)
        assert refused.value.status == 503

    asyncio.run(run())


def test_places_run_out_and_changed_files_are_noticed(engine, folders):
    digests = [engine.adapters.load(folder).digest for folder in folders[:2]]
    with pytest.raises(CapacityError, match="max_adapters"):
        engine.adapters.load(folders[2])
    with pytest.raises(ConfigError, match="its files have changed"):
        engine.adapters.load(folders[0], digests[1])
    engine.adapters.unload(digests[0])
    engine.adapters.load(folders[2])


def test_memory_of_all_is_bounded(model, folders, tiny_llama):
    nbytes = sum(values.nbytes for values in matrices(tiny_llama, 0).values())
    executable = load(model, max_adapters=3, text=False, **SIZES).executable
    engine = LocalEngine(executable, EngineConfig(max_adapters=3, adapter_bytes=2 * nbytes + 5))
    first, _ = (engine.adapters.load(folder).digest for folder in folders[:2])
    with pytest.raises(CapacityError, match=r"5 are available.*--adapter-bytes"):
        engine.adapters.load(folders[2])
    assert engine.adapters.load(folders[0]).digest == first, "it takes no memory again"
    engine.adapters.unload(first)
    engine.adapters.load(folders[2])
    engine.close()


@pytest.fixture
def llm(model):
    loaded = Loaded("tiny", load(model, max_adapters=2, text=False, **SIZES).executable)
    loaded.tokenizer, loaded.chat_template = FakeTokenizer(), FakeTemplate()
    loaded.tokenizer.alphabet = "".join(map(chr, range(256, 256 + loaded.executable.vocab_size)))
    with LLM(loaded, max_adapters=2) as llm:
        yield llm


def test_a_program_has_as_many_as_it_said(llm, folders):
    first, _ = (llm.load_adapter(folder) for folder in folders[:2])
    assert llm.load_adapter(folders[0]) == first
    with pytest.raises(CapacityError, match=r"needs 3 adapters, 2 are available.*max_adapters"):
        llm.load_adapter(folders[2])
    llm.unload_adapter(first)
    llm.load_adapter(folders[2])


def test_a_beam_search_with_an_adapter(llm, folders):
    """Of one beam it is the greedy answer."""
    adapters = [None, *(llm.load_adapter(folder) for folder in folders[:2])]
    answers = []
    for adapter in adapters:
        params = BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True)
        (search,) = llm.beam_search(PROMPT, params, adapter=adapter)
        (greedy,) = llm.generate(PROMPT, GREEDY, adapter=adapter)
        assert search.answers[0].ids == greedy.ids
        answers.append(tuple(greedy.ids))
    assert len(set(answers)) == 3
    llm.unload_adapter(adapters[1])
    with pytest.raises(RequestError, match="unloaded"):
        llm.beam_search(PROMPT, params, adapter=adapters[1])


def test_an_engine_without_places_says_how_to_have_them(model, folders):
    engine = LocalEngine(load(model, text=False, **SIZES).executable)
    with pytest.raises(ConfigError, match="max_adapters"):
        engine.adapters.load(folders[0])
    engine.close()


def thread_engine(model):
    executable = load(model, max_adapters=2, text=False, **SIZES).executable
    return engine_in_thread("tiny", LocalEngine(executable, EngineConfig(max_adapters=2)))


def started(test, engine):
    """Run an async test with an engine that is started, and closed afterwards."""

    async def body():
        try:
            async with asyncio.timeout(60):
                await engine.start()
                await test(engine)
        finally:
            await engine.close()

    asyncio.run(body())


async def ids_of(engine, adapter):
    stream = await engine.submit(PROMPT, GREEDY, adapter=adapter)
    return [token async for event in stream for token in event.ids]


def test_one_that_is_loaded_again_while_it_is_unloaded_stays(model, folders):
    async def test(engine):
        digest = (await engine.load_adapter(folders[0])).digest
        expected = await ids_of(engine, digest)
        again = asyncio.create_task(engine.load_adapter(folders[0]))
        await asyncio.sleep(0)  # the load is sent
        engine.unload_adapter(digest)
        assert (await again).digest == digest
        assert await ids_of(engine, digest) == expected
        engine.unload_adapter(digest)  # nobody has it now
        await engine.load_adapter(folders[1])
        await engine.load_adapter(folders[2])  # there are two places

    started(test, thread_engine(model))


def test_one_that_nobody_waits_for_any_more_is_unloaded(model, folders):
    async def test(engine):
        gone = asyncio.create_task(engine.load_adapter(folders[0]))
        await asyncio.sleep(0)
        gone.cancel()
        for folder in folders[1:]:  # there are two places
            await engine.load_adapter(folder)

    started(test, thread_engine(model))


def test_replicas_load_on_those_that_are_left(model, folders):
    async def test(replicas):
        gone, left = replicas.engines
        both = (await replicas.load_adapter(folders[0])).digest
        await gone.close()
        digest = (await replicas.load_adapter(folders[1])).digest
        assert len({tuple(await ids_of(replicas, adapter)) for adapter in ("", both, digest)}) == 3
        for adapter in (both, digest):
            replicas.unload_adapter(adapter)
            with pytest.raises(RequestError, match="unloaded"):
                await ids_of(replicas, adapter)
        await left.close()
        with pytest.raises(RequestError, match="closed") as refused:
            await replicas.load_adapter(folders[1])
        assert refused.value.status == 503

    started(test, EngineReplicas([thread_engine(model) for _ in range(2)]))


def test_a_fresh_process_has_the_adapters_of_the_dead_one(model, folders):
    spec = EngineSpec(
        source=model, options={**SIZES, "max_adapters": 2, "text": False}, config=EngineConfig(max_adapters=2)
    )
    params = SamplingParams(max_tokens=150, temperature=0, ignore_eos=True)

    async def run():
        engine = RemoteEngine(spec, backoff=0.01)
        await engine.start()
        try:
            one, two = [await engine.load_adapter(folder) for folder in folders[:2]]
            with pytest.raises(ConfigError, match="no such folder"):
                await engine.load_adapter(folders[0] + "/nothing")

            async def ids(adapter, kill=False):
                answer = []
                stream = await engine.submit(PROMPT, params, adapter=adapter)
                if kill:
                    engine.unload_adapter(adapter)  # it is in use, so the fresh process needs it too
                async for event in stream:
                    answer += event.ids
                    if kill and len(answer) > 5:
                        kill = os.kill(engine.pid, signal.SIGKILL)
                return answer

            expected = [await ids(adapter) for adapter in (one.digest, two.digest)]
            assert [await ids(one.digest, kill=True), await ids(two.digest)] == expected
            assert engine.restarts == 1
            with pytest.raises(RequestError, match="unloaded"):
                await engine.submit(PROMPT, params, adapter=one.digest)
        finally:
            await engine.close()

    asyncio.run(run())
