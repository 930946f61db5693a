"""Intervals for what was measured: of means that are correlated in time, of percentiles, of ratios of paired blocks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roofline.train.parity.statistics import t_quantile

CONFIDENCE = 0.95
BATCHES, FEWEST_BATCHES = 20, 5
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


def batch_means_interval(series: Values) -> Interval | None:
    """A 95 % interval of the mean of a series whose neighbours are correlated: of the means of batches of it. None of
    a series that is too short for batches."""
    size = max(1, len(series) // BATCHES)
    count = len(series) // size
    if count < FEWEST_BATCHES:
        return None
    return mean_interval(series[: count * size].reshape(count, size).mean(1))


def bootstrap_interval(values: Values, statistic: Callable[[Values], float], seed: int = 0) -> Interval | None:
    """A 95 % interval of any statistic of independent values, by resampling. The resamples follow from the seed."""
    if len(values) < 2:
        return None
    draw = np.random.Generator(np.random.Philox(key=seed))
    picks = draw.integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile([statistic(values[pick]) for pick in picks], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def warm_up_length(series: Values) -> int:
    """How many values at the beginning of a series are its warm-up (MSER: White 1997): without them the mean of the
    rest has the smallest estimated error. At most half of the series; 0 of fewer than ten values."""
    n = len(series)
    if n < 10:
        return 0
    rest = np.arange(n, n // 2, -1)  # values that are left without the first 0, 1, 2, ...
    sums = np.cumsum(series[::-1])[::-1][: len(rest)]
    squares = np.cumsum(np.square(series[::-1]))[::-1][: len(rest)]
    errors = (squares - np.square(sums) / rest) / np.square(rest)
    return int(np.argmin(errors))


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
