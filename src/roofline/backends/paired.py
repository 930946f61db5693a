"""Is A faster than B, or is it noise? Statistics of pairs that were measured side by side."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

CONFIDENCE = 0.99
LEAST_PAIRS = 10  # fewer give no interval at this confidence


@dataclass(frozen=True)
class Interval:
    """Median of paired ratios and where the true one lies with CONFIDENCE. Ratios, 1 meaning equal."""

    ratio: float
    low: float
    high: float


def interval(logs: Sequence[float]) -> Interval:
    """The median ratio of pairs, given the logarithms of their ratios, with its distribution-free interval.

    The bounds are order statistics: the median lies between the k-th smallest and the k-th largest sample unless a fair
    coin shows fewer than k heads in n throws (the sign test's interval; Conover, Practical Nonparametric Statistics).
    Outliers of a busy machine move neither the median nor the bounds far. Fewer than LEAST_PAIRS pairs give an interval
    that holds everything.
    """
    if not logs:
        return Interval(1.0, 0.0, math.inf)
    ordered, n = sorted(logs), len(logs)
    centre = math.exp(median(ordered))
    if n < LEAST_PAIRS:
        return Interval(centre, 0.0, math.inf)
    tail, k = 0.0, 0
    while True:
        tail += math.comb(n, k) / 2**n
        if tail > (1 - CONFIDENCE) / 2:
            break
        k += 1
    return Interval(centre, math.exp(ordered[k - 1]), math.exp(ordered[n - k]))


def noise(logs: Sequence[float]) -> float:
    """What pairs of the same thing differ by: the interval's farther bound from 1, as a share."""
    bounds = interval(logs)
    return max(bounds.high - 1, 1 - bounds.low)
