"""Intervals for what was measured: of means that are correlated in time, of percentiles, of ratios of paired blocks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from roofline.train.parity.statistics import t_quantile

CONFIDENCE = 0.95
BATCHES, FEWEST_BATCHES = 20, 5
CAUTION = 0.3  # standard errors that are added to a correlation: too low a one costs more coverage than too high a one
MOST_CORRELATION = 0.9  # of neighbouring batches: a run that shows more is too short to tell how much more
MOST_SLOWER = 3.0  # times the reach of slow waves, that a correlation of batches may lead to
MOST_REACH = 10.0  # of a logarithm
FINEST = 1e-6  # of a ratio: no interval is narrower, as moments are rounded and clocks differ by as much
RESAMPLES = 1000
_EXACT = 2000  # values up to which binomial probabilities are summed, not approximated

Interval = tuple[float, float]
Values = NDArray[np.float64]


def values_needed(share: float) -> int:
    """How many values a percentile needs so that, in 95 of 100 cases, at least one of them lies beyond it: 299 for
    0.99, 59 for 0.95, 29 for 0.9, 5 for the median."""
    return math.ceil(math.log(1 - CONFIDENCE) / math.log(share))


def percentile(values: Values, share: float) -> float | None:
    """The value below which that share of the values lies, None of fewer values than it needs."""
    return None if len(values) < values_needed(share) else float(np.quantile(values, share))


def percentile_interval(values: Values, share: float) -> Interval | None:
    """A 95 % interval of a percentile, whatever the distribution: two of the values in their order, whose ranks the
    binomial distribution gives. None where there are too few values for it."""
    n, half = len(values), (1 - CONFIDENCE) / 2
    ordered = np.sort(values)
    below = _binomial_cdf(n, share)  # [n + 1]: probability that at most k of the values lie below the percentile
    low = int(np.searchsorted(below, half, side="right")) - 1  # the largest k whose probability is at most half
    high = int(np.searchsorted(below, 1 - half, side="left")) + 1
    if low < 0 or high > n:
        return None
    return float(ordered[low]), float(ordered[high - 1])


def _binomial_cdf(n: int, share: float) -> Values:
    if n > _EXACT:
        spread = math.sqrt(2 * n * share * (1 - share))
        return np.array([0.5 * (1 + math.erf((k + 0.5 - n * share) / spread)) for k in range(n + 1)])
    logs = [
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        + k * math.log(share) + (n - k) * math.log1p(-share)
        for k in range(n + 1)
    ]  # fmt: skip
    return np.minimum(np.cumsum(np.exp(logs)), 1.0)


def mean_interval(values: Values) -> Interval | None:
    """A 95 % interval of the mean of independent values, by Student's t."""
    n = len(values)
    if n < 2:
        return None
    reach = t_quantile(1 - CONFIDENCE, n - 1) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return float(values.mean()) - reach, float(values.mean()) + reach


@dataclass(frozen=True)
class _MeanError:
    """The standard error of a series' mean. freedom: degrees of freedom of it; bend: what skew adds to a quantile."""

    error: float
    freedom: float
    bend: float = 0.0


def batch_means_interval(series: Values) -> Interval | None:
    """A 95 % interval of the mean of a series whose neighbours may be correlated, and whose values may lie more to one
    side. None of a series that is too short for batches.

    The spread is that of the means of up to BATCHES batches, with what their own correlation adds (a process of first
    order), so many degrees of freedom as there are independent batches, and Johnson's transformation for their skew
    (Willink 2005), as in N-Skart (Tafazzoli and others 2011).
    """
    if len(series) < FEWEST_BATCHES:
        return None
    middle, of = float(series.mean()), _batch_error(series)
    reach = _reach(math.floor(10 * of.freedom))
    return middle - _bent(reach, of.bend) * of.error, middle - _bent(-reach, of.bend) * of.error


def _batch_error(series: Values) -> _MeanError:
    n = len(series)
    count = min(BATCHES, n)
    edges = np.arange(count) * n // count
    means = np.add.reduceat(series, edges) / np.diff(edges, append=n)
    off = means - means.mean()
    squares = float(off @ off)
    if squares == 0:
        return _MeanError(0.0, count - 1)
    correlation = float(off[1:] @ off[:-1]) / squares
    correlation += (1 + 4 * correlation) / count  # the bias of a short series (Kendall 1954)
    correlation += CAUTION / math.sqrt(count)
    correlation = min(max(correlation, 0.0), MOST_CORRELATION)
    inflation = (1 + correlation) / (1 - correlation)
    variance = squares / (count - 1) / max(1 - (inflation - 1) / (count - 1), 0.3)
    skew = float(np.mean(off**3)) / (squares / count) ** 1.5 * math.sqrt(count * (count - 1)) / (count - 2)
    freedom = max(count / inflation - 1, 1.0)
    error = math.sqrt(variance * inflation / count)
    return _MeanError(error, freedom, skew / (6 * math.sqrt(count)))


def _slow_reach(series: Values, waves: int) -> float:
    """How far the mean may be off, from so many of the slowest cosine waves of a series alone (Mueller 2007): what goes
    up and down faster does not reach them."""
    n = len(series)
    waves = min(max(waves, 1), BATCHES, n - 1)
    angles = np.pi * np.outer(np.arange(1, waves + 1), np.arange(n) + 0.5) / n
    weights = np.cos(angles) @ series * math.sqrt(2 / n)
    return math.sqrt(float(weights @ weights) / waves / n) * _reach(10 * waves)


