"""The sequential comparison errs as seldom as it says, and finds what there is."""

import numpy as np
import pytest

from roofline.bench.results.compare import LOOKS, Sequential, SequentialGoodput, in_words
from roofline.bench.results.statistics import paired_ratio

NOISE = 0.03  # of a block's rate, as of short blocks on a small machine that others use too
DRIFT = 0.2  # by which the machine's speed wanders between rounds


def decided(seed, slower, margin=0.03):
    """A comparison of blocks with noise; B is slower by that share."""
    draw = np.random.Generator(np.random.Philox(key=seed))
    sequential = Sequential(margin)
    while True:
        machine = np.exp(draw.normal() * DRIFT)
        noise = np.exp(draw.normal(size=4) * NOISE)
        a = machine * np.sqrt(noise[0] * noise[3])
        b = machine * np.sqrt(noise[1] * noise[2]) * (1 - slower)
        decision = sequential.add(float(a), float(b))
        if decision is not None:
            return decision


def test_a_against_a_is_no_difference():
    verdicts = [decided(seed, 0.0).verdict for seed in range(40)]
    assert verdicts.count("no difference") >= 38


def test_a_slowdown_of_5_percent_is_seen():
    decisions = [decided(1000 + seed, 0.05) for seed in range(20)]
    assert sum(decision.verdict == "A is higher" for decision in decisions) >= 18
    assert sum(decision.ratio.low <= 0.95 <= decision.ratio.high for decision in decisions) >= 19


def test_wrong_differences_are_seldom_although_it_looks_often():
    """Without equivalence to stop it: the error of all looks together is that of one."""
    wrong = sum(decided(seed, 0.0, margin=1e-9).verdict in ("A is higher", "B is higher") for seed in range(400))
    assert wrong <= 29  # 5 % are 20; two standard deviations more


def test_looking_without_a_correction_would_err_more():
    draw, wrong = np.random.Generator(np.random.Philox(key=7)), 0
    for _ in range(400):
        a, b = (np.exp(draw.normal(size=LOOKS[-1]) * NOISE).tolist() for _ in range(2))
        ratios = [paired_ratio(a[:look], b[:look]) for look in range(3, LOOKS[-1] + 1)]
        wrong += any(ratio.low > 1 or ratio.high < 1 for ratio in ratios)
    assert wrong > 60


def test_what_is_not_decided_is_said():
    sequential = Sequential(0.001, looks=(2, 3))
    assert sequential.add(1.0, 1.0) is None
    assert sequential.add(1.0, 1.3) is None
    decision = sequential.add(1.3, 1.0)
    assert decision.verdict == "undecided"
    assert "undecided within the budget: B/A is" in decision.sentence("throughput")


@pytest.mark.parametrize(
    ("b", "sentence"),
    [
        (1.0, "no difference > 3.0%: B/A is 1.000"),
        (2.0, "B is higher, which is worse: B/A is 2.000"),
        (0.5, "A is higher, which is worse: B/A is 0.500"),
    ],
)
def test_sentences(b, sentence):
    sequential = Sequential(0.03)
    decisions = [sequential.add(1.0, b) for _ in range(LOOKS[0])]
    assert decisions[:-1] == [None] * (LOOKS[0] - 1)
    assert decisions[-1].sentence("latency").startswith(sentence)


def test_of_throughput_the_higher_one_is_better():
    assert in_words("B is higher", "throughput") == "B is higher, which is better"
    assert in_words("B is higher", "latency") == "B is higher, which is worse"
    assert in_words("undecided", "latency") == "undecided"


def goodput_of(shares_a, shares_b, requests=32, margin=0.03, rate=4.0):
    """Pairs are added until they decide."""
    sequential = SequentialGoodput(rate, requests, margin)
    for a, b in zip(shares_a, shares_b, strict=True):
        if (decision := sequential.add(a, b)) is not None:
            return decision
    raise AssertionError("the last look decides")


def test_goodput_of_equal_systems_differs_in_at_most_five_of_a_hundred_comparisons():
    """Counts of requests within limits, of systems that both wander."""
    draw, trials, wrong = np.random.Generator(np.random.Philox(key=9)), 400, 0
    for _ in range(trials):
        middle = np.clip(0.8 + 0.1 * np.cumsum(draw.normal(size=28)) / 5, 0.05, 0.95)
        a, b = (draw.binomial(32, middle) / 32 for _ in "ab")
        wrong += goodput_of(a, b).verdict in ("A is higher", "B is higher")
    assert wrong <= 0.05 * trials


def test_goodput_that_differs_is_found():
    draw, trials, right = np.random.Generator(np.random.Philox(key=10)), 100, 0
    for _ in range(trials):
        decision = goodput_of(draw.binomial(32, 0.6, 28) / 32, draw.binomial(32, 0.8, 28) / 32)
        right += decision.verdict == "B is higher" and decision.interval[0] <= 0.8 <= decision.interval[1]
    assert right >= 0.9 * trials


def test_goodput_may_be_nothing_at_all():
    decision = goodput_of([0.0] * 28, [1.0] * 28)
    assert (decision.verdict, decision.a, decision.b, decision.rounds) == ("B is higher", 0.0, 4.0, 4)
    assert "B is higher, which is better: A 0, B 4 requests/s within the objective, B - A +4" in decision.sentence()


def test_few_requests_that_all_keep_the_objective_do_not_prove_that_all_would():
    assert goodput_of([1.0] * 28, [1.0] * 28, requests=2).verdict == "undecided"
    decision = goodput_of([1.0] * 28, [1.0] * 28, requests=200)
    assert (decision.verdict, decision.rounds) == ("no difference", 4)
    assert decision.sentence().startswith("no difference > 3.0% of the offered rate")
