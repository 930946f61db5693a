"""Encoders: a prompt is one step, nothing is shared, and vectors are all there is."""

import asyncio

import pytest
from engine_fakes import HIDDEN_WIDTH, FakeExecutable, Loaded, loaded_text
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pooling import pooled, run

from roofline import LLM
from roofline.common.errors import CapacityError, RequestError, UnsupportedError
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.engine.pooling import Pooling, cosine, vector_numbers
from roofline.engine.process.canary import Canary
from roofline.engine.process.main import ready
from roofline.engine.process.messages import EngineSpec
from roofline.engine.process.remote import RemoteEngine

FIRST, MEAN, LAST = Pooling("first"), Pooling("mean"), Pooling("last")


class FakeEncoder(FakeExecutable):
    """A toy that sees both ways: each of its prompts must be one segment from the first position on."""

    causal = False

    def forward(self):
        assert self.vocab_size == HIDDEN_WIDTH, "an encoder computes no logits"
        b = self.batch
        for s in range(b.segments):
            assert b.positions[b.seg_start[s]] == 0, "a prompt began in another step"
            assert b.ids[b.seg_start[s + 1] - 1] == 9, "a prompt ends in another step"
        super().forward()


def load_encoder(source, text=True, **options):
    """A factory for engine processes."""
    loaded = Loaded(source, FakeEncoder(**options))
    loaded.pooling = "first"
    return loaded


# All prompts end with 9, which stands nowhere else in them; many begin alike.
PROMPTS = st.builds(
    lambda first, count: [*[first, *[2, 3, 4] * 23][: count - 1], 9], st.sampled_from([1, 2]), st.integers(1, 40)
)
REQUESTS = st.lists(st.tuples(PROMPTS, st.sampled_from([*map(pooled, (MEAN, LAST, FIRST))])), min_size=1, max_size=9)


@settings(max_examples=25, deadline=None)
@given(REQUESTS, st.sampled_from([40, 64]), st.sampled_from([4, 20]), st.sampled_from([2, 16]), st.booleans())
def test_prompts_are_computed_in_one_step_whatever_their_company(requests, tokens, pages, segments, naive):
    toy = FakeEncoder(tokens=tokens, num_pages=pages, segments=segments, max_context=64, table_pages=40)
    config = EngineConfig(scheduler="naive", cache="naive") if naive else EngineConfig()
    engine = LocalEngine(toy, config)
    alone = [run(LocalEngine(FakeEncoder()), [request])[0] for request in requests]
    assert run(engine, requests + requests) == alone + alone
    assert engine.stats().prefix_hits == 0
    assert toy.forwards == 0


def test_several_prompts_share_a_step_and_none_is_cut():
    toy = FakeEncoder(tokens=20, max_context=20)
    engine = LocalEngine(toy)
    run(engine, [([1] * count + [9], pooled(MEAN)) for count in (11, 6, 5, 3)])
    assert toy.hidden.tokens_computed == 29
    assert toy.hidden.forwards == 2  # 12 and 7, then 6 and 4


def test_the_first_row_is_that_of_the_first_token_also_in_chunks():
    """Of other models too, where it was computed in another step than the last."""
    ids = [1, 2, 3] * 9
    alone = run(LocalEngine(FakeExecutable(tokens=64)), [(ids[:1], pooled(LAST))])
    assert run(LocalEngine(FakeExecutable(tokens=5)), [(ids, pooled(FIRST))]) == alone
    engine = LocalEngine(FakeExecutable(tokens=64))  # of which pages are cached
    assert run(engine, [(ids, pooled(LAST))]) != alone
    assert run(engine, [(ids, pooled(FIRST))]) == alone


