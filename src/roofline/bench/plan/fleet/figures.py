"""Times of very many requests, counted in classes of a fixed ratio, and what a fleet's run comes to."""

from dataclasses import dataclass

import numpy as np

LOWEST, RATIO, CLASSES = 1e-5, 1.01, 2400  # seconds; the last class begins above 200,000


class Times:
    """Seconds of requests: their mean, and percentiles to one per cent, however many there are."""

    def __init__(self) -> None:
        self._counts = np.zeros(CLASSES)
        self._sum = 0.0

    def add(self, seconds: np.ndarray, weights: np.ndarray | None = None) -> None:
        """Count times. weights: how many requests each stands for."""
        if not len(seconds):
            return
        at = np.log(np.maximum(seconds, LOWEST) / LOWEST) / np.log(RATIO)
        classes = np.minimum(at.astype(np.int64), CLASSES - 1)
        self._counts += np.bincount(classes, weights, CLASSES)
        self._sum += float(seconds.sum() if weights is None else seconds @ weights)

    @property
    def count(self) -> int:
        return round(float(self._counts.sum()))

    @property
    def mean(self) -> float:
        """0 of none."""
        return self._sum / max(1.0, float(self._counts.sum()))

    def percentile(self, percent: float) -> float:
        """The time that so many per cent of the requests do not exceed; 0 of none."""
        below = np.cumsum(self._counts)
        if not below[-1]:
            return 0.0
        at = int(np.searchsorted(below, percent / 100 * below[-1]))
        return float(LOWEST * RATIO ** (at + 0.5))


@dataclass(frozen=True)
class FleetFigures:
    """What a fleet did under one routing and one scaling.

    seconds: that were simulated; requests: that came; answered, refused: of these; resent: because their replica
    failed; tokens: generated; ttft, tpot: of the answered; used: average share of the requests that the replicas which
    are up can compute at the same time; replicas, most_replicas, least_replicas: that cost money, on average and at
    the extremes; started, failures: of replicas; hits: share of the prompts whose beginning was in a cache;
    wall_seconds: of the simulation; method: "exact" or "model"; usd: of all devices, None without a price.
    """

    routing: str
    scaling: str
    method: str
    seconds: float
    requests: int
    answered: int
    refused: int
    resent: int
    tokens: int
    ttft: Times
    tpot: Times
    used: float
    replicas: float
    least_replicas: int
    most_replicas: int
    started: int
    failures: int
    hits: float
    wall_seconds: float
    usd: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def usd_per_mtok(self) -> float | None:
        """USD for a million generated tokens."""
        return None if self.usd is None or not self.tokens else self.usd / self.tokens * 1e6
