"""Which snapshots of recurrent state are taken and found: counts, not only bits."""

import pytest
from engine_fakes import FakeExecutable
from state_fakes import HybridFake, QueueingHybrid, StateWatched

from roofline.common.errors import UnsupportedError
from roofline.engine.cache.state_slots import StateSlots
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.ops.batch import NO_SLOT
from tests.engine.test_speculation import Planted, plant

GREEDY = SamplingParams(temperature=0, max_tokens=1)
LARGE = {"num_pages": 2000, "max_context": 10000, "tokens": 512, "segments": 8}
EXECUTABLES = pytest.mark.parametrize("toy", [HybridFake, QueueingHybrid])


def prompt_of(length, first=0):
    """Ids that no other `first` shares a page of."""
    return [(first + 7 * i) % 50 for i in range(length)]


def ask(watched, ids, params=GREEDY, name=None, **options):
    """The ids of an answer, and how many tokens were found and computed for it."""
    name = name or str(len(watched.arrivals))
    before = watched.executable.tokens_computed
    watched.submit(ids, params, request_id=name, **options)
    outputs = watched.run()
    return outputs[name, 0], watched.ended[name, 0].usage.cached_tokens, watched.executable.tokens_computed - before


@EXECUTABLES
@pytest.mark.parametrize("length", [1, 63, 64, 65, 66, 127, 128, 129, 193, 200])
def test_a_prompt_that_comes_again_begins_at_its_last_multiple_of_64(toy, length):
    watched = StateWatched(EngineConfig(), toy, **LARGE)
    first = ask(watched, prompt_of(length))
    again = ask(watched, prompt_of(length))
    found = (length - 1) // 64 * 64
    assert (first[1:], again[1:]) == ((0, length), (found, length - found))
    assert first[0] == again[0]
    assert watched.engine.stats().snapshot_hits == (found > 0)
    assert watched.engine.stats().snapshot_lost == (length - 1) // 16 * 16 - found
    assert ask(watched, prompt_of(length), salt="another tenant")[1] == 0


@EXECUTABLES
def test_prompts_with_a_beginning_in_common_find_it_from_the_third_on(toy):
    """The second finds pages and no snapshot at their end; it takes one there, at the junction."""
    watched = StateWatched(EngineConfig(long_prompt_tokens=0), toy, **LARGE)
    found = [ask(watched, prompt_of(1600) + prompt_of(600, first))[1] for first in (1, 2, 3, 4)]
    assert found == [0, 0, 1600, 1600]
    stats = watched.engine.stats()
    assert (stats.snapshot_hits, stats.snapshot_lost, stats.prefix_hits) == (2, 1600, 3200)


def test_a_chunk_that_would_pass_two_snapshots_ends_at_the_first():
    watched = StateWatched(EngineConfig(), **LARGE)
    prompts = [prompt_of(100) + [first] * 200 for first in (1, 2, 3)]
    before = watched.executable.forwards
    assert ask(watched, prompts[0])[1] == 0
    assert watched.executable.forwards - before == 1
    assert ask(watched, prompts[1])[1] == 0
    assert watched.executable.forwards - before == 1 + 2
    assert [ask(watched, ids)[1] for ids in (prompts[2], prompts[1])] == [64, 256]


