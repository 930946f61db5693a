"""Vectors of prompts: the same bits however prompts are cut, whatever runs beside them, and whichever process it is."""

import asyncio
from array import array

import numpy as np
import pytest
from engine_fakes import HIDDEN_WIDTH, FakeExecutable, QueueingFake, check_pages
from engine_streams import until
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.common.errors import CapacityError, RequestError, UnsupportedError
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.engine.pooling import Pooling, cosine, embedding, probability, vector_bytes, vector_numbers
from roofline.engine.process.messages import EngineSpec
from roofline.engine.process.remote import RemoteEngine
from roofline.engine.process.replicas import EngineReplicas
from roofline.ops.batch import Segment

MEAN, LAST, LOGITS = Pooling("mean"), Pooling("last"), Pooling("logits", (7, 3, 7))
FIRST = Pooling("first")


def pooled(pooling):
    return SamplingParams(temperature=0, pooling=pooling)


def run(engine, requests):
    """What each request gives: its vector, or its ids."""
    names = [engine.submit(ids, params) for ids, params in requests]
    ids, vectors = {name: [] for name in names}, {}
    while engine.has_work:
        for event in engine.step():
            ids[event.request_id] += event.ids
            if event.vector is not None:
                assert event.finish_reason == "stop"
                assert not event.ids
                assert event.usage.completion_tokens == 0
                vectors[event.request_id] = event.vector
    check_pages(engine.state.cache, [])
    return [vectors.get(name, ids[name]) for name in names]


def alone(ids, params):
    (result,) = run(LocalEngine(FakeExecutable(tokens=512, max_context=512)), [(ids, params)])
    return result


# Of few kinds, so that many begin with the same pages.
PROMPTS = st.builds(lambda first, count: [first, *[2, 3, 4] * 23][:count], st.sampled_from([1, 2]), st.integers(1, 70))
PARAMS = st.sampled_from(
    [*map(pooled, (MEAN, LAST, FIRST, LOGITS)), SamplingParams(temperature=1, seed=5, max_tokens=9)]
)
REQUESTS = st.lists(st.tuples(PROMPTS, PARAMS), min_size=1, max_size=7)


@settings(max_examples=25, deadline=None)
@given(REQUESTS, st.sampled_from([5, 16, 64]), st.sampled_from([9, 20]), st.booleans(), st.sampled_from([0, 1, 2]))
def test_company_chunks_and_lost_pages_change_no_bit(requests, tokens, pages, queues, policy):
    toy = (QueueingFake if queues else FakeExecutable)(
        tokens=tokens, num_pages=pages, segments=4, max_context=16 * 9, table_pages=40
    )
    schemes = {"scheduler": "continuous"}, {"scheduler": "naive", "cache": "naive"}, {"speculate": "ngram"}
    engine = LocalEngine(toy, EngineConfig(max_model_len=80, **schemes[policy]))
    assert run(engine, requests) == [alone(*request) for request in requests]


def test_a_mean_that_loses_its_pages_begins_anew():
    engine = LocalEngine(FakeExecutable(tokens=3, num_pages=6, segments=2, max_context=96, table_pages=12))
    answer, mean = ([1] * 16, SamplingParams(temperature=0, max_tokens=40)), ([2] * 60, pooled(MEAN))
    assert run(engine, [answer, mean]) == [alone(*answer), alone(*mean)]
    assert engine.stats().preemptions == 1


def test_what_each_kind_takes_of_the_rows():
    ids = [1, 2, 3] * 9
    executable = FakeExecutable().headless()
    executable.batch.fill([Segment(ids, 0, range(2))], range(len(ids)))
    executable.forward()
    rows = executable.logits()
    assert rows.shape == (27, HIDDEN_WIDTH)
    assert alone(ids, pooled(LAST)) == rows[-1].tobytes()
    mean = np.frombuffer(alone(ids, pooled(MEAN)), np.float32)
    np.testing.assert_allclose(mean, rows.astype(np.float64).mean(0), rtol=1e-6)
    whole = FakeExecutable()
    whole.batch.fill([Segment(ids, 0, range(2))], [26])
    whole.forward()
    assert alone(ids, pooled(LOGITS)) == whole.logits()[0, [7, 3, 7]].tobytes()
    assert alone(ids, pooled(Pooling("logits"))) == whole.logits()[0].tobytes()


