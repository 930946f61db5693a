"""The requests of a fleet: a pool of lengths that are drawn from, and when they come."""

import math

import numpy as np

from roofline.bench.plan.fleet.spec import Spread, TrafficSpec

POOL = 1 << 16
DAY = 86400.0


def drawn(spread: Spread, count: int, rng: np.random.Generator) -> np.ndarray:
    """int32 [count] lengths. Cutting to `most` lowers their mean where sigma is large; the pool's own mean counts."""
    if spread.sigma == 0:
        return np.full(count, round(spread.mean), np.int32)
    centre = math.log(spread.mean) - spread.sigma**2 / 2
    values = np.exp(rng.normal(centre, spread.sigma, count))
    return np.clip(np.rint(values), 1, spread.most).astype(np.int32)


class Requests:
    """Draws requests. Of the same traffic as many come in each slice of the same length, whatever becomes of them."""

    def __init__(self, traffic: TrafficSpec) -> None:
        self._traffic, self._rng = traffic, np.random.default_rng(traffic.seed)
        self._arrivals = np.random.default_rng(traffic.seed + 4)
        prompts = drawn(traffic.prompt, POOL, self._rng)
        self.prompts = np.maximum(prompts, traffic.prefix_tokens + 1).astype(np.int32)  # [POOL]
        self.answers = drawn(traffic.answer, POOL, self._rng)  # int32 [POOL]
        weights = 1 / np.arange(1, traffic.prefixes + 1)
        self._popular = np.cumsum(weights / weights.sum()) if traffic.prefixes else None

    def rate(self, moment: float) -> float:
        """Requests a second at a moment, in seconds since midnight of the first day."""
        traffic = self._traffic
        return traffic.rate * (1 + traffic.swing * math.cos(2 * math.pi * (moment / DAY - traffic.peak_hour / 24)))

    def count(self, start: float, seconds: float) -> int:
        """How many come in a slice of time."""
        return int(self._arrivals.poisson(self.rate(start + seconds / 2) * seconds))

    def draw(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Prompt tokens, answer tokens, prefix of each, int32 [count]; prefix 0 where there are none."""
        chosen = self._rng.integers(0, POOL, count)
        if self._popular is None:
            prefixes = np.zeros(count, np.int32)
        else:
            prefixes = np.searchsorted(self._popular, self._rng.random(count)).astype(np.int32)
        return self.prompts[chosen], self.answers[chosen], prefixes