def test_a_snapshot_within_the_beginning_in_common_is_found_and_a_later_one_taken():
    watched = StateWatched(EngineConfig(long_prompt_tokens=0), **LARGE)
    found = [ask(watched, ids)[1] for ids in (prompt_of(1500), prompt_of(2200), prompt_of(2200)[:1800] + [3] * 99)]
    assert found == [0, 1472, 1472], "2,176 lies in unique tokens; at 1,792 the third takes one"
    assert ask(watched, prompt_of(2200)[:1800] + [4] * 99)[1] == 1792
    assert watched.engine.stats().snapshot_lost == (1500 // 16 * 16 - 1472) + (1800 // 16 * 16 - 1472) + 0 + 0


def test_a_long_prompt_has_a_snapshot_every_4096_tokens():
    watched = StateWatched(EngineConfig(long_prompt_tokens=0), **LARGE)
    ask(watched, prompt_of(9000))
    assert ask(watched, prompt_of(9000)[:5000] + [1] * 9)[1] == 4096
    assert ask(watched, prompt_of(9000)[:8300] + [1] * 9)[1] == 8192
    assert ask(watched, prompt_of(9000))[1] == 8960
    assert watched.executable.saves == 3 + 1 + 1 + 0


@EXECUTABLES
@pytest.mark.parametrize(
    ("length", "generated", "found"), [(50, 13, 0), (50, 14, 0), (50, 15, 64), (64, 1, 64), (63, 1, 0), (50, 90, 128)]
)
def test_the_next_turn_begins_in_the_answer_before(toy, length, generated, found):
    """The last id of an answer was never computed, so a snapshot behind it is not there."""
    watched = StateWatched(EngineConfig(), toy, **LARGE)
    prompt = prompt_of(length)
    ids, _, _ = ask(watched, prompt, SamplingParams(temperature=0, max_tokens=generated))
    assert ask(watched, prompt + ids + [5] * 30)[1] == found


def test_without_a_snapshot_pages_alone_are_of_no_use():
    """Slots for one sequence and one snapshot: the second prompt's takes the place of the first's."""
    watched = StateWatched(EngineConfig(), state_slots=2, **LARGE)
    one, other = prompt_of(100), prompt_of(100, 1)
    assert [ask(watched, ids)[1] for ids in (one, one, other, other)] == [0, 64, 0, 64]
    assert ask(watched, one)[1:] == (0, 100)
    assert watched.engine.stats().snapshot_lost == 2 * (96 - 64) + 96


def test_the_snapshot_used_last_stays():
    watched = StateWatched(EngineConfig(), state_slots=3, **LARGE)
    one, two, three = (prompt_of(100, first) for first in range(3))
    found = [ask(watched, ids)[1] for ids in (one, two, one, three, one, two)]
    assert found == [0, 0, 64, 0, 64, 0]


@EXECUTABLES
def test_answers_of_one_request_share_the_prompt_up_to_its_snapshot(toy):
    watched = StateWatched(EngineConfig(), toy, **LARGE)
    params = SamplingParams(temperature=0.8, seed=1, n=3, max_tokens=5)
    watched.submit(prompt_of(200), params, request_id="a")
    outputs = watched.run()
    assert watched.executable.tokens_computed == 200 + 2 * (200 - 192) + 3 * 4
    assert len({tuple(ids) for ids in outputs.values()}) == 3
    without = StateWatched(EngineConfig(prefix_cache=False), toy, **LARGE)
    without.submit(prompt_of(200), params, request_id="a")
    assert without.run() == outputs
    assert without.executable.saves == 0, "nobody would find them"


def test_a_sequence_waits_for_a_slot_and_takes_a_spare_one():
    """Two slots: the first answer has a spare one for its snapshot, and gives it to the second request."""
    watched = StateWatched(EngineConfig(), state_slots=2, **LARGE)
    long = SamplingParams(temperature=0, max_tokens=120)
    watched.submit(prompt_of(50), long, request_id="a")
    for _ in range(20):
        watched.step()
    assert watched.engine.state.slots.available == 0
    watched.submit(prompt_of(50, 1), long, request_id="b")
    watched.submit(prompt_of(50, 2), long, request_id="c")
    watched.step()
    assert (len(watched.engine.state.running), len(watched.engine.state.waiting)) == (2, 1)
    watched.run()


def test_a_snapshot_that_somebody_reads_is_nobodys_slot():
    """Two slots, one with the snapshot that both want: the second waits until the first has its own alone."""
    watched = StateWatched(EngineConfig(), state_slots=2, **LARGE)
    expected = ask(watched, prompt_of(100))[0]
    for name in ("a", "b"):
        watched.submit(prompt_of(100), GREEDY, request_id=name)
    watched.run()
    assert [watched.outputs[name, 0] for name in ("a", "b")] == [expected] * 2
    assert [watched.ended[name, 0].usage.cached_tokens for name in ("a", "b")] == [64, 64]


@pytest.mark.parametrize("steps", range(14, 19))
def test_a_spare_slot_that_a_step_under_way_writes_is_not_given_away(steps):
    """At one of these steps the answer's snapshot at 64 is under way while another request wants a slot."""
    watched = StateWatched(EngineConfig(), QueueingHybrid, state_slots=2, **LARGE)
    long = SamplingParams(temperature=0, max_tokens=60)
    watched.submit(prompt_of(50), long, request_id="a")
    for _ in range(steps):
        watched.step()
    watched.submit(prompt_of(50, 1), long, request_id="b")
    watched.run()
    assert ask(watched, [*prompt_of(50), *watched.outputs["a", 0]])[1] in (0, 64)


def test_a_pre_empted_answer_goes_on_from_its_snapshot():
    repeated = []
    for config in (EngineConfig(prefix_cache=False), EngineConfig()):
        watched = StateWatched(config, num_pages=20, max_context=320, tokens=64, segments=4)
        for name in "ab":
            watched.submit(prompt_of(70, ord(name)), SamplingParams(temperature=0, max_tokens=150), request_id=name)
        watched.run()
        assert watched.engine.stats().preemptions == 1
        repeated.append(watched.executable.tokens_computed - 2 * (70 + 149))
    assert repeated[0] - repeated[1] in (64, 128), "a part of its pages may have gone to the other answer"


@pytest.mark.parametrize(("right", "computed"), [(1.0, 100 + 60), (0.0, None)])
def test_right_guesses_are_computed_once(right, computed):
    params = SamplingParams(temperature=0, max_tokens=61)
    plain = StateWatched(EngineConfig(), rows=64, **LARGE)
    expected = ask(plain, prompt_of(100), params)[0]
    watched = StateWatched(EngineConfig(), rows=64, **LARGE)
    plant(watched.engine, Planted({("0", 0): expected}, right), 4)
    ids, _, tokens = ask(watched, prompt_of(100), params)
    assert ids == expected
    stats = watched.engine.stats()
    if computed is not None:
        assert (tokens, stats.accepted_tokens) == (computed, 47), "one guess would have passed 128"
    else:
        assert tokens <= 100 + 60 * 6, "one row that counts, four in vain, and nothing piles up"


def test_without_a_free_slot_nothing_is_guessed():
    params = SamplingParams(temperature=0, max_tokens=20)
    expected = ask(StateWatched(EngineConfig(), rows=64, **LARGE), prompt_of(50), params)[0]
    watched = StateWatched(EngineConfig(), rows=64, state_slots=1, **LARGE)
    plant(watched.engine, Planted({("0", 0): expected}), 4)
    assert ask(watched, prompt_of(50), params)[0] == expected
    assert watched.engine.stats().drafts == 0


def test_a_step_that_failed_behind_its_writes_is_repeated_from_a_snapshot():
    params = SamplingParams(temperature=0, max_tokens=40)
    expected = ask(StateWatched(EngineConfig(), **LARGE), prompt_of(100), params)[0]
    watched = StateWatched(EngineConfig(), **LARGE)
    watched.executable.fail_late = {5}
    watched.submit(prompt_of(20, 3), params, request_id="other")
    ids, _, tokens = ask(watched, prompt_of(100), params, "mine")
    assert ids == expected
    assert set(watched.engine.stats().finished) == {"length"}
    behind = 100 + 3 - 64  # what the step's state is made of beyond the snapshot; the other has none
    assert tokens == 100 + 20 + 2 * 39 + behind + 20 + 3 + 2


def test_a_failed_step_that_began_at_a_snapshot_is_repeated_from_before_it():
    """A snapshot is no copy that a kernel could make without computing anything."""
    params = SamplingParams(temperature=0, max_tokens=9)
    expected = ask(StateWatched(EngineConfig(), **LARGE), prompt_of(100), params)[0]
    watched = StateWatched(EngineConfig(max_batch_tokens=65, long_prompt_tokens=0), **LARGE)
    watched.executable.fail_late = {2}
    watched.submit([3], params, request_id="other")
    assert ask(watched, prompt_of(100), params, "mine")[0] == expected
    assert set(watched.engine.stats().finished) == {"length"}


def test_an_answer_whose_state_cannot_be_computed_anew_ends_alone():
    params = SamplingParams(temperature=0, max_tokens=30, logit_bias={13: -100.0})
    expected = ask(StateWatched(EngineConfig(), **LARGE), [1] * 20, params)[0]
    watched = StateWatched(EngineConfig(), **LARGE)
    watched.submit([1] * 20, params, request_id="good")
    watched.submit([13, 2, 3], params, request_id="bad")
    for _ in range(4):
        watched.step()
    watched.executable.fail_late, watched.executable.fail_on_id = {5}, 13
    watched.run()
    assert watched.outputs["good", 0] == expected
    assert "the toy cannot bear id 13" in watched.ended["bad", 0].error


def test_what_a_model_with_state_cannot_have_is_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedError, match="a draft model with recurrent state"):
        LocalEngine(FakeExecutable(), EngineConfig(speculate="draft"), draft=HybridFake())
    with pytest.raises(UnsupportedError, match="cache_file with this model"):
        LocalEngine(HybridFake(), EngineConfig(cache_file=str(tmp_path / "file")))