def _mean_reach(series: Values, beside: float) -> float:
    """How far the 95 % interval of the mean of a series goes to either side, of values that came `beside` at a time:
    those share what moves the system while they are under way, so a lap of them may say no more than two do.

    Batches know a correlation that fades from one to the next, not one that lasts for all of a lap. So they have no
    more degrees of freedom than there are half laps, and what moves as slowly as a lap sets the least reach, and by
    MOST_SLOWER the most.
    """
    laps, of = len(series) / beside, _batch_error(series)
    slow = _slow_reach(series, round(laps))
    batches = of.error * _reach(math.floor(10 * min(of.freedom, max(2 * laps - 1, 1.0))))
    return max(slow, min(batches, MOST_SLOWER * slow))


@cache
def _reach(tenths: int) -> float:
    """The quantile of Student's t for an interval, of so many tenths of a degree of freedom."""
    return t_quantile(1 - CONFIDENCE, tenths / 10)


def _bent(reach: float, bend: float) -> float:
    """How many standard errors away an end of an interval lies, of a mean of skewed values."""
    return reach if abs(bend) < 1e-9 else (math.cbrt(1 + 6 * bend * (reach - bend)) - 1) / (2 * bend)


def serial_percentile_interval(series: Values, share: float, beside: float = 1.0) -> Interval | None:
    """A 95 % interval of a percentile of values in the order in which they came, neighbours of which may be correlated:
    that of independent values, or a wider one where their ranks are correlated. beside: how many of them were under way
    at a time. None where there are too few values for it, or where they move together so much that those say no more
    than too few would."""
    plain = percentile_interval(series, share)
    if plain is None or len(series) < FEWEST_BATCHES or plain[0] == plain[1]:
        return plain
    ranks = (np.argsort(np.argsort(series)) + 0.5) / len(series)
    # The deviation of a rank is the root of 1/12, that of lying below the percentile the root of share * (1 - share).
    reach = _mean_reach(ranks - ranks.mean(), beside) * math.sqrt(12 * share * (1 - share))
    if reach > min(share, 1 - share) and len(series) / beside < values_needed(max(share, 1 - share)):
        return None  # the least and the largest value of few laps are not as far as any value lies
    low, high = np.quantile(series, [max(share - reach, 0.0), min(share + reach, 1.0)]).tolist()
    return min(plain[0], low), max(plain[1], high)


def ratio_interval(amounts: Values, times: Values, beside: float = 1.0) -> Interval | None:
    """A 95 % interval of the sum of amounts over the sum of the times that they took, which may be correlated, with
    each other and in time. beside: how many of them were under way at a time. None of too few values.

    What is uncertain is the mean of amount - ratio * time; it is taken relative to the ratio, on a logarithmic scale,
    so that no end is below zero.
    """
    total = float(times.sum())
    middle = float(amounts.sum()) / total if total > 0 else 0.0
    if middle <= 0 or len(amounts) < FEWEST_BATCHES:
        return None
    off = (amounts - middle * times) / (middle * float(times.mean()))
    reach = min(max(_mean_reach(off, beside), FINEST), MOST_REACH)
    return middle * math.exp(-reach), middle * math.exp(reach)


def bootstrap_interval(values: Values, statistic: Callable[[Values], float], seed: int = 0) -> Interval | None:
    """A 95 % interval of any statistic of independent values, by resampling. The resamples follow from the seed."""
    if len(values) < 2:
        return None
    draw = np.random.Generator(np.random.Philox(key=seed))
    picks = draw.integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile([statistic(values[pick]) for pick in picks], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


@dataclass(frozen=True)
class Ratio:
    """The ratio of B to A over pairs of blocks, with the interval that a level of error leaves."""

    ratio: float
    low: float
    high: float
    pairs: int


def paired_ratio(a: Sequence[float], b: Sequence[float], error: float = 1 - CONFIDENCE) -> Ratio:
    """The geometric mean of b/a over pairs of blocks that were measured next to each other, so that what moves both
    cancels. error: the probability that the interval may miss the true ratio."""
    logs = np.log(np.asarray(b)) - np.log(np.asarray(a))
    n, middle = len(logs), float(logs.mean())
    reach = math.inf
    if n >= 2:
        reach = t_quantile(error, n - 1) * float(np.std(logs, ddof=1)) / math.sqrt(n)
    return Ratio(math.exp(middle), math.exp(middle - reach), math.exp(min(middle + reach, 700.0)), n)


def paired_difference(a: Sequence[float], b: Sequence[float], error: float = 1 - CONFIDENCE) -> Interval:
    """The interval of the mean of b - a over pairs of blocks that were measured next to each other. error: the
    probability that it may miss the true mean."""
    off = np.asarray(b, dtype=float) - np.asarray(a, dtype=float)
    n, middle = len(off), float(off.mean())
    reach = math.inf if n < 2 else t_quantile(error, n - 1) * float(np.std(off, ddof=1)) / math.sqrt(n)
    return middle - reach, middle + reach
