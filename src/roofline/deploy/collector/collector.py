"""Reads every replica of a fleet over and over, each on its own, and shows what they have together."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from roofline.common import log
from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonObject
from roofline.deploy.collector.errors import ScrapeError, in_one_line
from roofline.deploy.collector.figures import own_figures
from roofline.deploy.collector.page import MetricsPage
from roofline.deploy.collector.scraper import ReplicaScraper
from roofline.deploy.collector.sums import FleetSums, as_metric, of_replica
from roofline.deploy.collector.targets import INTERVAL, CollectorTarget, check_targets

LOG = log.get("deploy")
YOUNG_SECONDS = 60.0  # before the collector, in which the processes of one fleet are started
MAX_PROBLEMS = 1000  # sentences of what was refused, of which each is logged once

ScrapeState = Literal["starting", "up", "down"]
STATES: tuple[ScrapeState, ...] = ("starting", "up", "down")  # starting: not asked yet


class ScrapeSink(Protocol):
    """What is told of every scrape. A failure to write must not raise: metrics go on without."""

    async def scraped(self, moment: float, replica: str, page: MetricsPage | None) -> None:
        """Take in a replica's page, None where it did not answer. moment: in seconds since 1970."""

    async def close(self) -> None:
        """Write down what is not written yet."""


@dataclass(kw_only=True)
class ReplicaRecord:
    """What a collector knows of one replica. page: None while it does not answer; initial: it was there before the
    first sums were shown."""

    scraper: ReplicaScraper
    initial: bool
    state: ScrapeState = "starting"
    page: MetricsPage | None = None
    problem: str = ""
    refused: tuple[str, ...] = ()
    seconds: float = 0.0
    scrapes: int = 0
    failures: int = 0
    task: asyncio.Task[None] | None = None


