"""A small fleet exactly: the real scheduler of every replica, each on its own virtual clock, behind one router."""

import heapq
import time

import numpy as np

from roofline.backends.simulated.calibration import Calibration
from roofline.backends.simulated.executable import SimulatedExecutable
from roofline.bench.plan.arrangements import Arrangement
from roofline.bench.plan.closed_loop import Served
from roofline.bench.plan.fleet.figures import FleetFigures, Times
from roofline.bench.plan.fleet.lengths import Requests
from roofline.bench.plan.fleet.routing import Router
from roofline.bench.plan.fleet.spec import FleetSpec, Routing
from roofline.bench.workloads import token_ids
from roofline.common.errors import ConfigError
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams


class _Copy:
    """One replica: its engine, the requests that it has by their ids."""

    def __init__(self, executable: SimulatedExecutable) -> None:
        self.executable = executable
        self.engine = LocalEngine(executable, EngineConfig(prefix_cache=True, overlap=False, measure=False))
        self.open: dict[str, Served] = {}


class ExactFleet:
    """Runs a fleet whose replicas neither scale nor fail."""

    def __init__(self, spec: FleetSpec, arrangement: Arrangement, calibration: Calibration, routing: Routing) -> None:
        self._spec, self._routing = spec, routing
        self._requests, self._router = Requests(spec.traffic), Router(routing, spec.traffic.seed)
        copies = range(spec.replicas.start)
        self._copies = [_Copy(arrangement.executable(calibration, f"{spec.name} {at}")) for at in copies]
        self._ttft, self._tpot = Times(), Times()
        self._came = self._tokens = self._refused = 0
        self._busy = 0.0
        self._prefixes: dict[int, list[int]] = {}
        limits = self._copies[0].engine.limits
        self._most_running, self._longest = limits.sequences, limits.max_model_len

    def run(self) -> FleetFigures:
        spec, begun = self._spec, time.perf_counter()
        up = np.arange(len(self._copies))
        requests = self._requests.until(spec.traffic.seconds)
        columns = (requests.moments, requests.prompts, requests.answers, requests.prefixes)
        for moment, prompt, answer, prefix in zip(*(column.tolist() for column in columns), strict=True):
            self._until(moment)
            self._come(moment, up, prompt, answer, prefix)
        self._until(spec.traffic.seconds)
        return self._figures(time.perf_counter() - begun)

    def _come(self, moment: float, up: np.ndarray, prompt: int, answer: int, prefix: int) -> None:
        load = np.array([len(copy.open) for copy in self._copies])
        self._came += 1
        copy = self._copies[int(self._router.assign(up, load, np.array([prefix], np.int32))[0])]
        if len(copy.open) >= self._most_running + self._spec.replicas.most_waiting:
            self._refused += 1
            return
        if not copy.engine.has_work:
            copy.executable.virtual.reach(moment)
        ids = self._ids(prompt, prefix)
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, seed=0)
        copy.open[copy.engine.submit(ids, params)] = Served(prompt, answer, moment)

    def _ids(self, prompt: int, prefix: int) -> list[int]:
        """Ids of a prompt that begins with its prefix, and shares nothing else."""
        shared = self._spec.traffic.prefix_tokens
        if shared and prefix not in self._prefixes:
            self._prefixes[prefix] = token_ids(shared, prefix)
        own = token_ids(prompt - shared, self._spec.traffic.prefixes + self._came)
        return [*self._prefixes[prefix], *own] if shared else own

    def _until(self, moment: float) -> None:
        """Let each replica run its steps that begin before a moment, the one that is furthest back first."""
        queue = [(copy.executable.clock.now(), at) for at, copy in enumerate(self._copies) if copy.engine.has_work]
        heapq.heapify(queue)
        while queue and queue[0][0] < moment:
            _, at = queue[0]
            copy = self._copies[at]
            self._step(copy)
            if copy.engine.has_work:
                heapq.heapreplace(queue, (copy.executable.clock.now(), at))
            else:
                heapq.heappop(queue)

    def _step(self, copy: _Copy) -> None:
        events, now = copy.engine.step(), copy.executable.clock.now()
        for event in events:
            request = copy.open[event.request_id]
            if event.ids:
                request.first = now if request.first is None else request.first
                request.last, request.ids = now, request.ids + len(event.ids)
            if event.finish_reason is not None:
                if event.finish_reason != "length":
                    raise ConfigError(f"a request of the fleet ended with {event.finish_reason}: {event.error}")
                assert event.usage is not None, "it ended"
                del copy.open[event.request_id]
                self._count(request, event.usage.queue_seconds or 0.0)

    def _count(self, request: Served, waited: float) -> None:
        self._busy += request.seconds - waited
        self._tokens += request.ids
        self._ttft.add(np.array([request.ttft]))
        self._tpot.add(np.array([request.tpot or 0.0]))

    def _figures(self, wall: float) -> FleetFigures:
        spec, replicas = self._spec, len(self._copies)
        states = [copy.engine.state for copy in self._copies]
        shared = spec.traffic.prefix_tokens * self._came
        hits = sum(state.prefix_hits for state in states) / shared if shared else 0.0
        running = sum(
            spec.traffic.seconds - request.submitted for copy in self._copies for request in copy.open.values()
        )
        used = (self._busy + running) / (replicas * self._most_running * spec.traffic.seconds)
        hours = spec.traffic.seconds / 3600
        for copy in self._copies:
            copy.engine.close()
        return FleetFigures(
            routing=self._routing,
            scaling="fixed",
            method="exact",
            seconds=spec.traffic.seconds,
            requests=self._came,
            answered=self._tpot.count,
            refused=self._refused,
            resent=0,
            tokens=self._tokens,
            ttft=self._ttft,
            tpot=self._tpot,
            used=used,
            replicas=replicas,
            least_replicas=replicas,
            most_replicas=replicas,
            started=0,
            failures=0,
            hits=min(1.0, hits),
            wall_seconds=wall,
            usd=None if spec.price is None else spec.price * spec.model.devices * replicas * hours,
        )
