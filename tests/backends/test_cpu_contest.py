"""Contests with made-up clocks: the faster wins, noise does not, and an interruption changes nothing."""

import json
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.backends.cpu.tuning.contest import Contest, Rounds
from roofline.backends.cpu.tuning.variants import OpGroup
from roofline.backends.paired import LEAST_PAIRS, interval, noise

GROUP = OpGroup("linear", "64x64 Q4_1", (1,), (False,))
NAMES = ["1x4", "1x8", "2x4", "claim=40"]


def contest(seed: int = 0, default: str = "default", rounds: Rounds | None = None) -> Contest:
    return Contest(GROUP, default, NAMES, rounds or Rounds(), seed)


def clock(true: dict[str, float], seed: int, spread: float = 0.03) -> Callable[[str], list[float]]:
    """Seconds at two points: the true ones, drifting by a fifth, with noise and now and then a lost time slice."""
    rng = random.Random(seed)
    count = 0

    def seconds(name: str) -> list[float]:
        nonlocal count
        count += 1
        base = math.prod(true.get(word, 1.0) for word in name.split()) * (1 + 0.2 * math.sin(count / 70))
        lost = 3.0 if rng.random() < 0.03 else 1.0
        return [base * 1e-5 * math.exp(rng.gauss(0, spread)) * lost, base * 4e-5 * math.exp(rng.gauss(0, spread))]

    return seconds


def play(game: Contest, seconds: Callable[[str], list[float]], most: int = 10**6) -> Contest:
    while game.outcome is None and most:
        game.tell(seconds(game.entry()))
        most -= 1
    return game


def test_a_slow_default_is_replaced():
    done = play(contest(), clock({"default": 1.3}, 1))
    assert done.outcome.variant != "default"
    assert done.outcome.figures["high"] < 1
    assert done.outcome.figures["ratio"] == pytest.approx(1 / 1.3, rel=0.03)
    assert set(NAMES) <= set(done.outcome.figures["tried"])


def test_gains_of_two_things_are_combined():
    done = play(contest(), clock({"2x4": 0.85, "claim=40": 0.9}, 2))
    assert done.outcome.variant == "2x4 claim=40"
    assert done.outcome.figures["ratio"] == pytest.approx(0.85 * 0.9, rel=0.03)


def test_noise_alone_keeps_the_default():
    outcomes = [play(contest(seed), clock({}, 100 + seed), 10**6).outcome for seed in range(60)]
    assert sum(outcome.variant != "default" for outcome in outcomes) <= 1
    assert all(outcome.reason for outcome in outcomes)


def test_a_gain_too_small_to_matter_keeps_the_default():
    done = play(contest(), clock({"2x4": 0.998}, 3, spread=0.0005))
    assert done.outcome.variant == "default"
    assert "less than 0.5%" in done.outcome.reason


def test_slower_candidates_keep_the_default_early():
    done = play(contest(), clock(dict.fromkeys(NAMES, 1.2), 4))
    assert done.outcome.variant == "default"
    assert done.outcome.reason == "none of the candidates was faster"
    assert list(done.outcome.figures["tried"].values()) == sorted(done.outcome.figures["tried"].values())


def test_without_candidates_there_is_nothing_to_run():
    empty = Contest(GROUP, "default", ["default"], Rounds())
    assert empty.outcome is not None
    assert empty.entry() == "default"


@pytest.mark.parametrize("after", [0, 1, 17, 60, 61, 100, 175, 200, 250])
def test_an_interrupted_contest_goes_on(after):
    """Whole rounds survive as text; the rest of the contest needs no more than what was left."""
    true = {"default": 1.3, "2x4": 0.8}
    first = play(contest(), clock(true, 5), after)
    state = json.loads(json.dumps(first.state()))
    second = contest(seed=9)
    assert second.resume(state)
    assert second.state() == state
    asked = 0
    seconds = clock(true, 6)

    def counted(name: str) -> list[float]:
        nonlocal asked
        asked += 1
        return seconds(name)

    play(second, counted)
    assert second.outcome.variant.startswith("2x4")
    whole = len(play(contest(), clock(true, 5))._same)
    assert whole == Rounds().confirm
    assert asked <= Rounds().slots(len(NAMES)) - after + len(NAMES) + 2


def test_another_contests_state_is_not_taken():
    state = play(contest(), clock({}, 7), 40).state()
    assert not contest(default="1x1").resume(state)
    assert not Contest(GROUP, "default", ["2x2"], Rounds()).resume(state)


@given(share=st.floats(0, 3))
def test_a_small_budget_means_fewer_rounds_but_enough_to_decide(share):
    few = Rounds().scaled(share)
    assert few.confirm >= LEAST_PAIRS
    assert few.slots(10) <= Rounds().slots(10)
    assert few.slots(0) == 0


def test_slots_are_never_fewer_than_a_contest_takes():
    asked = 0
    seconds = clock({"2x4": 0.8, "claim=40": 0.9, "1x8": 0.95, "1x4": 0.97}, 8)

    def counted(name: str) -> list[float]:
        nonlocal asked
        asked += 1
        return seconds(name)

    play(contest(), counted)
    assert asked <= Rounds().slots(len(NAMES))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(LEAST_PAIRS, 60))
def test_intervals_hold_the_median(seed, n):
    rng = random.Random(seed)
    found = interval([rng.gauss(0.1, 0.05) for _ in range(n)])
    assert found.low <= found.ratio <= found.high


def test_intervals_cover_the_truth_as_often_as_they_say():
    rng = random.Random(1)
    missed = 0
    for _ in range(1000):
        found = interval([math.log(1.1) + rng.gauss(0, 0.2) for _ in range(25)])
        missed += not found.low <= 1.1 <= found.high
    assert missed <= 20  # 10 expected


def test_few_pairs_prove_nothing():
    assert interval([-1.0] * (LEAST_PAIRS - 1)).high == math.inf
    assert interval([]).ratio == 1
    assert noise([0.0] * 5) == math.inf
    assert noise([0.0] * 20) == 0
