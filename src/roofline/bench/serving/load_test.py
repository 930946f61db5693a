"""A load test: what is the same for all of its points, and how a point is measured."""

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec

from roofline.bench.load.events import Events, write_events
from roofline.bench.load.plan import Plan, Probe, Route
from roofline.bench.load.progress import SECONDS_BETWEEN, Progress
from roofline.bench.load.run import OnProgress, run_plan
from roofline.bench.load.targets import Target, addresses, backend_of, is_address, is_local, open_target
from roofline.bench.results.energy import Meter, find_meter
from roofline.bench.results.limits import Demand, ModelLimits, limit_at, limits_here, limits_of_product
from roofline.bench.results.objectives import Objective
from roofline.bench.results.point import Host, Point
from roofline.bench.results.store import append_points, with_id
from roofline.bench.serving.certificate import LoadCertificate, certify
from roofline.bench.serving.probes import answered_probes
from roofline.bench.serving.recount import tokenizer_of
from roofline.bench.serving.surroundings import this_host
from roofline.bench.traffic.presets import singles
from roofline.bench.traffic.traffic import Traffic, write_traffic
from roofline.common.addresses import check_address
from roofline.common.errors import ConfigError
from roofline.common.files import cause_of

if TYPE_CHECKING:
    from roofline.text.tokenizers.tokenizer import Tokenizer

IDLE_SECONDS = 5.0  # over which the power of the idle machine is measured
READ_SECONDS = 60.0  # after which an energy counter is read again
WARM_UP = 2  # requests to each server before the first point: compiling and filling buffers are no part of a load


class NotKept(ConfigError):
    """What is measured, and cannot be written. points: with their ids; cause: in words."""

    def __init__(self, points: list[Point], cause: str) -> None:
        self.points, self.cause = points, cause
        those = "the point" if len(points) == 1 else "the points"
        super().__init__(f"{cause}; standard output has {those}, as lines of a file of results")


@dataclass(frozen=True)
class Settings:
    """How a target is measured.

    target: as `open_target` takes it; label: what readers call it; model: that requests name; model_here: a model of
    this machine that the target runs, for its limit; chip, chips: a product that it runs on, and how many, where that
    is not this machine's CPU; tokens_per_step: that speculation makes on average; dtype: of the
    weights that the target has, "": as the model has them; results: file that points are added
    to; events: folder that the raw events are kept in; promise: of a service; probe: whether
    probes are sent; certify: whether the client is measured first.
    """

    target: str
    label: str = ""
    model: str | None = None
    model_here: str = ""
    chip: str = ""
    chips: int = 1
    tokens_per_step: float = 1.0
    dtype: str = ""
    key: str | None = field(default=None, repr=False)
    route: Route = "completions"
    results: Path | None = None
    events: Path | None = None
    promise: Objective | None = None
    probe: bool = True
    certify: bool = True
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if is_address(self.target):
            for address in addresses(self.target):
                check_address(address)

    @property
    def device(self) -> str:
        """What computes: "cpu" of this machine, "gpu", "simulated", or "any" where that is not known."""
        backend = backend_of(self.target)
        if backend:
            return "cpu" if backend == "reference" else backend
        return "cpu" if self.model_here and not self.chip else "any"


@dataclass
class LoadTest:
    """A target that runs, and all that its points share. run: their common name; traffic_path: the traffic's file, in
    a folder that is removed at the end; tokenizer: of the model, where it is here; sent: requests of the traffic that
    were sent already; answered: of these; failure: of the last request that failed; impossible: why
    the last figure above the limit cannot be; on_start: called before each load;
    on_progress: every half second while it runs; meter: of this machine's energy, where that has a counter and the
    target runs on it."""

    settings: Settings
    target: Target
    traffic: Traffic
    folder: Path
    host: Host
    certificate: LoadCertificate | None
    limits: ModelLimits | None
    tokenizer: "Tokenizer | None" = None
    run: str = field(default_factory=lambda: secrets.token_hex(6))
    probes: list[Probe] = field(default_factory=list)
    points: int = 0
    sent: int = 0
    answered: int = 0
    failure: str = ""
    impossible: str = ""
    on_start: Callable[[Plan], None] | None = None
    on_progress: OnProgress | None = None
    meter: Meter | None = None

    @property
    def traffic_path(self) -> Path:
        return self.folder / "traffic.jsonl"

    @property
    def system_label(self) -> str:
        """What readers call the target."""
        return self.settings.label or self.target.engine or self.target.name

    def most_tokens_per_s(self, plan: Plan) -> float | None:
        """The limit of a plan's load, as far as it is known before: of so many requests at a time whose answers have a
        known length."""
        if self.limits is None or plan.arrivals not in ("closed", "batch") or self.traffic.stop != "ignored":
            return None
        requests, places = self.traffic.requests, range(plan.first, plan.first + plan.requests)
        sent = [requests[place % len(requests)] for place in places]
        demand = Demand(
            sum(request.prompt_tokens for request in sent) / len(sent),
            sum(request.max_tokens for request in sent) / len(sent),
            plan.concurrency,
            self.settings.tokens_per_step,
        )
        return limit_at(self.limits, self.limits.roofs, demand).tokens_per_s

    def plan(self, requests: int, **load: object) -> Plan:
        """A plan that sends the next requests of the traffic. load: fields of `Plan` that say how."""
        plan = Plan(
            traffic=str(self.traffic_path),
            events=str(self.folder / f"events-{self.points}.jsonl"),
            url=self.target.url,
            further_urls=list(self.target.further_urls),
            model=self.target.model,
            arrivals="closed",
            route=self.settings.route,
            first=self.sent,
            requests=requests,
            timeout=self.settings.timeout,
            probes=self.probes,
            keep_text=self.tokenizer is not None,
        )
        return msgspec.structs.replace(plan, **load)

    def send(self, plan: Plan) -> Events:
        """Run a plan; its requests count as sent."""
        self.sent += plan.requests
        if self.on_start is not None:
            self.on_start(plan)
        if self.meter is None:
            return self.run_plan(plan, self.on_progress)
        begin, start = time.monotonic(), self.meter.counter.read()
        events = self.run_plan(plan, self._progress)
        joules, seconds = self.meter.counter.read() - start, time.monotonic() - begin
        events.head = msgspec.structs.replace(events.head, joules=joules, joules_seconds=seconds)
        return events

    def run_plan(self, plan: Plan, on_progress: OnProgress | None = None) -> Events:
        """Run a plan whose requests count nowhere."""
        if self.target.in_process is not None:
            return self.target.in_process.run(plan, on_progress)
        return run_plan(plan, self.settings.key, on_progress)

    def _progress(self, now: Progress) -> None:
        """Pass on how far a load is. The counter is read now and then, as one that overflows twice loses joules."""
        assert self.meter is not None, "it runs"
        if now.elapsed % READ_SECONDS < SECONDS_BETWEEN:
            self.meter.counter.read()
        if self.on_progress is not None:
            self.on_progress(now)

    def keep(self, point: Point, events: Events) -> Point:
        """Add a point to the file of results, and its events to their folder. Returns the point as it is kept. Raises
        NotKept where one of them cannot be written."""
        number = self.points + 1
        try:
            if self.settings.events is not None:
                path = self.settings.events / f"{self.run}-{number}.jsonl"
                point = _with_events(point, events, path, self.settings.results)
            if self.settings.results is not None:
                append_points([point], self.settings.results)
        except ConfigError as error:
            raise NotKept([with_id(point)], str(error)) from error
        except OSError as error:
            raise NotKept([with_id(point)], f"{error.filename}: {cause_of(error)}") from error
        self.points = number
        return with_id(point)


