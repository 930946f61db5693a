"""The states of a fleet's replicas: starting, up, draining, failed, off; what scaling decides and failures do."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from roofline.bench.plan.fleet.spec import FleetSpec, Scaling, targets_of
from roofline.deploy.scaling import FleetLoad, ScalingMemory, decide

OFF, STARTING, UP, DRAINING, FAILED = range(5)


@dataclass(frozen=True)
class WaitingState:
    """The requests that wait in a fleet, as its scaling sees them. first_token_seconds: 95th percentile of the first
    tokens since it was looked at last; None: there were none."""

    count: int = 0
    oldest_seconds: float = 0.0
    first_token_seconds: Callable[[], float | None] = lambda: None


class Replicas:
    """Which of the `most` replicas of a fleet are there. state: int8 [most]; ready: float64 [most], when one that
    starts or is repaired answers; up: int64 [n], those that take requests; gone: int64 [n], those that the last slice
    switched off. most_running: requests that one computes at the same time."""

    def __init__(self, spec: FleetSpec, scaling: Scaling, most_running: int) -> None:
        self._spec, self._most_running = spec, most_running
        self._targets, self._memory = targets_of(spec, scaling), ScalingMemory()
        self.state = np.full(spec.most, OFF, np.int8)
        self.state[: spec.replicas.start] = UP
        self.ready = np.zeros(spec.most)
        self._rng = np.random.default_rng(spec.traffic.seed + 2)
        self._decided = 0.0
        self.failures = self.started = self.ended = 0
        self.up = np.flatnonzero(self.state == UP)
        self.gone = np.zeros(0, np.int64)

    @property
    def paid(self) -> int:
        """Replicas that cost money: all but those that are off."""
        return int((self.state != OFF).sum())

    def advance(self, now: float, seconds: float, load: np.ndarray, waiting: WaitingState) -> np.ndarray:
        """Let a slice begin. load: int64 [most], requests that each has; waiting: of all these, those that wait.
        Returns the replicas that fail now, int64 [n]."""
        due = ((self.state == STARTING) | (self.state == FAILED)) & (self.ready <= now)
        empty = (self.state == DRAINING) & (load == 0)
        changed = bool(due.any() or empty.any())
        self.state[due] = UP
        self.state[empty] = OFF
        self.gone = np.flatnonzero(empty)
        failed = self._fail(now, seconds)
        if now - self._decided >= self._spec.policies.interval and self._targets is not None:
            self._decided = now
            self._scale(now, load, waiting)
            changed = True
        if changed or len(failed):
            self.up = np.flatnonzero(self.state == UP)
        return failed

    def _fail(self, now: float, seconds: float) -> np.ndarray:
        hours = self._spec.failures.hours_between
        if not hours:
            return np.zeros(0, np.int64)
        running = np.flatnonzero((self.state == UP) | (self.state == DRAINING))
        count = min(int(self._rng.poisson(len(running) * seconds / (hours * 3600))), len(running))
        failed = self._rng.choice(running, count, replace=False)
        self.state[failed] = FAILED
        self.ready[failed] = now + self._spec.failures.repair_seconds
        self.failures += count
        return failed

    def _scale(self, now: float, load: np.ndarray, waiting: WaitingState) -> None:
        """Start or end replicas, as many as the policy wants."""
        assert self._targets is not None, "the fleet is scaled"
        starting = int((self.state == STARTING).sum())  # a failed one comes back by itself
        there = int((self.state == UP).sum()) + starting
        fleet_load = FleetLoad(
            seconds=now,
            up=there - starting,
            starting=starting,
            slots=self._most_running,
            running=int(load.sum()) - waiting.count,
            waiting=waiting.count,
            queue_seconds=waiting.oldest_seconds,
            first_token_seconds=waiting.first_token_seconds(),
        )
        decision = decide(self._targets, fleet_load, self._memory)
        goal, self._memory = decision.replicas, decision.memory
        if goal > there:
            idle = np.flatnonzero(self.state == DRAINING)[: goal - there]
            self.state[idle] = UP  # those that drain are nearest
            cold = np.flatnonzero(self.state == OFF)[: goal - there - len(idle)]
            self.state[cold] = STARTING
            self.ready[cold] = now + self._spec.replicas.start_seconds
            self.started += len(cold)
        elif goal < there:
            up = np.flatnonzero(self.state == UP)
            least = up[np.argsort(load[up], kind="stable")][: min(there - goal, max(0, len(up) - 1))]
            self.state[least] = DRAINING
            self.ended += len(least)
