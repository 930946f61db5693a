"""Random integers are SplitMix64's, and lengths follow the distributions that their tables say they do."""

import math
import tomllib
from pathlib import Path
from statistics import NormalDist

import pytest

import roofline.bench.traffic as traffic
from roofline.bench.traffic.random_integers import RandomIntegers
from roofline.bench.traffic.texts import lengths

TABLES = tomllib.loads((Path(traffic.__file__).parent / "lengths.toml").read_text())


def test_the_generator_is_splitmix64():
    random = RandomIntegers(1234567)  # the test vector that implementations of SplitMix64 are published with
    assert [random.bits() for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_streams_of_a_seed_differ():
    seen = {RandomIntegers(seed, stream).bits() for seed in (0, 1, 2**64 - 1) for stream in ("", "a", "b", "ab", "ba")}
    assert len(seen) == 15


@pytest.mark.parametrize("count", [0, 1, 5, 1000])
@pytest.mark.parametrize("values", [range(1), range(7), range(1 << 20)], ids=len)
def test_some_values_are_those_of_as_many_calls_for_one(values, count):
    together, apart = RandomIntegers(2**64 - 3, "words"), RandomIntegers(2**64 - 3, "words")
    assert together.some_of(values, count) == [apart.one_of(values) for _ in range(count)]
    assert together.bits() == apart.bits()


def test_below_is_even():
    random = RandomIntegers(5)
    counts = [0] * 7
    for _ in range(7000):
        counts[random.below(7)] += 1
    assert min(counts) > 880
    assert max(counts) < 1120


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_the_quantiles_of_their_distribution(name):
    table, normal = TABLES[name], NormalDist()
    low, high = (normal.cdf(math.log(table[end] / table["median"]) / table["sigma"]) for end in ("least", "most"))
    quantiles = table["quantiles"]
    assert quantiles[0] == table["least"]
    assert quantiles[-1] == table["most"]
    assert len(quantiles) == 65
    for number, value in enumerate(quantiles[1:-1], start=1):
        exact = table["median"] * math.exp(table["sigma"] * normal.inv_cdf(low + number / 64 * (high - low)))
        assert abs(value - exact) < 0.51, number


def test_lengths_interpolate_between_quantiles():
    random = RandomIntegers(1)
    draws = sorted(random.length(lengths("typical_prompt")) for _ in range(8000))
    quantiles = lengths("typical_prompt")
    for part in (8, 16, 32, 48, 56):
        assert abs(draws[len(draws) * part // 64] / quantiles[part] - 1) < 0.08
    assert draws[0] >= quantiles[0]
    assert draws[-1] <= quantiles[-1]
    assert len(set(draws)) > 400  # not only the 65 of the table
