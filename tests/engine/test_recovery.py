"""Which requests a fresh process is sent after deaths: whoever kills is found, nobody else is blamed."""

import math
import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.engine.events import Event, TokenLogprob, Usage
from roofline.engine.params import SamplingParams
from roofline.engine.process.recovery import CLEARING_IDS, MAX_DEATHS, OpenRequest, Recovery
from roofline.engine.process.stream import EventStream

LENGTH = 8 * CLEARING_IDS  # of all answers


class Engines:
    """Processes, one after the other, that answer all that they were sent with an id a step, and die of some of it.

    deadly: for each of some requests, the length of its answer at which it kills whoever computes it.
    deadly_ids: for each of some requests, how many of its ids a process gives and then dies.
    """

    def __init__(self, deadly, deadly_ids=None):
        self.recovery, self.deadly, self.deaths = Recovery(), deadly, 0
        self.deadly_ids = deadly_ids or {}
        self.computed = {}  # by request: its answers' ids so far, as the process knows them
        self.streams, self.told = {}, {}

    def open(self, name, n=1):
        stream = self.streams[name] = EventStream(self.recovery.abort, name, n)
        params = SamplingParams(n=n, seed=7, max_tokens=LENGTH)
        self.recovery.add(OpenRequest(array("i", [1, 2, 3]), params, [], "", stream))
        self.send()

    def send(self):
        for message in self.recovery.due():
            assert message.request_id not in self.computed, "it has this one"
            assert (message.ids, message.params.seed) == ([1, 2, 3], 7)
            self.computed[message.request_id] = message.answers

    def step(self):
        lengths = [(name, len(ids)) for name, answers in self.computed.items() for ids in answers.values()]
        fresh = [(name, self.recovery.requests[name].fresh_ids) for name in self.computed]
        if self.deadly.items() & set(lengths) or self.deadly_ids.items() & set(fresh):
            return self.die()
        for name, answers in list(self.computed.items()):
            for index, ids in list(answers.items()):
                ids.append(100 * index + len(ids))
                ended = len(ids) == LENGTH
                self.recovery.take(Event(name, index, ids[-1:], finish_reason="length" if ended else None))
                if ended:
                    del answers[index]
            if not answers:
                del self.computed[name]
        self.send()

    def die(self):
        self.deaths += 1
        self.computed = {}
        self.recovery.outlive("it died")
        self.send()

    def run(self, limit=2000):
        """Until all have ended; the events of each."""
        steps = 0
        while self.recovery.requests:
            self.step()
            steps += 1
            assert steps < limit, "it does not come to an end"
        assert self.recovery.due() == []
        return {name: list(stream._events) for name, stream in self.streams.items()}


def check_complete(events, n=1):
    for index in range(n):
        ids = [token for event in events if event.index == index for token in event.ids]
        assert ids == [100 * index + i for i in range(LENGTH)]
        assert [event.finish_reason for event in events if event.index == index][-1] == "length"


def check_blamed(events, length):
    assert [event.finish_reason for event in events][-1] == "error"
    assert sum(len(event.ids) for event in events) == length
    assert events[-1].error == "it died; this request has ended 3 in a row that computed nothing else"
    assert events[-1].usage == Usage(3, length, 0, 7)


@pytest.mark.parametrize("place", [0, 1, 31, 40, 63])
@pytest.mark.parametrize("length", [0, 3])
def test_of_sixty_four_the_one_that_kills_is_found_in_twelve_deaths(place, length):
    engines = Engines({str(place): length})
    for i in range(64):
        engines.open(str(i))
    for name, events in engines.run().items():
        check_blamed(events, length) if name == str(place) else check_complete(events)
    assert engines.deaths <= 2 * MAX_DEATHS + 6


@settings(max_examples=200, deadline=None)
@given(
    answers=st.lists(st.integers(1, 3), min_size=1, max_size=40),
    deadly=st.dictionaries(st.integers(0, 39), st.integers(0, LENGTH - 1), max_size=4),
    killings=st.integers(0, 8),
    late=st.integers(0, 40),
    seed=st.integers(0, 1000),
)
def test_whoever_kills_ends_and_all_others_are_answered(answers, deadly, killings, late, seed):
    """Also with requests that come later, and processes that somebody else kills: after those have given an id."""
    rng = random.Random(seed)
    engines = Engines({str(i): length for i, length in deadly.items() if i < len(answers)})
    for i, n in enumerate(answers):
        engines.open(str(i), n)
        if i >= late:
            engines.step()
    for _ in range(killings):
        engines.step()
        if rng.random() < 0.5:
            engines.die()
    events = engines.run()
    blamed = {name for name, told in events.items() if told[-1].finish_reason == "error"}
    assert blamed <= engines.deadly.keys() | ({*events} if killings >= MAX_DEATHS else set())
    assert blamed >= engines.deadly.keys()
    for name, told in events.items():
        if name not in blamed:
            check_complete(told, answers[int(name)])
    found = max(1, len(engines.deadly)) * (2 * MAX_DEATHS + math.ceil(math.log2(len(answers) + 1)) + 1)
    assert engines.deaths <= found + killings


