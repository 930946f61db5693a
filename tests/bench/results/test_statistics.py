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
    ratio_interval,
    serial_percentile_interval,
    values_needed,
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


def correlated(draw, count, correlation):
    """A process of first order around 0, with a deviation of 1."""
    noise, series = draw.normal(size=count), np.empty(count)
    series[0] = noise[0]
    for at in range(1, count):
        series[at] = correlation * series[at - 1] + math.sqrt(1 - correlation**2) * noise[at]
    return series


def test_intervals_of_medians_cover_correlated_series():
    draw, hits, plain, trials = generator(), 0, 0, 300
    for _ in range(trials):
        series = correlated(draw, 60, 0.6)
        low, high = serial_percentile_interval(series, 0.5)
        hits += low <= 0 <= high
        low, high = percentile_interval(series, 0.5)
        plain += low <= 0 <= high
    assert hits >= 0.92 * trials
    assert plain < 0.85 * trials
    assert serial_percentile_interval(np.arange(4.0), 0.5) is None
    assert serial_percentile_interval(np.arange(0.0), 0.5) is None


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("count", [20, 40, 300])
def test_batch_means_cover_correlated_series(count, correlation):
    draw, hits, naive, trials = generator(), 0, 0, 200
    for _ in range(trials):
        series = correlated(draw, count, correlation)
        low, high = batch_means_interval(series)
        hits += low <= 0 <= high
        low, high = mean_interval(series)
        naive += low <= 0 <= high
    assert 0.91 * trials <= hits <= 0.99 * trials
    if correlation == 0.6:
        assert naive < 0.8 * trials  # what it is needed for


def test_batch_means_cover_skewed_values():
    draw, trials = generator(), 400
    intervals = [batch_means_interval(draw.exponential(size=20)) for _ in range(trials)]
    assert 0.93 * trials <= sum(low <= 1 <= high for low, high in intervals) <= 0.99 * trials


def test_an_interval_of_equal_values_has_no_width():
    assert batch_means_interval(np.full(20, 3.0)) == (3.0, 3.0)
    low, high = ratio_interval(np.full(20, 1.0), np.full(20, 0.1))
    assert (low, high) == pytest.approx((10, 10), rel=1e-5)
    assert low < 10 < high


@pytest.mark.parametrize("count", [16, 60])
def test_intervals_of_ratios_cover(count):
    draw, trials, hits = generator(1), 200, 0
    for _ in range(trials):
        times = draw.exponential(size=count)
        low, high = ratio_interval(30 * times + 10 * draw.exponential(size=count), times)
        hits += low <= 40 <= high
    assert 0.92 * trials <= hits


def test_ratios_of_too_few_or_of_nothing_have_no_interval():
    assert ratio_interval(np.ones(4), np.ones(4)) is None
    assert ratio_interval(np.zeros(20), np.ones(20)) is None
    slow = ratio_interval(np.ones(20), np.repeat([1.0, 9.0], 10))  # one step: nothing says how many there will be
    assert slow[1] / slow[0] > 9


def test_bootstrap_covers():
    draw = generator()
    intervals = [bootstrap_interval(draw.normal(size=30), lambda values: float(values.mean())) for _ in range(60)]
    assert sum(low <= 0 <= high for low, high in intervals) >= 51
    assert bootstrap_interval(np.arange(9.0), np.mean, seed=3) == bootstrap_interval(np.arange(9.0), np.mean, seed=3)


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=20), st.floats(0.5, 2))
def test_paired_ratio_of_scaled_values(values, factor):
    ratio = paired_ratio(values, [value * factor for value in values])
    assert ratio.ratio == pytest.approx(factor)
    assert ratio.low == pytest.approx(factor)
    assert ratio.high == pytest.approx(factor)
    assert paired_ratio(values[:1], values[:1]).high > 1e100