def test_what_an_encoder_cannot_do_is_refused():
    engine = LocalEngine(FakeEncoder(tokens=32, max_context=64))
    assert engine.encoder
    assert engine.limits.max_model_len == 32
    for params in (SamplingParams(max_tokens=3), pooled(Pooling("logits")), pooled(Pooling("logits", (3,)))):
        with pytest.raises(UnsupportedError, match="it reads texts and gives their vectors; it generates none"):
            engine.submit([1, 9], params)
    with pytest.raises(CapacityError, match=r"33 tokens, 32 are available.*max_batch_tokens"):
        engine.submit([1] * 33, pooled(MEAN))
    assert not engine.has_work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculate": "ngram"}, "speculate with an encoder"),
        ({"cache_file": "pages"}, "cache_file with an encoder"),
        ({"max_model_len": 64, "max_batch_tokens": 32}, "max_model_len=64 needs 64 tokens of a step, 32 are available"),
    ],
)
def test_options_that_say_nothing_of_an_encoder_are_refused(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UnsupportedError, CapacityError), match=message):
        LocalEngine(FakeEncoder(max_context=64), EngineConfig(**options))
    LocalEngine(FakeExecutable(max_context=64), EngineConfig(max_model_len=64, max_batch_tokens=32)).close()


def test_an_encoder_drafts_nothing():
    with pytest.raises(UnsupportedError, match="an encoder model as a draft"):
        LocalEngine(FakeExecutable(), EngineConfig(speculate="draft"), FakeEncoder())


def test_an_llm_embeds_and_scores_and_refuses_answers():
    model = loaded_text(max_context=64)
    model.executable, model.pooling, model.sampling = FakeEncoder(max_context=64), "first", {}
    llm = LLM(model)
    ids = [[1, 2, 9], [2, 9], [1, 9]]
    by_default, chosen = llm.embed(ids), llm.embed(ids, pooling="first")
    assert [each.tolist() for each in by_default] == [each.tolist() for each in chosen]
    assert by_default[0].tolist() == by_default[2].tolist()
    assert by_default[0].tolist() != llm.embed([ids[0]], pooling="mean")[0].tolist()
    for refused in (lambda: llm.generate([[1, 9]]), lambda: llm.chat([{"role": "user", "content": "a"}])):
        with pytest.raises(UnsupportedError, match="an answer of an encoder model"):
            refused()
    with pytest.raises(RequestError, match="instruction: an encoder compares the vectors of two texts"):
        llm.score("aj", ["bj"], instruction="any")
    llm.engine.pooling = "mean"
    scores = llm.score("aj", ["aj", "bj"])  # j is 9
    assert scores[0] == 1.0
    assert -1 <= scores[1] < 1
    llm.close()


def test_cosines():
    a, b = (vector_bytes_of(numbers) for numbers in ((3.0, 4.0), (4.0, 3.0)))
    assert cosine(a, b) == pytest.approx(24 / 25)
    assert cosine(a, a) == 1.0
    assert cosine(a, vector_bytes_of((-3.0, -4.0))) == -1.0
    assert cosine(a, bytes(8)) == 0.0


def vector_bytes_of(numbers):
    import numpy as np

    return np.array(numbers, "<f4").tobytes()


@pytest.mark.usefixtures("fakes_everywhere")
def test_an_engine_process_says_that_it_is_an_encoder_and_proves_itself():
    async def program():
        spec = EngineSpec(source="toy", options={"max_context": 64}, factory="test_encoder:load_encoder")
        engine = RemoteEngine(spec, backoff=0.01, max_restarts=1)
        described = await engine.start()
        assert described.encoder
        assert described.pooling == "first"
        with pytest.raises(UnsupportedError, match="an answer of an encoder model"):
            await engine.submit([1, 9], SamplingParams(max_tokens=3))
        async for event in await engine.submit([1, 9], pooled(FIRST)):
            vector = event.vector
        assert len(vector_numbers(vector)) == HIDDEN_WIDTH
        await engine.close()

    asyncio.run(program())
    engine = LocalEngine(FakeEncoder())
    request = Canary().request(ready("toy", engine, 0.0))
    assert request.params.pooling is not None
    assert Canary().request(ready("toy", LocalEngine(FakeExecutable()), 0.0)).params.pooling is None
