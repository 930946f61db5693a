"""Beam search against the definition, computed from all logits at every step; shared pages; what ends it."""

import asyncio

import numpy as np
import pytest
from engine_fakes import FakeExecutable, loaded_text
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline import LLM, BeamSearchParams
from roofline.common.errors import CapacityError, RequestError
from roofline.engine.beams import BeamSearch, refuse_sampling
from roofline.engine.events import Event, TokenLogprob, Usage
from roofline.engine.params import SamplingParams
from roofline.engine.process.beam_stream import beam_stream
from roofline.engine.process.stream import EventStream
from roofline.ops.batch import Segment

PROMPT = list(range(20))


def log_probabilities(ids):
    toy = FakeExecutable(tokens=128)
    toy.batch.fill([Segment(ids, 0, range(-(-len(ids) // 16)))], [len(ids) - 1])
    toy.forward()
    logits = toy.logits()[0].astype(np.float64)
    return logits - np.log(np.exp(logits).sum())


def plain(prompt, width, longest, ends, penalty, early):
    """transformers' search in its own words: all extensions by every id of the vocabulary, ranked as a whole."""
    running, finished, length = [((), 0.0)], [], 0
    while True:
        extensions = []
        for at, (ids, total) in enumerate(running):
            for token, value in enumerate(log_probabilities([*prompt, *ids])):
                extensions.append((-(total + value), at, token, (*ids, token)))
        extensions.sort()
        length += 1
        hits = [ids[-1] in ends or length == longest for *_, ids in extensions]
        finished += [
            (ids, -loss / length**penalty)
            for (loss, *_, ids), hit in zip(extensions[:width], hits, strict=False)
            if hit
        ]
        finished = sorted(finished, key=lambda each: -each[1])[:width]
        running = [(ids, -loss) for (loss, *_, ids), hit in zip(extensions, hits, strict=True) if not hit][:width]
        full = len(finished) == width
        best = longest if early == "never" and penalty > 0 else length
        if not running or (full and (early is True or running[0][1] / best**penalty <= finished[-1][1])):
            return finished


@settings(max_examples=25, deadline=None)
@given(
    width=st.integers(1, 5),
    longest=st.integers(1, 6),
    ends=st.lists(st.integers(0, 49), max_size=14, unique=True),
    penalty=st.sampled_from([0.0, 1.0, 2.0, -1.0]),
    early=st.sampled_from([True, False, "never"]),
    length=st.integers(1, 20),
)
def test_the_answers_are_those_of_the_definition(width, longest, ends, penalty, early, length):
    model = loaded_text()
    model.tokenizer.eos_ids, before = (), model.tokenizer.eos_ids
    params = BeamSearchParams(
        beam_width=width, max_tokens=longest, length_penalty=penalty, early_stopping=early, stop_token_ids=tuple(ends)
    )
    llm = LLM(model)
    (found,) = llm.beam_search(PROMPT[:length], params)
    model.tokenizer.eos_ids = before
    expected = plain(PROMPT[:length], width, longest, set(ends), penalty, early)
    assert [tuple(answer.ids) for answer in found.answers] == [ids for ids, _ in expected]
    assert [answer.score for answer in found.answers] == pytest.approx([score for _, score in expected], abs=1e-4)
    for answer in found.answers:
        assert answer.finish_reason == ("stop" if answer.ids[-1] in ends else "length")
    assert llm.engine.state.cache.used == 0


def test_beams_share_their_prefix_and_prompts_share_steps():
    """A step computes again of each beam at most a page: the full ones are found."""
    model = loaded_text()
    llm = LLM(model)
    params = BeamSearchParams(beam_width=4, max_tokens=30, ignore_eos=True, logprobs=2, n=2)
    alone = llm.beam_search([1] * 70, params)
    computed = model.executable.tokens_computed
    assert computed <= 70 + 30 * 4 * 17
    steps = model.executable.forwards
    both = llm.beam_search([[1] * 70, [2, 3]], params)
    assert [answer.ids for answer in both[0].answers] == [answer.ids for answer in alone[0].answers]
    assert [output.answers[0].usage.cached_tokens for output in (*alone, *both)] == [0, 64, 0]
    assert model.executable.forwards - steps <= 2 * 30
    (answer, second) = alone[0].answers
    assert [entry.id for entry in answer.logprobs] == answer.ids
    assert sum(entry.logprob for entry in answer.logprobs) / 30 == pytest.approx(answer.score)
    assert {len(entry.top) for entry in answer.logprobs} == {2}
    assert answer.score >= second.score
    assert answer.text == llm.tokenizer.decode(answer.ids)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 20}, "beam_width"),
        ({"beam_width": 2.0}, "beam_width"),
        ({"n": 3}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"length_penalty": 11.0}, "length_penalty"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"early_stopping": 0.0}, "early_stopping"),
        ({"temperature": 0.5}, "temperature"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_refusals(fields, param):
    with pytest.raises(RequestError) as refused:
        BeamSearchParams(**{"beam_width": 2, **fields})
    assert refused.value.param == param


def test_a_temperature_of_0_or_1_asks_for_nothing():
    for temperature in (0.0, 1.0):
        refuse_sampling(SamplingParams(temperature=temperature))
    for temperature in (0.5, 2.0):
        with pytest.raises(RequestError, match="leave it at 0 or 1"):
            refuse_sampling(SamplingParams(temperature=temperature))


def test_what_does_not_fit_is_refused_before_the_first_step():
    model = loaded_text()
    llm = LLM(model)
    with pytest.raises(CapacityError, match="prompt 2 of 2"):
        llm.beam_search([[1], [1] * 500], BeamSearchParams(beam_width=2, max_tokens=30))
    with pytest.raises(RequestError, match="19 beams and 2 ids"):
        llm.beam_search([1], BeamSearchParams(beam_width=19, stop_token_ids=(7,)))
    assert model.executable.forwards == 0


class Engine:
    """Answers each request with two alternatives, or as `last` says; never ends one whose prompt ends with `hangs`."""

    def __init__(self, last=None, hangs=None):
        self.last, self.hangs, self.aborted, self.names = last, hangs, [], []

    async def submit(self, ids, params, *, eos_ids, request_id, salt):
        assert (eos_ids, salt, params.max_tokens) == ((), "mine", 1)
        stream = EventStream(lambda name, _: self.aborted.append(name), request_id, 1)
        self.names.append(request_id)
        if ids[-1] != self.hangs:
            logprobs = [TokenLogprob(5, -0.1, ((5, -0.1), (6, -0.5), (7, -3.0)))]
            usage = Usage(len(ids), 1, 16, 0)
            event = Event(request_id, 0, [5], logprobs, "length", None, None, usage)
            stream.deliver(event if self.last is None else event._replace(**self.last))
        return stream


async def collected(engine):
    search = BeamSearch(BeamSearchParams(beam_width=2, max_tokens=2, n=1), frozenset([7]), 2)
    return [event async for event in beam_stream(engine, [1, 2], search, "r", {"salt": "mine"})]


def test_a_stream_has_one_event_for_each_answer():
    engine = Engine()
    (event,) = asyncio.run(collected(engine))
    assert (event.ids, event.finish_reason, event.index, event.usage) == ([5, 5], "length", 0, Usage(2, 2, 16, 0))
    assert engine.names == ["r-0.0", "r-1.0", "r-1.1"]
    assert engine.aborted == []


def test_a_step_that_fails_ends_the_search():
    engine = Engine({"finish_reason": "error", "error": "no numbers", "logprobs": None})
    (event,) = asyncio.run(collected(engine))
    assert (event.finish_reason, event.error, event.ids) == ("error", "no numbers", [])


def test_who_leaves_ends_what_is_under_way():
    engine = Engine(hangs=6)

    async def leave():
        task = asyncio.create_task(collected(engine))
        while len(engine.names) < 3:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert engine.aborted == ["r-1.1"]
