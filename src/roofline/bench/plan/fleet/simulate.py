"""A fleet in slices of time: arrays over its replicas, so that an hour of thousands takes seconds."""

import math
import time

import numpy as np

from roofline.bench.plan.fleet.answers import Answers
from roofline.bench.plan.fleet.caches import Caches
from roofline.bench.plan.fleet.figures import FleetFigures, Times
from roofline.bench.plan.fleet.lengths import Requests
from roofline.bench.plan.fleet.prompts import Prompts
from roofline.bench.plan.fleet.replicas import Replicas, WaitingState
from roofline.bench.plan.fleet.routing import Router
from roofline.bench.plan.fleet.service import Service
from roofline.bench.plan.fleet.spec import FleetSpec, Routing, Scaling
from roofline.bench.plan.fleet.waiting import Waiting

SLICES_OF_ANSWER = 16  # in the time that an answer of average length takes


class Simulation:
    """One run of a fleet with one routing and one scaling."""

    def __init__(self, spec: FleetSpec, service: Service, routing: Routing, scaling: Scaling) -> None:
        self._spec, self._service = spec, service
        self._requests = Requests(spec.traffic)
        self._router, self._routing, self._scaling = Router(routing, spec.traffic.seed), routing, scaling
        self._replicas = Replicas(spec, scaling, service.most_running)
        self._answers = Answers(spec.most, int(self._requests.answers.max()))
        self._waiting = Waiting.none()
        self._waits = np.zeros(spec.most, np.int64)  # how many wait at each replica
        self._silent = np.zeros(0, np.int64), np.zeros(0)  # replicas, first ids of requests that have none yet
        self._ended = np.zeros(spec.most, np.int64)  # answers of each in the slice before
        traffic = spec.traffic
        self._caches = Caches(spec.most, service.cache_tokens, traffic.prefixes, traffic.prefix_tokens)
        self._prompts = Prompts(service, spec.most)
        self._ttft, self._tpot = Times(), Times()
        self._lately = Times()  # times to the first token since scaling looked at them last
        self._came = self._refused = self._resent = self._tokens = self._hits = self._looked_up = 0

    def run(self) -> FleetFigures:
        spec, begun = self._spec, time.perf_counter()
        total = spec.traffic.seconds
        slices = math.ceil(total / (spec.slice_seconds or slice_of(self._service, self._requests)))
        seconds = total / slices
        used = paid = 0.0
        least = most = spec.replicas.start
        for index in range(slices):
            self._slice(index * seconds, seconds)
            there, up = self._replicas.paid, len(self._replicas.up)
            paid += there
            least, most = min(least, there), max(most, there)
            used += float(self._answers.running.sum()) / max(1, up * self._service.most_running)
        return FleetFigures(
            routing=self._routing,
            scaling=self._scaling,
            method="model",
            seconds=total,
            requests=self._came,
            answered=self._tpot.count,
            refused=self._refused,
            resent=self._resent,
            tokens=self._tokens,
            ttft=self._ttft,
            tpot=self._tpot,
            used=used / slices,
            replicas=paid / slices,
            least_replicas=least,
            most_replicas=most,
            started=self._replicas.started,
            failures=self._replicas.failures,
            hits=self._hits / max(1, self._looked_up),
            wall_seconds=time.perf_counter() - begun,
            usd=None if spec.price is None else spec.price * spec.model.devices * paid / slices * total / 3600,
        )

    def _slice(self, now: float, seconds: float) -> None:
        load = self._answers.running + self._waits
        failed = self._replicas.advance(now, seconds, load, self._waiting_state(now))
        self._caches.drop(self._replicas.gone)
        lost = self._fail(failed) if len(failed) else 0
        coming = self._come(now, seconds, load, lost)
        admitted = self._admit(self._waiting.with_later(coming))
        progress = self._compute(admitted, now, seconds)
        before = self._answers.running.copy()
        self._end(self._answers.advance(progress, now, seconds))
        self._ended = before - self._answers.running

    def _waiting_state(self, now: float) -> WaitingState:
        """Return what scaling may look at; the first tokens only where it does, and then from that moment on anew."""

        def first_token_seconds() -> float | None:
            times, self._lately = self._lately, Times()
            return times.percentile(95) if times.count else None

        oldest = now - float(self._waiting.arrived.min()) if len(self._waiting) else 0.0
        return WaitingState(len(self._waiting), oldest, first_token_seconds)

    def _fail(self, failed: np.ndarray) -> int:
        """What failed replicas had is lost: how many requests are sent again."""
        there = np.isin(self._waiting.replica, failed)
        lost = self._answers.drop(failed) + int(there.sum())
        self._waiting = self._waiting.chosen(~there)
        self._waits[failed] = 0
        self._caches.drop(failed)
        self._prompts.drop(failed)
        rest = ~np.isin(self._silent[0], failed)
        self._silent = self._silent[0][rest], self._silent[1][rest]
        self._resent += lost
        return lost

    def _come(self, now: float, seconds: float, load: np.ndarray, lost: int) -> Waiting:
        """The requests of a slice with their replicas. What was lost comes again, with lengths of the same kind."""
        new = self._requests.until(now + seconds)
        self._came += len(new)
        if lost:
            new = self._requests.again(np.full(lost, now)).with_later(new)
        up, prefixes = self._replicas.up, new.prefixes
        if not len(up):
            self._refused += len(new)
            return Waiting.none()
        replica = self._router.assign(up, load, prefixes)
        coming = Waiting(replica, new.prompts.astype(np.int64), new.answers.astype(np.int64), new.moments)
        full = self._waits[replica] >= self._spec.replicas.most_waiting
        if full.any():
            self._refused += int(full.sum())
            coming, prefixes = coming.chosen(~full), prefixes[~full]
        if self._spec.traffic.prefixes:
            self._look_up(coming, prefixes)
        return coming

    def _look_up(self, coming: Waiting, prefixes: np.ndarray) -> None:
        """Take the beginnings that are in their replica's cache off the prompts; the others come in."""
        hit = self._caches.look_up(coming.replica, prefixes, coming.prompt + coming.answer)
        coming.prompt[hit] -= self._spec.traffic.prefix_tokens
        self._hits += int(hit.sum())
        self._looked_up += len(hit)

    def _admit(self, requests: Waiting) -> Waiting:
        """Those that their replicas begin with now; the others wait."""
        there = np.bincount(requests.replica, minlength=len(self._waits))
        # What ends during the slice leaves room, on average for half of it; as much will end as in the one before.
        room = self._service.most_running - self._answers.running + (self._ended + 1) // 2
        if (there <= room).all():
            self._waiting, self._waits = Waiting.none(), np.zeros_like(self._waits)
            return requests
        begins = requests.places() < room[requests.replica]
        self._waiting = requests.chosen(~begins)
        self._waits = np.bincount(self._waiting.replica, minlength=len(self._waits))
        return requests.chosen(begins)

    def _compute(self, admitted: Waiting, now: float, seconds: float) -> np.ndarray:
        """Steps of a slice: the progress of each replica, float64 [replicas]. First ids come of the admitted."""
        running, replicas = self._answers.running, len(self._waits)
        count = np.bincount(admitted.replica, minlength=replicas)
        silent = np.bincount(self._silent[0], minlength=replicas)  # whose prompts are still to be computed
        decoding = np.maximum(running - silent + (count - self._ended) / 2, 0)
        prompts = self._prompts.compute(admitted, decoding, now, seconds)
        decode = self._service.decode_step(np.maximum(decoding, 1))
        progress = np.where(running + count > 0, prompts.steps + (seconds - prompts.seconds) / decode, 0.0)
        self._ttft.add(prompts.first - admitted.arrived)
        self._lately.add(prompts.first - admitted.arrived)
        distance = (prompts.first - now) / seconds * progress[admitted.replica] + admitted.answer - 1
        self._answers.add(admitted.replica, distance, prompts.first, admitted.answer)
        rows, first = (
            np.concatenate(pair) for pair in zip(self._silent, (admitted.replica, prompts.first), strict=True)
        )
        later = first > now + seconds
        self._silent = rows[later], first[later]
        return progress

    def _end(self, parts: list[tuple[np.ndarray, ...]]) -> None:
        for count, started, tokens, end in parts:
            self._tokens += int(tokens.sum())
            gaps = np.maximum(tokens - count, 1)
            self._tpot.add(np.maximum(end * count - started, 0) / gaps, count)


def slice_of(service: Service, requests: Requests) -> float:
    """Seconds of a slice that is short beside an answer."""
    step = float(service.decode_step(np.array([service.most_running / 2]))[0])
    return float(np.clip(float(requests.answers.mean()) * step / SLICES_OF_ANSWER, 0.01, 5.0))
