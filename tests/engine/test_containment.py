"""What one request breaks ends that request alone: the others get the ids that they get alone, bit for bit."""

from functools import cache

import pytest
from engine_fakes import FakeExecutable, QueueingFake, check_pages
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.engine import step
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.engine.schedule import rows
from roofline.engine.schedule.plan import StepPlan
from roofline.engine.schedule.sequence import Request

POISON = 13
# Nobody says the poison by himself.
SAMPLED = {
    "max_tokens": 30,
    "logit_bias": {POISON: -100.0},
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logprobs": 3,
}
PROMPTS = {f"good {i}": [i + 1] * (5 + 9 * i) for i in range(6)} | {"poison": [POISON, 2, 3]}
EXECUTABLES = pytest.mark.parametrize("executable_class", [FakeExecutable, QueueingFake])


def params(name):
    stops = range(20, 30) if name in ("good 3", "good 4") else ()
    return SamplingParams(seed=len(name), n=1 + ("2" in name), stop_token_ids=tuple(stops), **SAMPLED)


def answers(engine):
    """(ids and log-probabilities by answer, last events by answer) of all that is computed."""
    told, last = {}, {}
    while engine.has_work:
        for event in engine.step():
            key = event.request_id, event.index
            assert key not in last, "an event after the last"
            told.setdefault(key, []).extend(event.logprobs or [])
            if event.finish_reason:
                last[key] = event
    return told, last


@cache
def alone(name):
    engine = LocalEngine(FakeExecutable())
    engine.submit(PROMPTS[name], params(name), request_id=name)
    return answers(engine)[0]


def served(engine, names=PROMPTS):
    for name in names:
        engine.submit(PROMPTS[name], params(name), request_id=name)
    return answers(engine)


def check_contained(engine, error):
    """The poison has one error that says why; all others are as alone, and no page is lost. What the poison got."""
    told, last = served(engine)
    assert last["poison", 0].finish_reason == "error"
    assert error in last["poison", 0].error
    assert last["poison", 0].usage.prompt_tokens == 3
    for name in set(PROMPTS) - {"poison"}:
        assert {key: told[key] for key in told if key[0] == name} == alone(name)
        assert last[name, 0].finish_reason == ("stop" if name in ("good 3", "good 4") else "length")
    check_pages(engine.state.cache, [])
    assert engine.stats().finished == {"error": 1, "length": 5, "stop": 2}
    return [entry.id for entry in told["poison", 0]]


def test_a_part_of_a_plan_is_the_plan_of_its_sequences():
    def sequence(ids, computed, pages, draft=()):
        (each,) = Request("a", [1] * ids, SamplingParams(), frozenset(), 9, 0, b"").sequences
        each.computed, each.pages, each.draft = computed, list(range(pages)), list(draft)
        return each

    first, second = sequence(5, 4, 1, [7, 7]), sequence(33, 32, 3)
    chunk, last_chunk = sequence(90, 0, 6), sequence(20, 10, 2)
    plan = StepPlan()
    for each, count in ((first, 1), (second, 1), (chunk, 50), (last_chunk, 10)):
        plan.add(each, count)
    plan.decodes = 2
    plan.counts[0] += 2
    plan.tokens, plan.drafted = plan.tokens + 2, 2
    everything = plan.part([last_chunk, chunk, second, first])
    assert everything == plan
    assert plan.part([chunk, second]) == StepPlan(
        [second, chunk], [1, 50], [second], tokens=51, table_pages=9, decodes=1, drafted=0
    )
    assert plan.part([first, last_chunk]) == StepPlan(
        [first, last_chunk], [3, 10], [first, last_chunk], tokens=13, table_pages=3, decodes=1, drafted=2
    )


@EXECUTABLES
def test_a_prompt_that_makes_steps_raise_ends_alone(executable_class):
    executable = executable_class()
    executable.fail_on_id = POISON
    assert check_contained(LocalEngine(executable), "RuntimeError: the toy cannot bear id 13") == []


@EXECUTABLES
def test_an_answer_that_makes_steps_raise_ends_alone(executable_class):
    def break_fifth(toy):
        batch = toy.batch
        for s in range(batch.segments):
            first_page = batch.pages[batch.page_start[s]]
            if batch.context_len[s] == 7 and toy.store[first_page, 0, 1] == POISON:
                raise RuntimeError("not this position")

    executable = executable_class()
    executable.before_forward = break_fifth
    assert len(check_contained(LocalEngine(executable), "RuntimeError: not this position")) == 4


@EXECUTABLES
def test_work_of_the_host_for_one_request_ends_that_request(executable_class, monkeypatch):
    class Broken(rows.RowState):
        def __init__(self, sequence):
            if sequence.request.id == "poison":
                raise ValueError("no such row")
            super().__init__(sequence)

    monkeypatch.setattr(rows, "RowState", Broken)
    assert check_contained(LocalEngine(executable_class()), "ValueError: no such row") == []


@EXECUTABLES
@pytest.mark.parametrize("when", [2, 29])
def test_an_event_that_cannot_be_made_ends_its_request(executable_class, when, monkeypatch):
    make = step._events

    def broken(sequence, *rest):
        if sequence.request.id == "poison" and sequence.generated > when:
            raise ValueError("no such event")
        return make(sequence, *rest)

    monkeypatch.setattr(step, "_events", broken)
    assert len(check_contained(LocalEngine(executable_class()), "ValueError: no such event")) == when


@EXECUTABLES
def test_logits_that_are_no_numbers_end_their_request(executable_class):
    executable = executable_class()
    executable.bad_rows = {POISON}
    assert check_contained(LocalEngine(executable), "the logits are not numbers") == []


@settings(max_examples=40, deadline=None)
@given(
    executable_class=st.sampled_from([FakeExecutable, QueueingFake]),
    speculate=st.sampled_from(["off", "ngram"]),
    num_pages=st.integers(12, 40),
    tokens=st.integers(4, 64),
    order=st.permutations(sorted(PROMPTS)),
    flaky=st.sets(st.integers(1, 60), max_size=10),
)
def test_steps_that_fail_for_a_while_or_for_one_change_no_other_answer(
    executable_class, speculate, num_pages, tokens, order, flaky
):
    """Also under pre-emption, chunked prompts and drafts; a failure of one forward alone costs nobody anything."""
    executable = executable_class(num_pages=num_pages, tokens=tokens, segments=4, rows=12, max_context=130)
    executable.fail_on_id = POISON

    def sometimes(toy):
        if toy.forwards in flaky and toy.batch.segments > 1:
            raise OSError("not now")

    executable.before_forward = sometimes
    engine = LocalEngine(executable, EngineConfig(speculate=speculate, speculate_always=True))
    told, last = served(engine, order)
    for name in order:
        if name == "poison":
            assert "cannot bear" in last[name, 0].error
            continue
        assert {key: told[key] for key in told if key[0] == name} == alone(name)
    check_pages(engine.state.cache, [])