def test_a_prompt_may_fill_the_context_and_no_more():
    engine = LocalEngine(FakeExecutable(max_context=64))
    assert len(run(engine, [([1] * 64, pooled(LAST))])[0]) == 4 * HIDDEN_WIDTH
    with pytest.raises(CapacityError, match="65 tokens"):
        engine.submit([1] * 65, pooled(LAST))


@pytest.mark.parametrize("pooling", [MEAN, LAST, LOGITS])
def test_numbers_that_are_none_end_that_request_alone(pooling):
    class Damaged(FakeExecutable):
        def headless(self):
            hidden = super().headless()
            hidden.broken = True
            return hidden

        def logits(self):
            rows = super().logits()
            rows[[first == 9 for _, first in self.rows]] = np.nan
            return rows

    engine = LocalEngine(Damaged())
    bad, good = engine.submit([9, 1, 1], pooled(pooling)), engine.submit([1, 2], pooled(pooling))
    events = {}
    while engine.has_work:
        events |= {event.request_id: event for event in engine.step()}
    assert events[bad].finish_reason == "error"
    assert "not numbers" in events[bad].error
    assert events[good].vector == alone([1, 2], pooled(pooling))
    check_pages(engine.state.cache, [])


def test_a_step_that_fails_ends_the_request_that_it_fails_for():
    toy = FakeExecutable()
    toy.fail_on_id = 9
    engine = LocalEngine(toy)
    answers = SamplingParams(temperature=0, max_tokens=5)
    requests = [([1, 2], pooled(MEAN)), ([9, 1], pooled(MEAN)), ([2, 1], answers), ([1, 1, 1], pooled(LAST))]
    names = [engine.submit(*request) for request in requests]
    ends, ids = {}, []
    while engine.has_work:
        for event in engine.step():
            ids += event.ids
            if event.finish_reason:
                ends[event.request_id] = event
    assert [ends[name].finish_reason for name in names] == ["stop", "error", "length", "stop"]
    assert ends[names[0]].vector == alone(*requests[0])
    assert ends[names[3]].vector == alone(*requests[3])
    assert ids == alone(*requests[2])


def test_what_cannot_be_pooled_is_refused_by_name():
    for fields in ({"kind": "cls"}, {"kind": "mean", "ids": (1,)}):
        with pytest.raises(RequestError, match="pooling"):
            Pooling(**fields)
    for field in ({"n": 2}, {"logprobs": 1}, {"stop": ("a",)}):
        with pytest.raises(RequestError, match=next(iter(field))):
            SamplingParams(pooling=MEAN, **field)

    class LogitsAlone(FakeExecutable):
        headless = None

    engine = LocalEngine(LogitsAlone())
    assert not engine.gives_hidden
    with pytest.raises(UnsupportedError, match="no hidden states"):
        engine.submit([1, 2], pooled(MEAN))
    assert run(engine, [([1, 2], pooled(LOGITS))]) == [alone([1, 2], pooled(LOGITS))]
    with pytest.raises(RequestError, match="id 50 is not in the vocabulary"):
        engine.submit([1], pooled(Pooling("logits", (50,))))


def test_embeddings_have_length_one_whole_and_cut():
    vector = np.array([3.0, 4.0, 12.0], np.float32).tobytes()
    assert embedding(vector).tolist() == np.array([3 / 13, 4 / 13, 12 / 13], np.float32).tolist()
    assert embedding(vector, 2).tolist() == np.array([0.6, 0.8], np.float32).tolist()
    assert embedding(bytes(8)).tolist() == [0.0, 0.0]
    assert vector_bytes(vector_numbers(vector)) == vector
    for dimensions in (0, 4):
        with pytest.raises(RequestError, match="from 1 to 3"):
            embedding(vector, dimensions)
    for first, second, expected in ((0, 0, 0.5), (200, -200, 1.0), (-200, 200, 0.0), (1, 0, 0.7310585786300049)):
        assert probability(np.array([first, second], np.float32).tobytes()) == pytest.approx(expected)


