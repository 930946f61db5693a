"""Which engine a request goes to: least to compute before it and for it, in tokens."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roofline.engine.events import Event
from roofline.engine.process.dispatch import MAX_PAGES, CachedPages, Candidate, choose, keys_of
from roofline.engine.process.messages import EngineSpec
from roofline.engine.process.remote import RemoteEngine
from roofline.engine.process.stream import ANSWER_TOKENS, EventStream
from roofline.ops.batch import PAGE_TOKENS

PROMPT = list(range(10 * PAGE_TOKENS))


class Engine(RemoteEngine):
    """One that is never started, with requests that nobody computes."""

    def __init__(self, pid=1, num_pages=1000, state_slots=0):
        super().__init__(EngineSpec(source="toy"))
        self.description = SimpleNamespace(pid=pid, num_pages=num_pages, state_slots=state_slots)

    def open(self, uncomputed, answers=1):
        stream = EventStream(self.abort, "", answers, uncomputed)
        self.requests[str(len(self.requests))] = SimpleNamespace(stream=stream)
        return stream


def candidates(count=2, **settings):
    return [Candidate(Engine(pid + 1, **settings)) for pid in range(count)]


def send(among, prompt, salt="", turn=1):
    keys = keys_of(prompt, salt)
    chosen, uncomputed = choose(among, prompt, keys)
    chosen.record(chosen.engine.open(uncomputed), keys, uncomputed, turn)
    return chosen, uncomputed


def test_the_least_to_compute_is_chosen_and_equal_ones_take_turns():
    a, b = candidates()
    a.engine.open(500)
    assert send([a, b], PROMPT)[0] is b
    for each in (a, b):
        each.engine.requests.clear()
    turns = []
    for turn in range(2, 6):
        chosen, _ = send([a, b], [turn] * 20, turn=turn)
        turns.append(chosen)
        chosen.engine.requests.clear()
    assert turns == [a, b, a, b]


def test_outstanding_is_what_is_left_of_prompts_and_a_bit_for_each_answer():
    (a,) = candidates(1)
    stream = a.engine.open(100, answers=2)
    assert a.engine.outstanding == 100 + 2 * ANSWER_TOKENS
    stream.deliver(Event("", 0, [7]))
    assert a.engine.outstanding == 2 * ANSWER_TOKENS
    stream.deliver(Event("", 1, [7], finish_reason="length"))
    assert a.engine.outstanding == ANSWER_TOKENS


def test_a_prompt_goes_where_its_pages_are_until_waiting_takes_longer_than_computing():
    a, b = candidates()
    assert send([a, b], PROMPT) == (a, len(PROMPT))
    a.engine.requests.clear()
    longer = [*PROMPT, 1, 2, 3]
    assert choose([b, a], longer, keys_of(longer, "")) == (a, 3)
    a.engine.open(len(PROMPT) - ANSWER_TOKENS - 1)
    assert choose([b, a], longer, keys_of(longer, ""))[0] is a
    a.engine.open(2 - ANSWER_TOKENS)
    assert choose([b, a], longer, keys_of(longer, "")) == (b, len(longer)), "one token more there than it saves"


def test_with_recurrent_state_pages_count_up_to_the_last_snapshot():
    a, b = candidates(state_slots=3)
    first, second, third = (PROMPT[:100] + [tail] * 60 for tail in (1, 2, 3))
    assert send([a], first) == (a, 160)
    a.engine.requests.clear()
    assert choose([b, a], first, keys_of(first, ""))[1] == 160 - 128, "the prompt's last one"
    assert send([a], second) == (a, 160), "96 tokens of pages, and no snapshot among them"
    assert send([a], third) == (a, 160 - 64), "which that one has taken"
    assert a.reusable(keys_of(second, "")) == 8
    assert a.reusable(keys_of(first, "")) == 4, "of three slots it has had the one used longest ago"
    assert b.reusable(keys_of(first, "")) == 0


def test_tenants_and_fresh_processes_share_nothing_and_the_last_token_is_always_computed():
    a, b = candidates()
    send([a, b], PROMPT, salt="one")
    assert a.uncomputed(PROMPT, keys_of(PROMPT, "one")) == 1
    assert a.uncomputed(PROMPT, keys_of(PROMPT, "two")) == len(PROMPT)
    a.engine.description.pid = 77
    assert a.uncomputed(PROMPT, keys_of(PROMPT, "one")) == len(PROMPT)


def test_no_more_pages_are_remembered_than_the_cache_has_and_the_first_go_last():
    pages, keys = CachedPages(4), keys_of(PROMPT, "")
    pages.add(keys)
    assert len(pages) == 4
    assert pages.leading(keys) == 4
    other = keys_of([5] * 32, "")
    pages.add(other)
    assert (pages.leading(other), pages.leading(keys)) == (2, 2)
    assert CachedPages(1 << 30)._size == MAX_PAGES


@pytest.mark.parametrize("length", [1, PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1])
def test_pages_are_full_ones(length):
    assert len(keys_of(list(range(length)), "")) == length // PAGE_TOKENS


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.booleans()), max_size=40))
def test_nobody_is_chosen_who_has_more_to_do(requests):
    """Prompts of few kinds of pages, some done at once: the chosen one is never later than another would have been."""
    among = candidates(3, num_pages=8)
    for turn, (pages, done) in enumerate(requests):
        prompt = [page for page in pages for _ in range(PAGE_TOKENS)]
        keys = keys_of(prompt, "")
        ends = [each.engine.outstanding + each.uncomputed(prompt, keys) for each in among]
        chosen, uncomputed = send(among, prompt, turn=turn)
        assert ends[among.index(chosen)] == min(ends)
        assert 1 <= uncomputed <= len(prompt)
        assert all(len(each.pages) <= 8 for each in among)
        if done:
            chosen.engine.requests.clear()
