"""Percentiles of what a fleet's histograms counted of late: what latency targets of a scaling policy are compared with.

They are those of Prometheus' `histogram_quantile` over the increase since they were asked for last, so that a policy
and a dashboard say the same.
"""

import math

from roofline.deploy.collector.collector import MetricsCollector

Buckets = list[tuple[float, float]]  # upper edge, count up to it; the lowest first, the last edge is infinite


class RecentQuantiles:
    """Percentiles of a collector's histograms, of all models together, since each was asked for last."""

    def __init__(self, collector: MetricsCollector) -> None:
        self._collector = collector
        self._last: dict[str, Buckets] = {}  # by the histogram's name

    def since_last(self, name: str, share: float) -> float | None:
        """Return the value that `share` of the observations since the last call do not exceed; None where there were
        none. Of the first call there is none: what was counted before is of no known time."""
        now = self._collector.histogram(name)
        last = self._last.get(name)
        self._last[name] = now
        if last is None or [edge for edge, _ in last] != [edge for edge, _ in now]:
            return None
        return quantile([(edge, count - before) for (edge, count), (_, before) in zip(now, last, strict=True)], share)


def quantile(buckets: Buckets, share: float) -> float | None:
    """Return the value that `share` of a histogram's observations do not exceed, as far as its buckets tell; None
    without observations. Within a bucket they lie evenly; beyond the last finite edge that edge stands for all."""
    if len(buckets) < 2 or buckets[-1][1] <= 0:
        return None
    rank = share * buckets[-1][1]
    lower, below = (0.0, 0.0) if buckets[0][0] > 0 else (-math.inf, 0.0)
    for edge, count in buckets[:-1]:
        if count >= rank and count > below:
            return edge if lower == -math.inf else lower + (edge - lower) * ((rank - below) / (count - below))
        lower, below = edge, count
    return lower
