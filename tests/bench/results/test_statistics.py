"""Intervals cover what they say they cover, and are refused where values are too few."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roofline.bench.results.statistics import (
    batch_means_interval,
    bootstrap_interval,
    mean_interval,
    paired_ratio,
    percentile,
    percentile_interval,
    values_needed,
    warm_up_length,
)


def generator(seed=0):
    return np.random.Generator(np.random.Philox(key=seed))


def test_values_needed():
    assert [values_needed(share) for share in (0.5, 0.9, 0.95, 0.99)] == [5, 29, 59, 299]
    values = np.arange(298.0)
    assert percentile(values, 0.99) is None
    assert percentile(np.arange(299.0), 0.99) == pytest.approx(295.02)


@pytest.mark.parametrize(("n", "ranks"), [(6, (1, 6)), (10, (2, 9)), (20, (6, 15)), (100, (40, 61))])
def test_ranks_of_the_median_are_those_of_tables(n, ranks):
    """As in tables of order statistics, such as Hahn and Meeker 1991, table A.9."""
    low, high = percentile_interval(np.arange(1.0, n + 1), 0.5)
    assert (low, high) == ranks


def test_too_few_values_have_no_interval():
    assert percentile_interval(np.arange(5.0), 0.5) is None
    assert percentile_interval(np.arange(100.0), 0.99) is None
    assert mean_interval(np.array([1.0])) is None
    assert batch_means_interval(np.arange(4.0)) is None
    assert bootstrap_interval(np.array([1.0]), np.median) is None


@pytest.mark.parametrize(("share", "n"), [(0.5, 40), (0.9, 200), (0.95, 3000)])
def test_percentile_intervals_cover(share, n):
    truth, draw = -math.log(1 - share), generator()
    intervals = [percentile_interval(draw.exponential(size=n), share) for _ in range(300)]
    assert sum(low <= truth <= high for low, high in intervals) >= 273  # of 285, less three standard deviations


def test_batch_means_cover_correlated_series():
    draw, hits, naive = generator(), 0, 0
    for _ in range(200):
        noise = draw.normal(size=1200)
        series = np.empty(1200)
        series[0] = noise[0]
        for at in range(1, 1200):
            series[at] = 0.6 * series[at - 1] + noise[at]
        low, high = batch_means_interval(series)
        hits += low <= 0 <= high
        low, high = mean_interval(series)
        naive += low <= 0 <= high
    assert hits >= 178
    assert naive < 160  # what it is needed for


def test_bootstrap_covers():
    draw = generator()
    intervals = [bootstrap_interval(draw.normal(size=30), lambda values: float(values.mean())) for _ in range(60)]
    assert sum(low <= 0 <= high for low, high in intervals) >= 51
    assert bootstrap_interval(np.arange(9.0), np.mean, seed=3) == bootstrap_interval(np.arange(9.0), np.mean, seed=3)


@given(st.integers(0, 30), st.integers(40, 120), st.integers(0, 2**31))
def test_warm_up_is_cut_where_it_ends(cold, warm, seed):
    draw = generator(seed)
    series = np.concatenate([20 + draw.normal(size=cold), draw.normal(size=warm)])
    cut = warm_up_length(series)
    assert cut <= len(series) // 2
    if cold >= 2:
        assert cut >= cold
    assert warm_up_length(series[:9]) == 0


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=20), st.floats(0.5, 2))
def test_paired_ratio_of_scaled_values(values, factor):
    ratio = paired_ratio(values, [value * factor for value in values])
    assert ratio.ratio == pytest.approx(factor)
    assert ratio.low == pytest.approx(factor)
    assert ratio.high == pytest.approx(factor)
    assert paired_ratio(values[:1], values[:1]).high > 1e100
