"""Lets a fleet's load say how many servers run, by the policy of `deploy/scaling.py`, and records each decision."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from roofline.common import log
from roofline.common.files import cause_of
from roofline.deploy.children import bound_log
from roofline.deploy.scaling import FleetLoad, ScalingDecision, ScalingMemory, ScalingTargets, decide
from roofline.deploy.supervisor.figures import ReplicaFigures

LOG = log.get("deploy")
RECORD = "scaling.jsonl"


@dataclass(frozen=True)
class FleetReading:
    """What is read of a fleet each second. replicas: that should run now; ready: those that do; figures: of these;
    knocking: requests that wait for a server where none runs."""

    replicas: int
    ready: int
    figures: Sequence[ReplicaFigures]
    knocking: int = 0


class Autoscaler:
    """Decides once a second. slots: requests that one server computes at a time; latencies: 95th percentiles of first
    tokens and between tokens since they were asked for last; record: the file that every load and decision goes to."""

    def __init__(
        self,
        targets: ScalingTargets,
        slots: int,
        latencies: Callable[[], tuple[float | None, float | None]],
        record: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._targets, self._slots, self._latencies, self._record, self._clock = (
            targets,
            slots,
            latencies,
            record,
            clock,
        )
        self._memory = ScalingMemory()
        self._began: float | None = None
        self._is_recorded = True
        self.last: ScalingDecision | None = None

    def __call__(self, reading: FleetReading) -> int:
        """Return how many servers there should be."""
        now = self._clock()
        self._began = now if self._began is None else self._began
        first_token, token = self._latencies()
        load = FleetLoad(
            seconds=round(now - self._began, 3),
            up=reading.ready,
            starting=max(0, reading.replicas - reading.ready),
            slots=self._slots,
            running=sum(figures.running for figures in reading.figures),
            waiting=sum(figures.held for figures in reading.figures) + reading.knocking,
            queue_seconds=max((figures.oldest_seconds for figures in reading.figures), default=0.0),
            first_token_seconds=first_token,
            token_seconds=token,
        )
        decision = decide(self._targets, load, self._memory)
        self._memory = decision.memory
        if decision.replicas != reading.replicas:
            LOG.info("%d servers in place of %d: %s", decision.replicas, reading.replicas, decision.reason)
        self._write(load, decision)
        self.last = decision
        return decision.replicas

    def _write(self, load: FleetLoad, decision: ScalingDecision) -> None:
        """Append a line to the record. A full disk ends no fleet: that is said once."""
        line = {"load": asdict(load), "replicas": decision.replicas, "reason": decision.reason}
        try:
            with self._record.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
            self._is_recorded = True
        except OSError as error:
            if self._is_recorded:
                LOG.warning("decisions are not recorded in %s: %s", self._record, cause_of(error))
            self._is_recorded = False
        bound_log(self._record)


def read_record(path: Path) -> Iterator[tuple[FleetLoad, int, str]]:
    """Yield the loads that were decided on, with the decisions: how many servers, and why. `replay` of the loads from
    the first line of a fleet on gives the same decisions."""
    with path.open(encoding="utf-8") as stream:
        for text in stream:
            line = json.loads(text)
            yield FleetLoad(**line["load"]), line["replicas"], line["reason"]
