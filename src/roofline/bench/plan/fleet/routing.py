"""Which replica a request goes to. A router decides for all requests of a slice, from what it knew at its beginning
and what it has sent since."""

import numpy as np

from roofline.bench.plan.fleet.spec import Routing
from roofline.bench.plan.fleet.waiting import places_among

HOMES = 2  # replicas that a prefix belongs to
BOUND = 1.25  # times the average load, above which a prefix's home is passed over
HASH = 0x9E3779B97F4A7C15


class Router:
    """Assigns requests to replicas.

    rng: for choices at random; its own, so that the requests are the same whatever the policy.
    """

    def __init__(self, policy: Routing, seed: int) -> None:
        self._policy, self._rng, self._next = policy, np.random.default_rng(seed + 1), 0

    def assign(self, up: np.ndarray, load: np.ndarray, prefixes: np.ndarray) -> np.ndarray:
        """Replicas of some requests, int64 [requests].

        Args:
            up: int64 [n], replicas that take requests; at least one.
            load: int64 [replicas], requests that each has.
            prefixes: int32 [requests].
        """
        count = len(prefixes)
        if self._policy == "round-robin":
            chosen = up[(self._next + np.arange(count)) % len(up)]
            self._next = (self._next + count) % len(up)
            return chosen
        if self._policy == "least-loaded":
            return up[self._least_loaded(load[up], count)]
        load = load.copy()
        return self._in_parts(up, load, prefixes)

    def _least_loaded(self, load: np.ndarray, count: int) -> np.ndarray:
        """Indices [count] into `load` that fill up the lowest ones, as if requests were sent one after the other, each
        to one of the least loaded."""
        shuffled = self._rng.permutation(len(load))  # equals in any order
        order = shuffled[np.argsort(load[shuffled], kind="stable")]
        levels = load[order]
        below = np.arange(1, len(levels) + 1) * levels - np.cumsum(levels)  # that raise the first k to the k-th's level
        k = int(np.searchsorted(below, count, side="right"))
        each = levels[k - 1] - levels[:k]
        rest = count - int(below[k - 1])
        each = each + rest // k
        each[: rest % k] += 1
        chosen = np.repeat(order[:k], each)
        return self._rng.permutation(chosen)

    def _in_parts(self, up: np.ndarray, load: np.ndarray, prefixes: np.ndarray) -> np.ndarray:
        """A few at a time, so that what was sent counts in what comes after."""
        size = max(1, len(up) // 4)
        chosen = np.empty(len(prefixes), np.int64)
        for start in range(0, len(prefixes), size):
            part = prefixes[start : start + size]
            if self._policy == "prefix":
                replicas = self._home(up, load, part)
            else:
                replicas = self._of_two(up, load, len(part))
            chosen[start : start + size] = replicas
            np.add.at(load, replicas, 1)
        return chosen

    def _of_two(self, up: np.ndarray, load: np.ndarray, count: int) -> np.ndarray:
        """The less loaded of two at random."""
        first, second = up[self._rng.integers(0, len(up), (2, count))]
        return np.where(load[first] <= load[second], first, second)

    def _home(self, up: np.ndarray, load: np.ndarray, prefixes: np.ndarray) -> np.ndarray:
        """The less loaded of the homes of a prefix, unless it is loaded far above the average; then as `_of_two`."""
        keys = prefixes[None].astype(np.uint64) * np.uint64(HOMES) + np.arange(HOMES, dtype=np.uint64)[:, None]
        mixed = (keys + np.uint64(1)) * np.uint64(HASH)
        first, second = up[(mixed >> np.uint64(33)) % np.uint64(len(up))]
        home = np.where(load[first] <= load[second], first, second)
        bound = BOUND * load[up].mean() + 1
        sent = places_among(home)  # a popular beginning comes many times in one part
        return np.where(load[home] + sent <= bound, home, self._of_two(up, load, len(prefixes)))
