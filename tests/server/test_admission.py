"""Who begins next: shares in proportion to weights, order within a key, what is refused, and when to come back."""

import asyncio
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.common.errors import RequestError
from roofline.server import admission
from roofline.server.admission import LEAST_AHEAD, LEAST_TOKENS, Pace, Queue
from roofline.server.errors import Overloaded
from roofline.server.keys import USE, Principal
from roofline.server.limits import Limits


def key(name: str, weight: float = 1.0, streams: int | None = None) -> Principal:
    return Principal(name, frozenset({USE}), streams=streams, weight=weight)


def queue_of(queued=10_000, streams=10_000, window=1) -> Queue:
    """A queue of which the engine has LEAST_AHEAD requests at a time."""
    return Queue(Limits(queued=queued, streams=streams), lambda: window)


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(admission, "time", clock)
    return clock


def first_ahead(tickets):
    """The ticket that the engine would begin next: of those it has, the one it was given first."""
    return next((ticket for ticket in tickets if ticket.ahead and ticket.waits), None)


def serve(queue, tickets, tokens: int):
    """Begin and end requests as the engine does, in the order in which it got them, until so many tokens were computed;
    tokens by key."""
    given_over, served = [], {}
    while sum(served.values()) < tokens:
        given_over += [t for t in tickets if t.ahead and t not in given_over]
        ticket = given_over.pop(0)
        tickets.remove(ticket)
        ticket.began()
        ticket.charge(ticket.answer)
        ticket.leave()
        name = ticket.key.principal.name
        served[name] = served.get(name, 0) + ticket.tokens + ticket.answer
        yield ticket, served


sizes = st.integers(LEAST_TOKENS, 400)


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=4),
    scales=st.lists(st.integers(1, 20), min_size=4, max_size=4),
    seed=st.integers(0, 1000),
)
def test_shares_of_keys_that_always_wait_are_in_proportion_to_their_weights(weights, scales, seed):
    """Whatever the sizes of their requests. The error does not grow with time: it is at most what the engine has at a
    time, and one request more."""
    queue, rng, tickets = queue_of(), random.Random(seed), []
    principals = [key(f"k{i}", weight) for i, weight in enumerate(weights)]
    largest = 50 * max(scales) * 2

    def refill():
        for principal, scale in zip(principals, scales, strict=False):
            while sum(t.key.principal is principal and not t.ahead for t in tickets) < 2:
                ticket = queue.enter(principal, rng.randint(LEAST_TOKENS, 50 * scale))
                ticket.answer = rng.randint(0, 50 * scale)
                tickets.append(ticket)

    refill()
    total = 60 * largest
    for _, served in serve(queue, tickets, total):
        refill()
        clocks = [served.get(p.name, 0) / p.weight for p in principals]
        bound = (LEAST_AHEAD + 2) * largest / min(weights)
        assert max(clocks) - min(clocks) <= bound


def test_shares_converge_to_the_weights():
    queue, tickets = queue_of(), []
    principals = {"light": key("light", 1.0), "heavy": key("heavy", 3.0)}

    def refill():
        for name, size in (("light", 400), ("heavy", 100)):  # the light one's requests are four times as large
            while sum(t.key.principal.name == name and not t.ahead for t in tickets) < 3:
                ticket = queue.enter(principals[name], size)
                ticket.answer = size
                tickets.append(ticket)

    refill()
    for _, served in serve(queue, tickets, 2_000_000):  # noqa: B007
        refill()
    assert served["heavy"] / served["light"] == pytest.approx(3.0, rel=0.02)


@settings(max_examples=40, deadline=None)
@given(flood=st.integers(20, 200), size=sizes, weight=st.sampled_from([0.1, 1.0, 5.0]))
def test_nobody_starves(flood, size, weight):
    """A request of a key that has none waiting is begun after what the engine has, and, by weight, a few others."""
    queue = queue_of()
    crowd = [queue.enter(key("crowd", 1.0), size) for _ in range(flood)]
    single = queue.enter(key("single", weight), size)
    begun = 0
    while not single.ahead:
        first_ahead(crowd).began()
        begun += 1
        assert begun <= LEAST_AHEAD + 1
    assert single.ahead