def test_ten_processes_killed_before_their_first_id_blame_nobody_of_sixty_four():
    engines = Engines({})
    for i in range(64):
        engines.open(str(i))
    for _ in range(10):
        engines.die()
    for events in engines.run().values():
        check_complete(events)


def test_who_gives_some_ids_between_two_deaths_is_not_to_blame():
    engines = Engines({})
    engines.open("a")
    for _ in range(3):
        engines.die()
        engines.die()
        for _ in range(CLEARING_IDS):
            engines.step()
    check_complete(engines.run()["a"])
    assert engines.deaths == 6


@pytest.mark.parametrize("ids", range(CLEARING_IDS))
def test_who_kills_each_process_after_a_few_ids_is_found(ids):
    engines = Engines({}, {"5": ids})
    for i in range(16):
        engines.open(str(i))
    for name, events in engines.run().items():
        if name == "5":
            assert events[-1].finish_reason == "error"
            assert "has ended 3 in a row" in events[-1].error
        else:
            check_complete(events)
    assert engines.deaths <= 2 * MAX_DEATHS + 4


def test_once_somebody_is_blamed_the_others_are_tried_together():
    engines = Engines({"0": 0})
    for i in range(32):
        engines.open(str(i))
    while "0" in engines.recovery.requests:
        engines.step()
    assert len(engines.computed) == 31


def test_a_group_that_is_cleared_is_followed_by_as_many_others_and_the_last_by_all():
    engines = Engines({})
    for i in range(12):
        engines.open(str(i))
    for _ in range(MAX_DEATHS):
        engines.die()
    engines.open("new")
    assert sorted(engines.computed, key=int) == [str(i) for i in range(6)]
    engines.die()
    assert sorted(engines.computed, key=int) == ["0", "1", "2"]
    for count in (3, 6, 9, 12):
        assert sorted(engines.computed, key=int) == [str(i) for i in range(count)], "the new one waits for all suspects"
        for _ in range(CLEARING_IDS):
            engines.step()
    assert "new" in engines.computed
    engines.run()


def test_what_is_aborted_while_it_waits_ends_at_once_and_where_it_is_computed_by_the_process():
    engines = Engines({})
    for name in "abcd":
        engines.open(name, n=2)
    engines.step()
    for _ in range(MAX_DEATHS):
        engines.die()
    assert sorted(engines.computed) == ["a", "b"]
    assert engines.recovery.abort("a", 1), "the process is to be told"
    assert not engines.recovery.abort("c", None)
    assert not engines.recovery.abort("d", 0)
    assert not engines.recovery.abort("e", None)
    last = [event for event in engines.streams["c"]._events if event.finish_reason]
    assert [(event.index, event.finish_reason, event.usage[:2]) for event in last] == [
        (0, "abort", (3, 1)),
        (1, "abort", (3, 1)),
    ]
    assert [event.index for event in engines.streams["d"]._events if event.finish_reason] == [0]
    engines.die()  # before it could say that answer 1 of a has ended
    (aborted,) = [event for event in engines.streams["a"]._events if event.finish_reason]
    assert (aborted.index, aborted.finish_reason) == (1, "abort")
    assert engines.computed.keys() == {"a"}
    assert engines.computed["a"] == {0: [0]}
    events = engines.run()
    check_complete(events["b"], 2)
    assert [event.finish_reason for event in events["d"] if event.finish_reason] == ["abort", "length"]


def test_where_no_process_comes_any_more_all_end_with_the_reason():
    engines = Engines({})
    engines.open("a", n=2)
    engines.step()
    engines.recovery.fail("given up")
    assert engines.recovery.requests == {}
    assert [(event.index, event.error) for event in engines.streams["a"]._events][2:] == [
        (0, "given up"),
        (1, "given up"),
    ]
    assert engines.recovery.due() == []


def test_a_stream_that_was_sent_again_has_all_to_compute_again():
    engines = Engines({})
    engines.open("a", n=2)
    engines.step()
    engines.step()
    assert engines.streams["a"].uncomputed == 0
    engines.die()
    assert engines.streams["a"].uncomputed == 3 + 2 * 2


def test_log_probabilities_of_a_prompt_that_have_come_are_not_told_again():
    recovery = Recovery()
    stream = EventStream(recovery.abort, "a", 2)
    params = SamplingParams(n=2, seed=7, max_tokens=LENGTH, prompt_logprobs=0)
    recovery.add(OpenRequest(array("i", range(9)), params, [], "", stream))
    assert [message.scored for message in recovery.due()] == [0]
    for token in range(1, 6, 2):
        told = [TokenLogprob(token, -1.0), TokenLogprob(token + 1, -1.0)]
        recovery.take(Event("a", 0, [], prompt_logprobs=told))
    recovery.outlive("it died")
    assert [message.scored for message in recovery.due()] == [6]
