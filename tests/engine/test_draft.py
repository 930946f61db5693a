"""A draft model beside the model: its own pages, caught up after rejections, prefix hits and pre-emption."""

import asyncio
import os

import pytest
from engine_fakes import FakeExecutable, check_pages
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.common.errors import ConfigError
from roofline.engine.cache.paged import root_key
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.engine.process.messages import EngineSpec
from roofline.engine.process.remote import RemoteEngine
from roofline.engine.schedule.sequence import Request
from roofline.engine.speculation.draft_model import DraftModel
from roofline.engine.speculation.speculator import Speculator
from tests.engine.test_scheduling import CONFIGS, REQUESTS, Watched, alone

ALWAYS = EngineConfig(speculate="draft", speculate_always=True)


@settings(max_examples=30, deadline=None)
@given(
    requests=REQUESTS,
    config=CONFIGS,
    num_pages=st.integers(6, 20),
    draft_pages=st.integers(2, 20),
    draft_tokens=st.integers(1, 20),
    weights=st.sampled_from([0, 0, 1]),
    tokens=st.integers(1, 6),
    aborts=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 7)), max_size=2),
)
@pytest.mark.slow
def test_outputs_do_not_depend_on_the_draft_model(
    requests, config, num_pages, draft_pages, draft_tokens, weights, tokens, aborts
):
    reference = alone(requests)
    watched = Watched(config, num_pages=num_pages, rows=64)
    small = FakeExecutable(num_pages=draft_pages, tokens=draft_tokens, segments=4, max_context=70, weights=weights)
    drafter = DraftModel(small)
    engine = watched.engine
    engine._speculator = engine._stepper.speculator = Speculator(drafter, tokens, small.clock, adaptive=False)
    for i, (ids, params) in enumerate(requests):
        watched.submit(ids, params, request_id=str(i))
    for step in range(13):
        for at, request in aborts:
            if at == step:
                engine.abort(str(request))
        watched.step()
        check_pages(drafter.cache, [side.pages for side in drafter._sides.values()])
        assert set(drafter._sides) <= set(engine.state.running)
    outputs = watched.run()
    for key, last in watched.ended.items():
        assert outputs.get(key, []) == reference[key][: len(outputs.get(key, []))]
        assert last.finish_reason == "abort" or outputs[key] == reference[key]
    assert drafter.cache.used == 0


def answer(engine, prompt=(1, 2, 3), **params):
    engine.submit(prompt, SamplingParams(**params))
    ids = []
    while engine.has_work:
        ids += [token for event in engine.step() for token in event.ids]
    return ids


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 0.8, "seed": 4, "top_p": 0.8, "frequency_penalty": 0.7, "logit_bias": {7: 1.0}, "logprobs": 2},
    ],
)
def test_a_model_that_drafts_for_itself_is_always_right(params):
    """With the target's noise and parameters, also where it samples."""
    engine = LocalEngine(FakeExecutable(rows=64), ALWAYS, FakeExecutable())
    ids = answer(engine, max_tokens=41, **params)
    assert ids == answer(LocalEngine(FakeExecutable()), max_tokens=41, **params)
    stats = engine.stats()
    assert (stats.acceptance, stats.steps) == (1.0, 9)
    assert stats.draft_seconds > 0


def test_it_computes_each_token_once_and_finds_prefixes():
    small = FakeExecutable()
    engine = LocalEngine(FakeExecutable(rows=64), ALWAYS, small)
    prompt = [(3 * i) % 50 for i in range(70)]
    answer(engine, prompt, temperature=0, max_tokens=21)
    # For a draft of four: what it lacks (the prompt and an id; later two ids), then the first three drafted ids.
    assert small.tokens_computed == 70 + 1 + 3 + 3 * 5
    before = small.tokens_computed
    answer(engine, prompt, temperature=0, max_tokens=6)
    assert small.tokens_computed - before == 70 - 64 + 1 + 3, "four pages were found"


def test_a_wrong_draft_is_computed_over():
    small = FakeExecutable(weights=9)
    engine = LocalEngine(FakeExecutable(rows=64), ALWAYS, small)
    ids = answer(engine, temperature=0, max_tokens=60)
    assert ids == answer(LocalEngine(FakeExecutable()), temperature=0, max_tokens=60)
    assert engine.stats().acceptance < 0.2