@given(priorities=st.lists(st.integers(-5, 5), min_size=LEAST_AHEAD + 2, max_size=60))
def test_a_key_s_requests_begin_by_priority_and_then_by_age(priorities):
    queue = queue_of()
    tickets = [queue.enter(key("a"), 100, priority) for priority in priorities]
    begun = []
    for _ in tickets:
        fresh = [t for t in tickets if t.ahead and t not in begun]
        begun += fresh
        next(t for t in begun if t.waits).began()
    late = [i for i in (tickets.index(t) for t in begun) if i >= LEAST_AHEAD]
    assert late == sorted(late, key=lambda i: (priorities[i], i))


def test_the_engine_is_given_what_its_next_steps_have_room_for():
    queue = queue_of(window=1000)
    short = [queue.enter(key("a"), 1) for _ in range(100)]
    ahead = sum(ticket.ahead for ticket in short)
    assert ahead == -(-1000 // LEAST_TOKENS)
    short[0].began()
    assert sum(ticket.ahead for ticket in short) == ahead + 1
    short[1].leave()  # without a token
    assert sum(ticket.ahead for ticket in short) == ahead + 2
    long = queue_of(window=1000)
    assert sum(long.enter(key("a"), 5000).ahead for _ in range(20)) == LEAST_AHEAD


def test_short_prompts_are_handed_over_beside_long_ones_and_the_other_way_round():
    queue = queue_of(window=1000)
    long = [queue.enter(key("a"), 5000) for _ in range(LEAST_AHEAD + 2)]
    longest, shortest = queue.enter(key("b"), 500), queue.enter(key("b"), 501)
    assert (longest.ahead, shortest.ahead) == (True, False), "half of the window is a short one"
    short = [queue.enter(key("a"), 10) for _ in range(100)]
    assert sum(ticket.ahead for ticket in short) == -(-(1000 - 500) // LEAST_TOKENS)
    assert [ticket.ahead for ticket in long] == [True] * LEAST_AHEAD + [False] * 2
    long[0].began()
    assert shortest.ahead, "a long one takes the place of a long one, of the key whose turn it is"
    assert not long[-2].ahead


def test_idleness_saves_nothing_up():
    queue = queue_of()
    busy = [queue.enter(key("busy"), 1000) for _ in range(50)]
    for _ in range(40):
        first_ahead(busy).began()
    for ticket in busy[40:]:
        assert ticket.waits
    late = [queue.enter(key("late"), 1000) for _ in range(20)]
    more = [queue.enter(key("busy"), 1000) for _ in range(20)]
    waiting = busy[40:] + late + more
    for _ in range(28):
        first_ahead(waiting).began()
    late_turns, busy_turns = sum(t.ahead for t in late), sum(t.ahead for t in busy[48:] + more)
    assert late_turns + busy_turns == 28
    assert abs(late_turns - busy_turns) <= 1  # turns from then on, not forty for the one that came late


@pytest.mark.parametrize("background", [False, True])
def test_what_the_cache_had_is_not_charged(background):
    queue = queue_of()
    ticket = queue.enter(replace(key("a", 2.0), background=background), 100)
    assert ticket.key.clock == 50
    ticket.charge(10)
    ticket.charge(-80)
    assert ticket.key.clock == 15


def test_places_are_given_back_however_a_request_ends():
    queue = queue_of()
    tickets = [queue.enter(key("a"), 100) for _ in range(30)]
    for i in random.Random(1).sample(range(30), 30):
        if i % 3 == 0:
            tickets[i].began()
            tickets[i].began()
        tickets[i].leave()
        tickets[i].leave()
    none = {False: 0, True: 0}
    assert (queue.waiting, queue._ahead, queue._ahead_tokens) == (0, none, none)
    assert all(not each.waiting and each.open == 0 for each in queue._keys.values())


def test_clocks_of_idle_keys_do_not_pile_up():
    queue = queue_of()
    stays = queue.enter(key("stays"), 1)
    for i in range(3 * admission.MAX_IDLE_KEYS):
        queue.enter(key(f"k{i}"), 1).leave()
    assert len(queue._keys) <= admission.MAX_IDLE_KEYS
    assert queue._keys["stays"] is stays.key


def test_a_queue_is_full_at_its_limit(clock):
    queue = queue_of(queued=3)
    tickets = [queue.enter(key("a"), 0) for _ in range(3)]
    with pytest.raises(Overloaded, match="3 requests are already waiting") as refused:
        queue.enter(key("a"), 0)
    assert (queue.waiting, refused.value.status, refused.value.code, refused.value.retry_after) == (
        *(3, 429, "overloaded", 5),
    )
    tickets[0].leave()
    queue.enter(key("a"), 0)
    assert queue.waiting == 3


def test_a_full_queue_makes_room_for_a_key_with_a_smaller_share():
    queue = queue_of(queued=20)
    crowd = [queue.enter(key("crowd"), 10, priority) for priority in (0,) * 8 + (5, 0, 7, *(0,) * 9)]
    assert not crowd[10].ahead
    for expected, name in ((10, "b"), (8, "c"), (19, "d"), (18, "d")):
        ticket = queue.enter(key(name), 10)
        assert queue.waiting == 20
        assert ticket.waits
        with pytest.raises(Overloaded, match="20 requests are already waiting"):
            asyncio.run(crowd[expected].turn())
        crowd[expected].leave()
        assert queue.waiting == 20
    with pytest.raises(Overloaded):  # the crowd's own share is the largest
        queue.enter(key("crowd"), 10)
    for _ in range(20):
        try:
            queue.enter(key("e"), 10)
        except Overloaded:
            break
    held = {name: len(each.waiting) for name, each in queue._keys.items()}
    assert held["e"] in (held["crowd"], held["crowd"] - 1, held["crowd"] + 1)


@pytest.mark.parametrize(("light", "loses"), [(2, "heavy"), (3, "light")])
def test_who_loses_a_place_has_the_largest_share_for_its_weight(light, loses):
    """Nine requests of weight 4 are a share of 2.25; the engine has those of another key."""
    queue = queue_of(queued=LEAST_AHEAD + light + 9)
    for _ in range(LEAST_AHEAD):
        queue.enter(key("ahead"), 10)
    tickets = [queue.enter(key("light"), 10) for _ in range(light)]
    tickets += [queue.enter(key("heavy", 4.0), 10) for _ in range(9)]
    queue.enter(key("late"), 10)
    (gone,) = [ticket for ticket in tickets if not ticket.waits]
    assert gone.key.principal.name == loses
    assert gone is [ticket for ticket in tickets if ticket.key is gone.key][-1]


@pytest.mark.parametrize(("weight", "taken"), [(0.5, False), (1.0, True)])
def test_a_place_goes_to_who_has_the_smaller_share_with_it(weight, taken):
    """A key with two waiting: one more of weight 0.5 would be as large a share."""
    queue = queue_of(queued=LEAST_AHEAD + 2)
    for _ in range(LEAST_AHEAD):
        queue.enter(key("ahead"), 10)
    tickets = [queue.enter(key("two"), 10) for _ in range(2)]
    if taken:
        queue.enter(key("late", weight), 10)
    else:
        with pytest.raises(Overloaded, match="10 requests are already waiting"):
            queue.enter(key("late", weight), 10)
    assert [ticket.waits for ticket in tickets] == [True, not taken]


def test_a_key_has_so_many_requests_open(clock):
    queue = queue_of(streams=2)
    tickets = [queue.enter(key("a"), 0) for _ in range(2)]
    tickets[0].began()
    with pytest.raises(Overloaded, match="2 requests open, and may have 2") as refused:
        queue.enter(key("a"), 0)
    assert (refused.value.code, refused.value.retry_after) == ("too_many_streams", 5)
    queue.enter(key("b"), 0)
    queue.enter(key("c", streams=1), 0)
    with pytest.raises(Overloaded, match="may have 1"):
        queue.enter(key("c", streams=1), 0)
    for _ in range(5):  # one of its requests ends every eight seconds
        tickets[-1].leave()
        clock.now += 8
        tickets.append(queue.enter(key("a"), 0))
    with pytest.raises(Overloaded) as refused:
        queue.enter(key("a"), 0)
    assert refused.value.retry_after == 10  # five in forty seconds, of which the first has no time before it


def test_a_retry_makes_sense_when_half_of_the_queue_has_moved_on(clock):
    queue = queue_of()
    tickets = [queue.enter(key("a"), 0) for _ in range(45)]
    tickets[0].began()
    assert queue.retry_after() == 5  # one first token has no pace
    for ticket in tickets[1:5]:
        clock.now += 2.0
        ticket.began()
    assert queue.waiting == 40
    assert queue.retry_after() == 40  # 40 / 2 at four in eight seconds
    clock.now += 8.0
    assert queue.retry_after() == 60  # 40 / 2 at four in sixteen seconds is 80: too long to ask for
    for ticket in tickets:
        ticket.leave()
    assert queue.retry_after() == 1


def test_a_pace_is_that_of_the_latest_times(clock):
    pace = Pace()
    for _ in range(2):
        pace.note()
    assert pace.seconds(20_000) == 20  # at one in a millisecond, the shortest time that is believed
    pace = Pace()
    for _ in range(40):
        clock.now += 0.5
        pace.note()
    assert pace.seconds(16) == 8  # the latest 32 came two a second


def test_a_pace_forgets_all_but_the_latest_thirty_two_times(clock):
    pace = Pace()
    for seconds in (0, 100, *(200 + i for i in range(31))):
        clock.now = 1000.0 + seconds
        pace.note()
    assert pace.seconds(10) == 10 * 130 // 31


def test_what_is_short_counts_as_sixteen_tokens():
    queue, sizes = queue_of(), (0, 1, 15, 16, 17)
    tickets = [queue.enter(key(f"k{size}"), size) for size in sizes]
    assert [ticket.tokens for ticket in tickets] == [16, 16, 16, 16, 17]
    assert sum(queue._ahead_tokens.values()) == 81


def test_a_thousand_and_twenty_four_idle_keys_are_remembered():
    queue = queue_of()
    for i in range(1024):
        queue.enter(key(f"k{i}"), 1).leave()
    assert len(queue._keys) == 1024
    queue.enter(key("k0"), 1).leave()
    assert len(queue._keys) == 1024, "it was there"
    queue.enter(key("one more"), 1).leave()
    assert set(queue._keys) == {"one more"}


def test_a_queue_that_was_stopped_takes_nobody_and_ends_what_runs():
    queue, told = queue_of(), []
    queue.ends |= {told.append, lambda error: told.append(error)}
    assert not queue.stopped
    queue.stop()
    with pytest.raises(RequestError, match="The server stopped before") as refused:
        queue.enter(key("a"), 0)
    for error in (*told, refused.value):
        assert (error.status, error.code) == (503, "server_stopping")
    assert (len(told), queue.stopped) == (2, True)


@pytest.mark.parametrize(
    ("tokens", "window", "ahead"), [(31, 1023, 33), (31, 1024, 34), (16, 1024, 64), (16, 1025, 65)]
)
def test_the_engine_is_given_prompts_until_its_window_is_full(tokens, window, ahead):
    queue = queue_of(window=window)
    assert sum(queue.enter(key("a"), tokens).ahead for _ in range(100)) == ahead


def test_a_turn_comes_when_the_engine_has_room_or_the_place_is_lost():
    async def run():
        queue = queue_of(queued=LEAST_AHEAD + 2)
        ahead = [queue.enter(key("a"), 10) for _ in range(LEAST_AHEAD)]
        await asyncio.gather(*(ticket.turn() for ticket in ahead))
        held = [queue.enter(key("a"), 10) for _ in range(2)]
        turns = [asyncio.create_task(ticket.turn()) for ticket in held]
        await asyncio.sleep(0)
        assert [turn.done() for turn in turns] == [False, False]
        ahead[0].began()
        await turns[0]
        held.append(queue.enter(key("a"), 10))
        queue.enter(key("b"), 10)
        with pytest.raises(Overloaded):
            await asyncio.wait_for(held[2].turn(), 1)
        assert not turns[1].done()
        turns[1].cancel()

    asyncio.run(run())


def test_a_request_that_names_no_priority_has_the_one_in_the_middle():
    queue = queue_of()
    tickets = [queue.enter(key("a"), 10) for _ in range(LEAST_AHEAD)]
    late, plain, early, plain_too = (queue.enter(key("a"), 10, *named) for named in ((1,), (), (-1,), (0,)))
    for ticket, expected in zip(tickets, (early, plain, plain_too, late), strict=False):
        assert not expected.ahead
        ticket.began()
        assert expected.ahead


def test_a_queue_is_idle_until_somebody_comes():
    queue = queue_of()
    assert (queue.idle.is_set(), queue.busy.is_set()) == (True, False)
    tickets = [queue.enter(key("a"), 10) for _ in range(2)]
    for ticket in tickets:
        assert (queue.idle.is_set(), queue.busy.is_set()) == (False, True)
        ticket.leave()
    assert (queue.idle.is_set(), queue.busy.is_set()) == (True, False)


def test_a_form_that_is_being_compiled_takes_no_room_of_the_engine():
    """Neither another key nor the same waits behind it; what is compiled takes room as any other."""
    queue = queue_of()
    slow = [queue.enter(key("a"), 16) for _ in range(2 * LEAST_AHEAD)]
    other = queue.enter(key("b"), 16)
    assert [ticket.ahead for ticket in slow] == [True] * LEAST_AHEAD + [False] * LEAST_AHEAD
    assert not other.ahead
    slow[0].prepare(under_way=True)
    slow[0].prepare(under_way=True)
    slow[-1].prepare(under_way=True)  # it is not the engine's yet
    assert sum(ticket.ahead for ticket in slow) == LEAST_AHEAD + 1
    slow[1].prepare(under_way=True)
    assert other.ahead
    slow[0].prepare(under_way=False)
    slow[1].prepare(under_way=False)
    other.began()  # those that are compiled take its room
    assert sum(ticket.ahead for ticket in slow) == LEAST_AHEAD + 1
    for ticket in (*slow, other):
        ticket.leave()
        ticket.prepare(under_way=False)
    none = {False: 0, True: 0}
    assert (queue.waiting, queue._ahead, queue._ahead_tokens) == (0, none, none)


def test_requests_of_batches_wait_while_any_other_is_open():
    queue = queue_of()
    person = queue.enter(key("ann"), 5)
    background = Principal("ann", frozenset({USE}), background=True)
    line = queue.enter(background, 5)
    assert (person.ahead, line.ahead, queue.waiting, queue.held) == (True, False, 1, 0)
    person.began()
    assert not line.ahead  # its answer is being computed
    assert queue.busy.is_set()
    person.leave()
    assert (line.ahead, queue.idle.is_set(), queue.busy.is_set()) == (True, True, False)
    line.leave()


def test_how_long_the_first_of_those_that_wait_has_waited(clock):
    queue = queue_of()
    assert queue.oldest_seconds == 0
    background = replace(key("batches"), background=True)
    queue.enter(background, 10)  # it is of no interest how long lines of batches wait
    first = queue.enter(key("a"), 10)
    clock.now += 2
    second = queue.enter(key("b"), 10, priority=-5)
    clock.now += 1
    assert queue.oldest_seconds == 3
    first.began()
    first.began()
    assert queue.oldest_seconds == 1
    second.leave()
    assert queue.oldest_seconds == 0
    first.leave()
