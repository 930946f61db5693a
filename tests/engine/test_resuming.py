"""An engine that is given the ids so far of answers goes on with them: the same ids as in one go."""

import pytest
from engine_fakes import FakeExecutable, QueueingFake
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.common.errors import CapacityError
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams, fresh_seed
from roofline.engine.process import main
from roofline.engine.process.messages import Submit
from tests.engine.test_scheduling import CONFIGS, NAIVE, REQUESTS, Watched


@settings(max_examples=30, deadline=None)
@given(
    requests=REQUESTS,
    config=CONFIGS,
    speculate=st.sampled_from(["off", "ngram"]),
    num_pages=st.integers(6, 20),
    toy=st.sampled_from([FakeExecutable, QueueingFake]),
    cuts=st.lists(st.integers(0, 23), min_size=24, max_size=24),
)
def test_answers_go_on_from_wherever_they_were_cut(requests, config, speculate, num_pages, toy, cuts):
    """Whatever the schedule: of each answer some ids are known, of those that are known to their end nothing comes."""
    at_once = Watched(NAIVE)
    for i, (ids, params) in enumerate(requests):
        at_once.submit(ids, params, request_id=str(i))
    reference = at_once.run()
    config = EngineConfig(**{**vars(config), "speculate": speculate, "speculate_always": True})
    watched = Watched(config, toy, num_pages=num_pages, rows=32)
    cut = iter(cuts)
    rest = {}
    for i, (ids, params) in enumerate(requests):
        answers = {}
        for index in range(params.n):
            full, at = reference[str(i), index], next(cut)
            if at < len(full):
                answers[index], rest[str(i), index] = full[:at], full[at:]
        if answers:
            watched.resume(str(i), ids, params, answers)
    assert watched.run() == rest
    for (name, index), last in watched.ended.items():
        ids, _ = requests[int(name)]
        assert last.usage.prompt_tokens == len(ids)
        assert last.usage.completion_tokens == len(reference[name, index])
        assert last.usage.cached_tokens <= len(ids)
        expected = at_once.ended[name, index]
        assert (last.finish_reason, last.stop_id) == (expected.finish_reason, expected.stop_id)


@pytest.mark.parametrize("at", [0, 1, 9, 10])
def test_what_counts_ids_counts_those_of_before(at):
    """The least length and the penalties: bans are lifted, and ids held against each other, from the answer's start."""
    params = SamplingParams(
        temperature=0.7,
        seed=3,
        max_tokens=30,
        min_tokens=10,
        stop_token_ids=tuple(range(25)),
        presence_penalty=1.5,
        frequency_penalty=1.0,
        logprobs=2,
    )

    def run(answers):
        engine = LocalEngine(FakeExecutable())
        engine.submit([1, 2, 3], params, answers, request_id="a")
        entries, last = [], None
        while engine.has_work:
            for event in engine.step():
                entries += event.logprobs or []
                last = event
        return entries, last

    entries, last = run(None)
    ids = [entry.id for entry in entries]
    assert len(ids) >= 11
    assert not set(ids[:10]) & set(range(25))
    again, last_again = run({0: ids[:at]})
    assert again == entries[at:]
    assert (last_again.stop_id, last_again.finish_reason) == (last.stop_id, last.finish_reason)


def test_pages_of_an_answer_that_are_found_are_no_cached_prompt():
    engine = LocalEngine(FakeExecutable())
    last = {}
    for name in "ab":
        engine.submit([7] * 20, SamplingParams(seed=1, max_tokens=60), {0: [3] * 40}, request_id=name)
        while engine.has_work:
            last |= {event.request_id: event for event in engine.step() if event.finish_reason}
    assert [last[name].usage.cached_tokens for name in "ab"] == [0, 20]
    assert (engine.stats().prefix_queries, engine.stats().prefix_hits) == (40, 20)


def test_what_cannot_be_taken_is_an_error_of_that_request_alone(monkeypatch):
    engine = LocalEngine(FakeExecutable(num_pages=2))
    params = SamplingParams(seed=1, max_tokens=40, n=3)
    (first, second) = main._submit(engine, Submit("a", [1] * 4, params, [], "", {0: [5], 2: []}))
    assert [(event.index, event.finish_reason) for event in (first, second)] == [(0, "error"), (2, "error")]
    with pytest.raises(CapacityError) as caught:
        engine.submit([1] * 4, params)
    assert first.error == str(caught.value)
    monkeypatch.setattr(engine, "submit", lambda *arguments, **options: 1 / 0)
    (only,) = main._submit(engine, Submit("a", [1], params, [], "", {1: []}))
    assert only.error == "ZeroDivisionError: division by zero"
    assert not engine.has_work


def test_fresh_seeds_differ():
    assert len({fresh_seed() for _ in range(32)}) == 32
