"""The requests of a fleet: a pool of lengths that are drawn from, and when they come."""

import math
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Drawn:
    """Requests. moments: float64 [n], ascending; prompts, answers: int32 [n], tokens; prefixes: int32 [n], which of the
    beginnings each has, 0 where there are none."""

    moments: np.ndarray
    prompts: np.ndarray
    answers: np.ndarray
    prefixes: np.ndarray

    def __len__(self) -> int:
        return len(self.moments)

    def part(self, which: slice) -> "Drawn":
        """Some of them."""
        return Drawn(self.moments[which], self.prompts[which], self.answers[which], self.prefixes[which])

    def with_later(self, later: "Drawn") -> "Drawn":
        """These, then those."""
        pairs = zip(vars(self).values(), vars(later).values(), strict=True)
        return Drawn(*(np.concatenate(pair) for pair in pairs))


class Requests:
    """Draws requests, a second of them at a time: the same traffic gives the same ones, however they are fetched and
    whatever becomes of them."""

    def __init__(self, traffic: TrafficSpec) -> None:
        self._traffic = traffic
        self._rng, self._again = (np.random.default_rng((traffic.seed, at)) for at in (0, 1))
        prompts = drawn(traffic.prompt, POOL, self._rng)
        self.prompts = np.maximum(prompts, traffic.prefix_tokens + 1).astype(np.int32)  # [POOL]
        self.answers = drawn(traffic.answer, POOL, self._rng)  # int32 [POOL]
        weights = 1 / np.arange(1, traffic.prefixes + 1)
        self._popular = np.cumsum(weights / weights.sum()) if traffic.prefixes else None
        self._second = 0
        self._ready = self._draw(np.zeros(0), self._rng)

    def rate(self, moment: float) -> float:
        """Requests a second at a moment, in seconds since midnight of the first day."""
        traffic = self._traffic
        return traffic.rate * (1 + traffic.swing * math.cos(2 * math.pi * (moment / DAY - traffic.peak_hour / 24)))

    def until(self, moment: float) -> Drawn:
        """Those that come before a moment and were not fetched yet."""
        while self._second < moment:
            count = int(self._rng.poisson(self.rate(self._second + 0.5)))
            moments = self._second + np.sort(self._rng.random(count))
            self._ready = self._ready.with_later(self._draw(moments, self._rng))
            self._second += 1
        at = int(np.searchsorted(self._ready.moments, moment))
        fetched, self._ready = self._ready.part(slice(at)), self._ready.part(slice(at, None))
        return fetched

    def again(self, moments: np.ndarray) -> Drawn:
        """Requests of the same kind at these moments, in place of others that were lost."""
        return self._draw(moments, self._again)

    def _draw(self, moments: np.ndarray, rng: np.random.Generator) -> Drawn:
        count = len(moments)
        chosen = rng.integers(0, POOL, count)
        if self._popular is None:
            prefixes = np.zeros(count, np.int32)
        else:
            prefixes = np.searchsorted(self._popular, rng.random(count)).astype(np.int32)
        return Drawn(moments, self.prompts[chosen], self.answers[chosen], prefixes)