@pytest.mark.usefixtures("fakes_everywhere")
def test_another_process_gives_the_same_vectors_also_after_deaths_and_aborts():
    requests = [([1 + i % 3] * (5 + i), pooled((MEAN, LAST, LOGITS)[i % 3])) for i in range(9)]
    expected = [alone(*request) for request in requests]

    def engine():
        spec = EngineSpec(source="toy", options={"step_seconds": 0.01}, factory="engine_fakes:load_fake")
        return RemoteEngine(spec, backoff=0.01, max_restarts=2)

    async def vector(stream):
        async for event in stream:
            if event.vector is not None:
                return event.vector
        return None

    async def program():
        replicas = EngineReplicas([engine(), engine()])
        await replicas.start()
        try:
            streams = [await replicas.submit(*request) for request in requests]
            replicas.engines[0]._worker.kill()
            found = await asyncio.gather(*map(vector, streams))
            long = await replicas.submit([1] * 500, pooled(MEAN))
            long.abort()
            assert await vector(long) is None
            await until(lambda: replicas.stats().pages_used == 0)
            return found
        finally:
            await replicas.close()

    assert asyncio.run(program()) == expected


def test_a_pooling_that_is_none_is_refused_with_its_field():
    for make in (lambda: Pooling("sum"), lambda: Pooling("first", (1,)), lambda: Pooling("mean", (1,))):
        with pytest.raises(RequestError, match=r"^pooling: ") as refused:
            make()
        assert (refused.value.status, refused.value.code, refused.value.param) == (400, "invalid_value", "pooling")


@pytest.mark.parametrize(("dimensions", "taken"), [(0, False), (1, True), (3, True), (4, False), (None, True)])
def test_a_vector_is_cut_to_dimensions_that_it_has(dimensions, taken):
    vector = vector_bytes(array("f", [3.0, 4.0, 12.0]))
    if not taken:
        with pytest.raises(RequestError, match=f"dimensions: {dimensions} is not from 1 to 3") as refused:
            embedding(vector, dimensions)
        assert (refused.value.status, refused.value.param) == (400, "dimensions")
        return
    numbers = np.array([3.0, 4.0, 12.0][:dimensions])
    assert embedding(vector, dimensions).tolist() == pytest.approx((numbers / np.linalg.norm(numbers)).tolist())


def test_a_vector_too_short_for_float32_stays_as_it_is():
    least = 2.0**-126  # with all its digits
    for numbers, scaled in (([least, 0.0], [1.0, 0.0]), ([least / 2, 0.0], [least / 2, 0.0]), ([0.0, 0.0], [0.0, 0.0])):
        assert embedding(vector_bytes(array("f", numbers))).tolist() == scaled


def test_an_angle_and_a_probability_at_their_ends():
    one, other, none = (vector_bytes(array("f", numbers)) for numbers in ([3.0, 4.0], [4.0, -3.0], [0.0, 0.0]))
    back = vector_bytes(array("f", [-6.0, -8.0]))
    assert [cosine(one, each) for each in (one, other, back, none)] == [1.0, 0.0, -1.0, 0.0]
    assert cosine(none, none) == 0.0
    axis, short = vector_bytes(array("f", [1.0, 0.0])), vector_bytes(array("f", [0.25, 0.0]))
    assert cosine(one, axis) == cosine(axis, one) == cosine(one, short) == pytest.approx(0.6)
    assert cosine(short, short) == 1.0
    for number in np.random.default_rng(3).standard_normal((200, 3)).astype(np.float32):
        vector = vector_bytes(array("f", number))
        assert 1 - 1e-6 < cosine(vector, vector) <= 1.0
        assert -1.0 <= cosine(vector, vector_bytes(array("f", -number))) < -1 + 1e-6
    for first, second, expected in (
        (0.0, 0.0, 0.5),
        (1000.0, 0.0, 1.0),
        (-1000.0, 0.0, 0.0),
        (-1.0, 1.0, 1 / (1 + np.exp(2))),
    ):
        assert probability(vector_bytes(array("f", [first, second]))) == pytest.approx(expected)
        assert probability(vector_bytes(array("f", [second, first]))) == pytest.approx(1 - expected)