def test_slots_and_bytes_are_counted():
    engine = LocalEngine(HybridFake(state_slots=5))
    engine.submit([1, 2, 3], SamplingParams(max_tokens=5))
    engine.step()
    stats = engine.stats()
    assert (stats.state_slots, stats.state_slots_used, stats.state_slot_bytes) == (5, 1, 16)
    plain = LocalEngine(FakeExecutable()).stats()
    assert (plain.state_slots, plain.state_slots_used, plain.state_slot_bytes) == (0, 0, 0)


def test_there_are_no_more_running_sequences_than_slots():
    assert LocalEngine(HybridFake(state_slots=3)).limits.sequences == 3
    assert LocalEngine(HybridFake(state_slots=30)).limits.sequences == 16


def test_a_snapshot_is_never_written():
    slots = StateSlots(2)
    slot = slots.take()
    assert slots.is_writable(slot)
    slots.name(slot, b"key")
    assert not slots.is_writable(slot)
    slots.drop(slot)
    assert slots.snapshot(b"key") == slot
    slots.hold(slot)
    other = slots.take()
    assert (slots.is_writable(other), slots.take()) == (True, NO_SLOT)
    with pytest.raises(AssertionError, match="a slot that somebody else has"):
        slots.name(slot, b"other key")
    slots.adopt(slot)
    assert slots.is_writable(slot)
    assert not slots.knows(b"key")
