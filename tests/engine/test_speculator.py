"""When tokens are drafted, and how many: prices, chances and bounds against numbers that the test computes."""

from types import SimpleNamespace

import pytest

from roofline.engine.cache.paged import PagedCache, root_key
from roofline.engine.config import StepLimits
from roofline.engine.params import SamplingParams
from roofline.engine.schedule.continuous import plan_drafts
from roofline.engine.schedule.plan import State, StepPlan
from roofline.engine.schedule.sequence import Request
from roofline.engine.speculation.speculator import SequenceRecord, Speculator, StepTimes

GUESS = pytest.approx(0.12)  # the price before any draft was measured


def plain(times, count=1, seconds=1.0):
    """Measure plain steps of one sequence; the first of a row is never measured, as it finds the caches cold."""
    times.other()
    for _ in range(count + 1):
        times.add(1, 0, seconds)


def verify(times, count=1, seconds=1.4):
    """Measure steps that verify four tokens: at the default a drafted token adds a tenth of a plain step."""
    for _ in range(count):
        times.add(1, 4, seconds)


def test_a_plain_step_is_measured_again_after_128_with_drafts():
    times = StepTimes()
    for _ in range(2):
        plain(times)
        verify(times, 127)
        assert times.price(1) == pytest.approx(0.1)
        verify(times)
        assert times.price(1) is None


def test_the_median_of_the_latest_five_steps_is_their_time():
    times = StepTimes()
    plain(times, 5, seconds=1.0)
    verify(times, 5, seconds=3.2)
    plain(times, 2, seconds=2.0)
    assert times.price(1) == pytest.approx(0.55), "one, one, one, two, two"
    plain(times, 1, seconds=2.0)
    assert times.price(1) == pytest.approx((3.2 - 2) / 4 / 2)
    verify(times, 2, seconds=2.8)
    assert times.price(1) == pytest.approx((3.2 - 2) / 4 / 2)
    verify(times, 1, seconds=2.8)
    assert times.price(1) == pytest.approx((2.8 - 2) / 4 / 2)


@pytest.mark.parametrize(
    ("plains", "verifies", "seconds", "price"),
    [
        (1, 1, 2.75, 0.4375),
        (1, 1, 3.0, None),  # half a plain step
        (2, 15, 3.0, None),
        (3, 15, 3.0, 0.5),
        (3, 16, 3.0, None),
        (3, 16, 2.75, 0.4375),
        (1, 1, 0.5, 0.0),  # no step is faster for its drafts
    ],
)
def test_a_token_that_costs_half_a_step_is_believed_beside_three_plain_steps_for_fifteen(
    plains, verifies, seconds, price
):
    times = StepTimes()
    plain(times, plains)
    verify(times, verifies, seconds)
    assert times.price(1) == (price if price is None else pytest.approx(price))


def test_a_plain_step_behind_one_with_drafts_is_not_measured():
    times = StepTimes()
    verify(times)
    times.add(1, 0, 1.0)
    assert times.price(1) is None
    times.add(1, 0, 1.0)
    assert times.price(1) == pytest.approx(0.1)


def test_a_clock_that_stands_still_gives_no_price():
    times = StepTimes()
    plain(times, seconds=0.0)
    verify(times, seconds=0.0)
    assert times.price(1) == GUESS


def test_chances_are_those_of_the_latest_tokens():
    record = SequenceRecord()
    assert (record.chance, record.drafts) == (0.5, True)
    record.guess = [5, 6, 7]
    record.learn([5, 8, 7])
    hits, tries = (1.0 * 0.95 + 1) * 0.95, (2.0 * 0.95 + 1) * 0.95 + 1
    assert record.chance == pytest.approx(hits / tries), "what follows a wrong token was not verified"
    record.learn([5])
    assert record.chance == pytest.approx((hits * 0.95 + 1) / (tries * 0.95 + 1))


@pytest.fixture
def speculator():
    """One whose drafted tokens cost a tenth of a step."""
    drafter = SimpleNamespace(free=True, settled=True)
    result = Speculator(drafter, 4, SimpleNamespace(now=lambda: 0.0))
    plain(result._times)
    verify(result._times)
    return result


def sequence(chance, drafts=True):
    return SimpleNamespace(speculation=SequenceRecord(hits=chance, tries=1.0, drafts=drafts))


def counts(speculator, *able, sequences=1):
    return [count for _, count in speculator._chosen([(each, 4) for each in able], sequences)]