class MetricsCollector:
    """The metrics of a fleet whose replicas may change at any time.

    targets: the replicas; interval: seconds between two scrapes of one; timeout: seconds that one may take, None: the
    interval; sink: told of every scrape. `run` reads until it is cancelled; `scrape` reads once.
    """

    def __init__(
        self,
        targets: Sequence[CollectorTarget] = (),
        interval: float = INTERVAL,
        timeout: float | None = None,
        sink: ScrapeSink | None = None,
    ) -> None:
        self._interval, self._timeout, self._sink = interval, timeout or interval, sink
        self._replicas: dict[str, ReplicaRecord] = {}
        self._sums = FleetSums()
        self._began: float | None = None  # when the first scrape was begun, seconds since 1970
        self._wanted_count: int | None = None
        self._running = False
        self._closing: set[asyncio.Task[None]] = set()
        self._told_problems: set[str] = set()
        self.set_targets(targets)

    def set_targets(self, targets: Sequence[CollectorTarget]) -> None:
        """Read these replicas from now on. One that is there already, unchanged, is not disturbed. Raises ConfigError,
        and changes nothing, for targets that cannot be asked or told apart."""
        check_targets(targets)
        names = {target.name for target in targets}
        changed = [target for target in targets if not self._is_there(target)]
        fresh = {target.name: ReplicaScraper(target, self._timeout) for target in changed}
        for name in [name for name in self._replicas if name not in names or name in fresh]:
            self._remove(name)
        for name, scraper in fresh.items():
            record = self._replicas[name] = ReplicaRecord(scraper=scraper, initial=self._began is None)
            if self._running:
                record.task = asyncio.create_task(self._read_on(record))

    def set_wanted(self, replicas: int) -> None:
        """Say how many replicas the fleet is to have. Without it: as many as there are targets."""
        self._wanted_count = replicas

    async def run(self) -> None:
        """Read all replicas, each every `interval` seconds whatever the others do, until this is cancelled."""
        if self._running:
            raise ConfigError("this collector runs already")
        self._running, self._began = True, self._began or time.time()
        for record in self._replicas.values():
            record.task = asyncio.create_task(self._read_on(record))
        try:
            await asyncio.Event().wait()
        finally:
            self._running = False
            await self.close()

    async def scrape(self) -> None:
        """Read every replica once, all at the same time."""
        self._began = self._began or time.time()
        await asyncio.gather(*(self._read(record) for record in list(self._replicas.values())))

    async def first_round(self) -> None:
        """Wait until every replica of the beginning has been asked once, which takes a scrape's time at most."""
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(contextlib.suppress(TimeoutError))
            await stack.enter_async_context(asyncio.timeout(self._timeout + 1))
            while any(record.initial and record.state == "starting" for record in self._replicas.values()):
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        """End all connections, and have the sink write what it has."""
        tasks = [record.task for record in self._replicas.values() if record.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._closing, return_exceptions=True)
        await asyncio.gather(*(record.scraper.close() for record in self._replicas.values()), return_exceptions=True)
        if self._sink is not None:
            await self._sink.close()

    def exposition(self) -> bytes:
        """Return everything in Prometheus' text form: the fleet's sums, each replica's series, the collector's own."""
        return render(self.families())

    def shown(self) -> list[JsonObject]:
        """Return what is known of each replica, for people and programs."""
        return [
            {
                "replica": name,
                "address": record.scraper.target.address,
                "state": record.state,
                "problem": record.problem or None,
                "refused": list(record.refused),
                "scrape_seconds": round(record.seconds, 6),
                "scrapes": record.scrapes,
                "failures": record.failures,
            }
            for name, record in self._replicas.items()
        ]

    def pages(self) -> dict[str, MetricsPage]:
        """Return the last page of each replica that answers, by its name: what a scaling policy looks at."""
        return {name: record.page for name, record in self._replicas.items() if record.page is not None}

    def histogram(self, name: str) -> list[tuple[float, float]]:
        """Return a histogram of the fleet, of all its label sets together: each upper edge with the count up to it."""
        return self._sums.histogram(name)

    def families(self) -> list[Metric]:
        """Return everything as it is now: what `render` writes, in another thread if need be."""
        by_name: dict[str, Metric] = {}
        for replica, page in self.pages().items():
            for family in page.families.values():
                metric = as_metric(of_replica(family, replica))
                by_name.setdefault(metric.name, metric)
                if by_name[metric.name] is not metric and by_name[metric.name].type == metric.type:
                    by_name[metric.name].samples += metric.samples
        wanted_count = len(self._replicas) if self._wanted_count is None else self._wanted_count
        figures = own_figures(self._replicas, wanted_count, self._sums.restarts)
        return [*self._sums.families(), *by_name.values(), *figures]

    def _is_there(self, target: CollectorTarget) -> bool:
        record = self._replicas.get(target.name)
        return record is not None and record.scraper.target == target

    def _remove(self, name: str) -> None:
        record = self._replicas.pop(name)
        self._sums.silent(name)
        if record.task is not None:
            record.task.cancel()
        with contextlib.suppress(RuntimeError):  # without a loop nothing was ever opened
            task = asyncio.get_running_loop().create_task(record.scraper.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _read_on(self, record: ReplicaRecord) -> None:
        """Read one replica every so often. A round that took longer than the interval is followed by the next."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await self._read(record)
            await asyncio.sleep(max(0.0, began + self._interval - loop.time()))

    async def _read(self, record: ReplicaRecord) -> None:
        """Read one replica once, and take in what came of it."""
        began, moment = time.perf_counter(), time.time()
        page: MetricsPage | None = None
        name = record.scraper.target.name
        try:
            page = await record.scraper.scrape()
        except ScrapeError as error:
            problem = in_one_line(str(error))
        except Exception as error:  # whatever a library raises: the other replicas, and the next scrape, go on
            LOG.exception("replica %s: the scrape failed", name)
            problem = in_one_line(f"{type(error).__name__}: {error}")
        if self._replicas.get(name) is not record:
            return  # it has left meanwhile
        record.seconds = time.perf_counter() - began
        record.scrapes += 1
        if page is None:
            self._take_failure(record, name, problem)
        else:
            self._take(record, name, page)
        if self._sink is not None:
            await self._sink.scraped(moment, name, page)

    def _take(self, record: ReplicaRecord, name: str, page: MetricsPage) -> None:
        """A replica that is older than the collector, and is seen after the first sums were shown, brings nothing of
        its past: all of it at once would look like a second of enormous load."""
        is_young = page.birth is None or page.birth >= (self._began or 0.0) - YOUNG_SECONDS
        refused = self._sums.take(name, page, is_young or (record.initial and not record.failures))
        record.refused = tuple(map(in_one_line, refused))
        if record.state == "down":
            LOG.info("replica %s: it answers again", name)
        record.state, record.page, record.problem = "up", page, ""
        for sentence in record.refused:
            self._tell(f"replica {name}: {sentence}")

    def _take_failure(self, record: ReplicaRecord, name: str, problem: str) -> None:
        if record.state != "down" or record.problem != problem:
            self._tell(f"replica {name}: {problem}")
        record.state, record.page, record.problem, record.refused = "down", None, problem, ()
        record.failures += 1
        self._sums.silent(name)

    def _tell(self, sentence: str) -> None:
        if sentence not in self._told_problems and len(self._told_problems) < MAX_PROBLEMS:
            self._told_problems.add(sentence)
            LOG.warning("%s", sentence)


def render(metrics: list[Metric]) -> bytes:
    """Return families in Prometheus' text form."""
    registry = CollectorRegistry()
    registry.register(_Families(metrics))
    return generate_latest(registry)


class _Families(Collector):
    """Families as a registry asks for them."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics
