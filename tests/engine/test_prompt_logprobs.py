"""Log-probabilities of prompts: the same however the prompt is cut, cached, pre-empted, failed or resumed."""

import numpy as np
import pytest
from engine_fakes import FakeExecutable, QueueingFake
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.common.errors import CapacityError
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams

PROMPT = [(5 * i + 3) % 49 for i in range(75)]  # without id 49


def run(engine):
    """Events of everything that is open: (scores by request, ids by answer, last events by answer)."""
    scores, ids, last = {}, {}, {}
    while engine.has_work:
        for event in engine.step():
            key = event.request_id, event.index
            if event.prompt_logprobs is not None:
                assert event.index == 0
                assert not any(name == event.request_id for name, _ in ids), "the prompt is told before any answer"
                scores.setdefault(event.request_id, []).extend(event.prompt_logprobs)
            if event.ids:
                ids.setdefault(key, []).extend(event.ids)
            if event.finish_reason is not None:
                last[key] = event
    assert engine.state.cache.used == 0
    return scores, ids, last


def plain(prompt, top):
    """By one forward of the whole prompt: (id, its log-probability, the most likely ids) from the second id on."""
    toy = FakeExecutable(tokens=len(prompt), rows=len(prompt))
    toy.batch.header[:4] = len(prompt), 1, len(prompt), -(-len(prompt) // 16)
    toy.batch.ids[: len(prompt)] = prompt
    toy.batch.positions[: len(prompt)] = toy.batch.logit_rows[: len(prompt)] = range(len(prompt))
    toy.batch.seg_start[:2], toy.batch.context_len[0] = (0, len(prompt)), len(prompt)
    pages = int(toy.batch.header[3])
    toy.batch.page_start[:2], toy.batch.pages[:pages] = (0, pages), range(pages)
    toy.forward()
    logprobs = [row - np.log(np.exp(row.astype(np.float64)).sum()) for row in toy.logits()]
    best = [np.argsort(-row, kind="stable")[:top] for row in logprobs]
    return [
        (token, pytest.approx(row[token], abs=1e-6), [int(i) for i in ids])
        for token, row, ids in zip(prompt[1:], logprobs, best, strict=False)
    ]


def told(entries):
    return [(entry.id, entry.logprob, [i for i, _ in entry.top]) for entry in entries]


@settings(max_examples=20, deadline=None)
@given(
    toy=st.sampled_from([FakeExecutable, QueueingFake]),
    tokens=st.integers(5, 64),
    rows=st.integers(4, 24),
    num_pages=st.integers(6, 14),
    config=st.sampled_from([{}, {"scheduler": "naive"}, {"speculate": "ngram", "speculate_always": True}]),
    jobs=st.lists(
        st.tuples(st.integers(1, 70), st.sampled_from([None, 0, 3]), st.integers(1, 3)), min_size=1, max_size=6
    ),
)
def test_every_schedule_tells_the_same(toy, tokens, rows, num_pages, config, jobs):
    """Small steps, few rows, too few pages, shared prefixes, other requests beside: the numbers of one forward, and the
    answers are those of a request that does not ask."""

    def make():
        sizes = {"tokens": tokens, "segments": 4, "rows": rows, "num_pages": num_pages}
        return LocalEngine(toy(**sizes), EngineConfig(**config))

    results = []
    for asks in (True, False):
        engine = make()
        for number, (length, top, n) in enumerate(jobs):
            params = {"temperature": 0.8, "seed": number, "max_tokens": 6, "n": n, "repetition_penalty": 1.1}
            params |= {"logit_bias": {3: 2.0}, "logprobs": 1, "prompt_logprobs": top if asks else None}
            engine.submit(PROMPT[:length], SamplingParams(**params), request_id=str(number))
        results.append(run(engine))
    (scores, ids, last), (none, plain_ids, plain_last) = results
    assert ids == plain_ids
    assert {key: event.logprobs for key, event in last.items()} == {
        key: event.logprobs for key, event in plain_last.items()
    }
    assert none == {}
    for number, (length, top, _) in enumerate(jobs):
        expected = plain(PROMPT[:length], top) if top is not None else []
        assert told(scores.get(str(number), [])) == expected


@pytest.mark.parametrize("toy", [FakeExecutable, QueueingFake])
def test_a_prompt_is_told_without_an_answer_also_where_it_fills_the_context(toy):
    engine = LocalEngine(toy(tokens=20, max_context=len(PROMPT)))
    params = {"max_tokens": 0, "n": 2, "prompt_logprobs": 1, "logprobs": 1}
    engine.submit(PROMPT, SamplingParams(**params), request_id="a")
    engine.submit(PROMPT[:7], SamplingParams(temperature=0, max_tokens=5), request_id="beside")
    scores, ids, last = run(engine)
    assert told(scores["a"]) == plain(PROMPT, 1)
    assert list(ids) == [("beside", 0)]
    for index in range(2):
        event = last["a", index]
        assert (event.ids, event.finish_reason, event.stop_id) == ([], "length", None)
        assert event.usage.completion_tokens == 0
    with pytest.raises(CapacityError):
        engine.submit([*PROMPT, 1], SamplingParams(max_tokens=0))


def test_a_cached_prefix_is_computed_again():
    """And later requests take it from the cache as before."""
    engine = LocalEngine(FakeExecutable())
    engine.submit(PROMPT, SamplingParams(max_tokens=1), request_id="plain")
    run(engine)
    engine.submit(PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=1), request_id="a")
    scores, _, last = run(engine)
    assert told(scores["a"]) == plain(PROMPT, 1)
    assert last["a", 0].usage.cached_tokens == 0
    engine.submit(PROMPT, SamplingParams(max_tokens=1), request_id="b")
    _, _, last = run(engine)
    assert last["b", 0].usage.cached_tokens == 64