def test_a_draft_that_nobody_verified_is_made_again():
    """The row of the last id makes the first drafted one: it is computed again, though it lies in the pages."""
    small = FakeExecutable()
    drafter = DraftModel(small)
    (sequence,) = Request("a", [1, 2, 3], SamplingParams(), frozenset(), 40, 0, root_key("f")).sequences
    drafter.draft([sequence], [3])
    first = sequence.draft
    assert (len(first), small.tokens_computed, drafter.settled) == (3, 3 + 2, False)
    drafter.draft([sequence], [3])
    assert (sequence.draft, small.tokens_computed, drafter.settled) == (first, 5 + 3, True)
    sequence.ids += [*first, 7]  # right, and the one after: it lacks the last two
    drafter.draft([sequence], [3])
    assert (len(sequence.draft), small.tokens_computed, drafter.settled) == (3, 8 + 2 + 2, True)
    sequence.ids += [(sequence.draft[0] + 1) % 50, 7, 7]
    drafter.draft([sequence], [3])
    assert (len(sequence.draft), small.tokens_computed, drafter.settled) == (3, 12 + 3 + 2, False)
    drafter.draft([sequence], [0])
    assert (sequence.draft, small.tokens_computed, drafter.settled) == ([], 17, True)


@pytest.mark.parametrize(("length", "pages"), [(15, 0), (16, 0), (17, 1)])
def test_pages_can_be_found_that_end_before_the_last_id(length, pages):
    """The last id is computed again, and what was drafted behind it may be wrong."""
    drafter = DraftModel(FakeExecutable())
    prompt = list(range(length))
    (sequence,) = Request("a", prompt, SamplingParams(), frozenset(), 40, 0, root_key("f")).sequences
    drafter.draft([sequence], [4])
    assert len(drafter.cache._page_of) == len(sequence.keys.keys) == pages


@pytest.mark.parametrize("limits", [{"rows": 2}, {"segments": 2}, {"table_pages": 2}, {"tokens": 5}, {"tokens": 1}])
def test_sequences_that_do_not_fit_into_a_step_take_several(limits):
    def drafts(executable):
        drafter = DraftModel(executable)
        requests = [Request("", [i] * 7, SamplingParams(), frozenset(), 40, 0, root_key("f")) for i in range(4)]
        sequences = [request.sequences[0] for request in requests]
        drafter.draft(sequences, [3, 1, 2, 3])
        return [sequence.draft for sequence in sequences]

    expected = drafts(FakeExecutable())
    assert [len(draft) for draft in expected] == [3, 1, 2, 3]
    assert drafts(FakeExecutable(**limits)) == expected


def test_an_abort_frees_the_pages_of_the_draft_model_at_once():
    engine = LocalEngine(FakeExecutable(rows=64), ALWAYS, FakeExecutable())
    engine.submit([1, 2, 3], SamplingParams(max_tokens=40), request_id="a")
    for _ in range(3):
        engine.step()
    cache = engine._speculator.drafter.cache
    assert cache.used > 0
    engine.abort("a")
    assert cache.used == 0


def test_a_failing_draft_model_costs_nothing_but_itself():
    small = FakeExecutable()
    small.fail_at = {3}
    engine = LocalEngine(FakeExecutable(rows=64), ALWAYS, small)
    ids = answer(engine, temperature=0, max_tokens=30)
    assert ids == answer(LocalEngine(FakeExecutable()), temperature=0, max_tokens=30)
    assert small.forwards == 3
    assert engine.stats().finished == {"length": 1}
    engine.close()
    assert small.closed


def test_what_cannot_draft_is_refused():
    with pytest.raises(ConfigError, match="51 ids, the model 50"):
        LocalEngine(FakeExecutable(), ALWAYS, FakeExecutable(vocab_size=51))
    with pytest.raises(ConfigError, match="needs a draft model"):
        LocalEngine(FakeExecutable(), ALWAYS)
    with pytest.raises(ConfigError, match="nothing else takes one"):
        LocalEngine(FakeExecutable(), EngineConfig(speculate="ngram"), FakeExecutable())


@pytest.fixture
def spec(fake_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([fake_path, os.environ.get("PYTHONPATH", "")]))
    return lambda draft: EngineSpec(
        source="toy", options={"rows": 64}, config=ALWAYS, factory="engine_fakes:load_fake", draft=draft
    )


def test_the_engine_process_loads_both_models(spec):
    async def run():
        engine = RemoteEngine(spec("toy too"))
        await engine.start()
        ids = []
        async for event in await engine.submit([1, 2, 3], SamplingParams(temperature=0, max_tokens=41)):
            ids += event.ids
        stats = engine.stats()
        await engine.close()
        return ids, stats

    ids, stats = asyncio.run(run())
    assert ids == answer(LocalEngine(FakeExecutable()), temperature=0, max_tokens=41)
    assert (stats.acceptance, stats.draft_tokens) == (1.0, 32)


def test_a_draft_model_of_other_words_is_refused_by_the_process(spec):
    async def run():
        engine = RemoteEngine(spec("other words"))
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises(ConfigError, match="other words cannot draft for toy: id 7 differs"):
        asyncio.run(run())