@contextmanager
def open_load_test(settings: Settings, traffic: Traffic, streams: int) -> Iterator[LoadTest]:
    """A load test of up to so many streams at a time: the target is started, its limit found, the client certified,
    and the answers of probes asked for, in this order.

    Raises ConfigError where one of these is not possible.
    """
    host, meter = this_host(), _meter(settings)
    with (
        TemporaryDirectory(prefix="roofline-load-") as folder,
        open_target(settings.target, settings.model, settings.key) as target,
    ):
        write_traffic(traffic, Path(folder) / "traffic.jsonl")
        model = settings.model_here or target.local_model
        limits = _limits(settings, model, target.options.get("kv-cache-dtype", "auto"))
        certificate = certify(streams) if settings.certify and target.in_process is None else None
        tokenizer = tokenizer_of(model) if model else None
        test = LoadTest(
            settings=settings,
            target=target,
            traffic=traffic,
            folder=Path(folder),
            host=host,
            certificate=certificate,
            limits=limits,
            tokenizer=tokenizer,
        )
        test.meter = meter
        if settings.probe:
            test.probes = answered_probes(test.plan(1), test.folder, test.run_plan)
        _warm_up(test)
        yield test


def _warm_up(test: LoadTest) -> None:
    """Send requests that are not of the traffic, and count nowhere. Raises ConfigError where they are not answered."""
    path = test.folder / "warm-up.jsonl"
    requests = WARM_UP * (1 + len(test.target.further_urls))  # which take them in turn
    write_traffic(singles((64,), 8, requests, seed=1), path)
    plan = msgspec.structs.replace(test.plan(requests), traffic=str(path), probes=[])
    events = test.run_plan(plan)
    errors = [request.error for request in events.requests if request.error]
    if events.head.interrupted:
        raise KeyboardInterrupt
    if errors:
        raise ConfigError(f"{test.settings.target} does not answer: {errors[0]}")


def _meter(settings: Settings) -> Meter | None:
    """The energy counter of what runs the target, with the power of now, None of another machine's."""
    if not is_local(settings.target) or settings.device == "simulated":
        return None
    return find_meter("cpu" if settings.device == "cpu" else "gpu" if settings.device == "gpu" else "any", IDLE_SECONDS)


def _limits(settings: Settings, model: str, kv_cache_dtype: str = "auto") -> ModelLimits | None:
    """Those of a model on what runs it. kv_cache_dtype: of a server of ours, whose cache is read in that format."""
    if settings.chip and not model:
        raise ConfigError(
            f"the limit of {settings.chip} needs the model that the server runs: name it with --model-here"
        )
    if settings.chip:
        return limits_of_product(model, settings.chip, settings.chips, settings.dtype)
    return limits_here(model, kv_cache_dtype, settings.dtype) if model and settings.device == "cpu" else None


def _with_events(point: Point, events: Events, path: Path, results: Path | None) -> Point:
    """The point with its events written to a file of their own, whose path is that from the folder of the results."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_events(events, path)
    except OSError as error:
        raise ConfigError(f"events cannot be written to {path}: {cause_of(error)}; name another folder") from error
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    place = str(path) if results is None else os.path.relpath(path, results.parent)
    return msgspec.structs.replace(point, events=place, events_sha256=digest)