def test_a_fresh_engine_goes_on_where_the_last_was():
    for scored in (0, 1, 17, 40, 74):
        engine = LocalEngine(FakeExecutable(tokens=20))
        engine.submit(PROMPT, SamplingParams(max_tokens=2, prompt_logprobs=2), {0: []}, scored, request_id="a")
        scores, ids, _ = run(engine)
        assert told(scores.get("a", [])) == plain(PROMPT, 2)[scored:]
        assert len(ids["a", 0]) == 2


def test_a_step_that_fails_is_computed_in_parts():
    """Only the request that cannot be computed ends, and nothing is told twice."""
    toy = FakeExecutable(tokens=128, rows=128)
    toy.fail_on_id = 49
    engine = LocalEngine(toy)
    for name, prompt in (("good", PROMPT[:30]), ("bad", [49, 1, 2]), ("other", PROMPT[1:30])):
        engine.submit(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0), request_id=name)
    scores, _, last = run(engine)
    assert [last[name, 0].finish_reason for name in ("good", "bad", "other")] == ["length", "error", "length"]
    assert told(scores["good"]) == plain(PROMPT[:30], 0)
    assert told(scores["other"]) == plain(PROMPT[1:30], 0)


@pytest.mark.parametrize("toy", [FakeExecutable, QueueingFake])
def test_logits_that_are_no_numbers_end_the_request_alone(toy):
    executable = toy(tokens=24, rows=24)
    executable.bad_rows = {9}
    engine = LocalEngine(executable)
    for name, prompt in (("bad", [9, 1, 2, 3]), ("long", [9, *PROMPT]), ("good", PROMPT[:8])):
        engine.submit(prompt, SamplingParams(max_tokens=3, prompt_logprobs=0), request_id=name)
    scores, ids, last = run(engine)
    assert [last[name, 0].finish_reason for name in ("bad", "long", "good")] == ["error", "error", "length"]
    assert "not numbers" in last["long", 0].error
    assert set(scores) == {"good"}
    assert len(ids["good", 0]) == 3


def test_digests_of_answers_are_those_of_their_own_rows():
    digests = []
    for top in (None, 2):
        engine = LocalEngine(FakeExecutable(tokens=24, rows=24))
        engine.submit(PROMPT[:30], SamplingParams(max_tokens=3, seed=1, digests=True, prompt_logprobs=top))
        engine.submit(PROMPT[:5], SamplingParams(max_tokens=3, seed=2, digests=True))
        told = {}
        while engine.has_work:
            for event in engine.step():
                told[event.usage] = told.get(event.usage, []) + (event.digests or [])
        digests.append(sorted(digest for each in told.values() for digest in each))
    assert digests[0] == digests[1]
    assert len(digests[0]) == 6