@pytest.mark.parametrize(
    ("chance", "drafts", "count"),
    [
        (0.109, True, 0),  # 0.1 of a step for 0.109 of a token: less than a tenth is won
        (0.111, True, 1),
        (0.149, False, 0),  # who stopped must promise half as much again
        (0.151, False, 1),
        (0.5, True, 2),  # 0.25 > 0.11 * 1.5 / 1.1, and 0.125 < 0.11 * 1.75 / 1.2
        (0.75, True, 4),  # 0.316 > 0.11 * (1 + 0.75 + 0.5625 + 0.4219) / 1.3
    ],
)
def test_tokens_are_drafted_while_they_promise_more_than_they_cost(speculator, chance, drafts, count):
    able = sequence(chance, drafts)
    assert counts(speculator, able) == [count]
    assert able.speculation.drafts == (count > 0)
    assert speculator.drafts_held == (count == 0)


def test_what_others_are_expected_to_get_makes_a_step_dearer(speculator):
    """Of two sequences the first takes 0.9, 0.81, 0.729 and 0.6561; 0.3 < 0.11 * (2 + 3.0951) / 1.4 comes too late."""
    for _ in range(3):
        speculator._times.add(2, 0, 1.0)
    speculator._times.add(2, 4, 1.4)
    assert counts(speculator, sequence(0.9), sequence(0.3), sequences=2) == [4, 0]
    assert counts(speculator, sequence(0.3), sequence(0.9), sequences=2) == [0, 4]
    assert counts(speculator, sequence(0.9), sequence(0.45), sequences=2) == [4, 1]


def test_drafts_that_were_always_right_are_as_long_as_they_may_be(speculator):
    """After some 700 right tokens the chance is 1, and a later token as likely as the first."""
    able = sequence(1.0)
    for _ in range(1000):
        able.speculation.guess = [7]
        able.speculation.learn([7])
    assert able.speculation.chance == 1.0
    assert counts(speculator, able) == [4]


@pytest.mark.parametrize("free", [True, False])
def test_a_sequence_tries_again_after_64_steps_then_after_twice_as_many(speculator, free):
    speculator.drafter.free = free
    record, steps = SequenceRecord(hits=0.01, tries=3.0), 0
    for retry in (64, 128, 256, 512, 1024, 1024):
        verify(speculator._times)
        for _ in range(retry - 1):
            speculator._note(record, 0, 1)
            assert not record.drafts
        assert speculator._times.price(1) != GUESS
        speculator._note(record, 0, 1)
        steps += retry
        assert record.drafts
        assert speculator._times.price(1) == GUESS, "the price is doubted"
        assert (record.hits, record.tries) == ((0.01, 3.0) if free else (1.0, 2.0)), "what nobody drafted is not known"
        assert speculator.drafts_held == steps


def test_a_draft_begins_the_count_anew(speculator):
    record = SequenceRecord()
    for count in [0] * 63 + [2] + [0] * 63:
        speculator._note(record, count, 1)
        assert record.drafts == (count > 0)
    speculator._note(record, 0, 1)
    assert record.drafts


def test_a_price_that_no_acceptance_pays_is_doubted_after_64_steps_then_after_twice_as_many(speculator):
    for retry in (64, 128, 256, 512, 1024, 1024):
        speculator._times.doubt(1)
        plain(speculator._times, 3)
        verify(speculator._times, 5, seconds=1.0 + 4 * 0.92)
        before = speculator.drafts_held
        for _ in range(retry):
            assert speculator._times.price(1) == pytest.approx(0.92)
            assert counts(speculator, sequence(0.99), sequence(0.99)) == [0, 0]
        assert speculator.drafts_held - before == 2 * retry
        assert speculator._times.price(1) == GUESS


def test_a_price_below_that_is_a_matter_of_the_sequence(speculator):
    speculator._times.doubt(1)
    plain(speculator._times, 3)
    verify(speculator._times, 5, seconds=1.0 + 4 * 0.9)
    able = sequence(0.995)
    assert counts(speculator, able) == [1]
    assert counts(speculator, sequence(0.98)) == [0]


def learn(speculator, *records, drafted=0, seconds=1.0, decode_only=True, repeated=0):
    able = [SimpleNamespace(speculation=record) for record in records]
    rows = {"drafted": drafted, "repeated": repeated}
    plan = SimpleNamespace(decode_only=decode_only, sequences=able, sampled=able, **rows)
    speculator.learn(plan, [drafted] * len(able), [[7]] * len(able), seconds)


def test_sixty_four_verified_drafts_in_a_row_make_a_sequence_trusted_again(speculator):
    record = SequenceRecord(retry=256)
    for _ in range(63):
        learn(speculator, record, drafted=1)
    speculator._note(record, 0, 1)
    for _ in range(63):
        learn(speculator, record, drafted=1)
        learn(speculator, record)  # without a draft, which counts for nothing
    assert record.retry == 256
    learn(speculator, record, drafted=1)
    assert record.retry == 64
    learn(speculator, None)  # a sequence that came with this step


@pytest.mark.parametrize(("decode_only", "settled", "repeated"), [(False, True, 0), (True, False, 0), (True, True, 3)])
def test_a_step_with_other_work_is_not_timed_and_leaves_the_caches_cold(decode_only, settled, repeated):
    speculator = Speculator(SimpleNamespace(free=True, settled=True), 4, SimpleNamespace(now=lambda: 0.0))
    learn(speculator, SequenceRecord())
    speculator.drafter.settled = settled
    learn(speculator, SequenceRecord(), decode_only=decode_only, repeated=repeated)
    speculator.drafter.settled = True
    learn(speculator, SequenceRecord())
    assert speculator._times.price(1) is None
    learn(speculator, SequenceRecord())
    assert speculator._times.price(1) == GUESS


def test_the_time_of_drafting_is_a_part_of_the_price():
    clock = SimpleNamespace(time=3.0)
    clock.now = lambda: clock.time

    def draft(sequences, counts):
        clock.time += 0.5
        for each, count in zip(sequences, counts, strict=True):
            each.draft = [7] * count

    speculator = Speculator(SimpleNamespace(free=True, settled=True, draft=draft), 4, clock, adaptive=False)
    running = SimpleNamespace(ids=[1, 2], computed=1, again=0, end=7, draft=[], speculation=None, matcher=None)
    state = SimpleNamespace(running=[running], waiting=[])
    speculator.draft(
        SimpleNamespace(running=[SimpleNamespace(ids=[1, 2], computed=0, again=0, speculation=None)], waiting=[])
    )
    for _ in range(2):
        learn(speculator, None)  # behind a prompt, for which nothing is drafted
    speculator.draft(state)
    assert (speculator.seconds, running.draft) == (0.5, [7] * 4), "the answer has five tokens yet, the last undrafted"
    learn(speculator, running.speculation, drafted=4, seconds=0.9)
    assert speculator._times.price(1) == pytest.approx(0.1)
    running.ids, running.computed = [1] * 4, 3
    speculator.draft(state)
    assert (speculator.seconds, running.draft) == (1.0, [7] * 2)
    for ids, computed in (([1] * 6, 5), ([1] * 5, 3)):  # one token is due; a prompt is being computed
        running.ids, running.computed = ids, computed
        speculator.draft(state)
        assert (speculator.seconds, running.draft, running.speculation.guess) == (1.0, [], [])
    running.computed, speculator.drafter.free = 4, False
    state.waiting = [running]
    speculator.draft(state)
    assert running.draft == [], "a waiting prompt may join the step"
    state.waiting = []
    speculator.draft(state)
    assert running.draft == [7]


@pytest.mark.parametrize(
    ("limits", "drafts"),
    [
        ({}, [4, 4]),
        ({"table_pages": 4}, [4, 4]),
        ({"table_pages": 3}, [4, 1]),  # of 15 ids in a page of 16
        ({"table_pages": 2}, [1, 1]),
        ({"rows": 10}, [4, 4]),
        ({"rows": 9}, [4, 3]),  # each sequence has a row for the id that is due
        ({"rows": 3}, [1, 0]),
        ({"tokens": 9}, [4, 3]),
        ({"pages": 3}, [4, 1]),
        ({"end": 20}, [4, 4]),
        ({"end": 19}, [3, 3]),  # the last id of an answer is not drafted
        ({"end": 16}, [0, 0]),
    ],
)
def test_drafts_are_cut_to_what_is_left_of_a_step(limits, drafts):
    cache = PagedCache(limits.get("pages", 8))
    sizes = {"tokens": 64, "sequences": 4, "rows": 64, "table_pages": 8, "max_model_len": 99}
    state = State(cache, StepLimits(**{name: limits.get(name, size) for name, size in sizes.items()}))
    plan = StepPlan(decodes=2)
    for name in "ab":
        request = Request(name, [1] * 15, SamplingParams(), frozenset(), limits.get("end", 64) - 15, 0, root_key("f"))
        (each,) = request.sequences
        each.computed, each.draft = 14, [7] * 4
        assert cache.grow(each.pages, 15)
        plan.add(each, 1)
    plan_drafts(state, plan)
    assert [len(each.draft) for each in plan.sequences] == drafts
    assert plan.counts == [1 + count for count in drafts]
    assert (plan.drafted, plan.tokens) == (sum(drafts), 2 + sum(drafts))
    assert plan.table_pages == sum(len(each.pages) for each in plan.sequences)
