"""`roofline plan`: where a model fits on devices, and the curve of throughput and latency to expect there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from roofline.backends.simulated.calibration import Calibration
from roofline.bench.plan.arrangements import Arrangement, Place, arrangements
from roofline.bench.plan.assumptions import FEW, Kind, spread
from roofline.bench.plan.closed_loop import ClosedLoop, Lengths, Run
from roofline.common.errors import ConfigError
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine

if TYPE_CHECKING:
    from roofline.bundle.shape import ModelShape
    from roofline.models.config import ModelConfig

QUEUED = 2  # times as many requests as a copy computes at the same time: then it is full, and some wait
SIMULATED = 1024  # requests at a time of a copy that are simulated in seconds
Tell = Callable[[str], None]
Calibrate = Callable[[Arrangement], Calibration]


@dataclass(frozen=True)
class Price:
    """What a device costs. usd_per_hour: of one; source, date: of the price, in words."""

    usd_per_hour: float
    source: str
    date: str


@dataclass(frozen=True)
class Case:
    """What is planned.

    model: its name; dtype: format of the weights, "" as they are; chip: a product, "" this machine; count: devices;
    devices: of a copy, None: each number that fits; lengths: of the requests, in turn; workload: their name; step:
    tokens and sequences of the largest step.
    """

    model: str
    dtype: str
    chip: str
    count: int
    concurrency: tuple[int, ...]
    lengths: tuple[Lengths, ...]
    workload: str
    step: tuple[int, int]
    devices: int | None = None
    memory: float | None = None
    kv_cache_dtype: str = "auto"
    price: Price | None = None
    workload_sha256: str = ""


@dataclass(frozen=True)
class Quantiles:
    """Of a time over the requests, in seconds."""

    mean: float
    p50: float
    p95: float
    n: int


@dataclass(frozen=True)
class PlannedPoint:
    """One arrangement under one concurrency. Rates are of all copies together.

    requests_per_s, tokens_per_s: ended, generated a second; limit_tokens_per_s: the same steps at the roofs alone;
    share: tokens_per_s over that; bound: what the steps spend most of their least time on, "memory" or "compute";
    waiting: whether more requests were there than a copy computes at the same time; usd_per_mtok: for a million
    generated tokens, None without a price; simulated: requests at a time of the copies whose further ones wait in
    the queue by arithmetic alone (`with_queue`), 0 where all were simulated.
    """

    arrangement: Arrangement
    concurrency: int
    calibration: Calibration
    tokens_per_s: float
    requests_per_s: float
    ttft: Quantiles
    tpot: Quantiles | None
    seconds: Quantiles
    limit_tokens_per_s: float
    share: float
    bound: str
    flops: float
    weight_bytes: float
    kv_bytes: float
    limit_seconds: float
    simulated_seconds: float
    requests: int
    preemptions: int
    waiting: bool
    usd_per_mtok: float | None
    simulated: int = 0

    def between(self, kind: Kind) -> tuple[float, float] | None:
        """Between which factors of a planned time of that kind the true one likely lies, None where nothing says: no
        public figure is of a copy on several hosts."""
        arrangement = self.arrangement
        if arrangement.crosses_hosts:
            return None
        return spread(self.calibration, kind, arrangement.devices, arrangement.weight_bits)

    @property
    def _alone(self) -> int:
        """Requests at a time of the fullest copy."""
        return -(-self.concurrency // self.arrangement.replicas)

    @property
    def rate_range(self) -> tuple[float, float] | None:
        """Tokens a second that are likely."""
        factors = self.between("serving")
        return None if factors is None else (self.tokens_per_s / factors[1], self.tokens_per_s / factors[0])

    @property
    def ttft_range(self) -> tuple[float, float] | None:
        """Seconds to a first token, in the median, that are likely."""
        factors = self.between("prefill" if self._alone == 1 else "serving")
        return None if factors is None else (self.ttft.p50 * factors[0], self.ttft.p50 * factors[1])

    @property
    def tpot_range(self) -> tuple[float, float] | None:
        """Seconds for a token behind the first, in the median, that are likely."""
        factors = self.between("decode" if self._alone <= FEW else "serving")
        if factors is None or self.tpot is None:
            return None
        return self.tpot.p50 * factors[0], self.tpot.p50 * factors[1]


@dataclass(frozen=True)
class Plan:
    """The answer. shape: as asked for, in its format; weight_bytes: of all its tensors; parameters: of them;
    state_bytes: of recurrent state of one sequence."""

    case: Case
    shape: "ModelShape"
    place: Place
    weight_bytes: int
    parameters: int
    kv_token_bytes: int
    state_bytes: int
    kv_format: str
    arrangements: list[Arrangement]
    points: list[PlannedPoint]
    calibration: Calibration


def plan(case: Case, place: Place, calibration: Calibration | Calibrate, tell: Tell = lambda text: None) -> Plan:
    """Plan it. calibration: of all arrangements, or a function that gives that of each.

    Raises ConfigError, UnsupportedError, CapacityError with cause and remedy where that cannot be done.
    """
    from math import prod

    from roofline.program.restate import nbytes

    shape, config = shape_of(case.model, case.dtype, on_host=place.is_host)
    longest = max(each.prompt + each.answer for each in case.lengths)
    fitting = arrangements(shape, config, place, longest, case.step, case.kv_cache_dtype)
    chosen = [each for each in fitting if case.devices in (None, each.devices)]
    if not chosen:
        from roofline.backends.fit import MOST_DEVICES

        could = ", ".join(str(each.devices) for each in fitting)
        there = f"where there are {place.count:,} (--count), nor more than {MOST_DEVICES} at all"
        raise ConfigError(f"{case.devices} devices cannot share a copy of the model {there}; {could} can")
    points = []
    for arrangement in chosen:
        here = calibration if isinstance(calibration, Calibration) else calibration(arrangement)
        for concurrency in case.concurrency:
            tell(f"{arrangement.name}, concurrency {concurrency}")
            points.append(point(case, arrangement, concurrency, here))
    groups = chosen[0].split.parts[0].program.kv_groups.values()
    return Plan(
        case=case,
        shape=shape,
        place=place,
        weight_bytes=nbytes(shape.tensors),
        parameters=sum(prod(info.shape) for info in shape.tensors.values()),
        kv_token_bytes=_of_copy(fitting[0], [part.needs.token for part in fitting[0].split.parts]),
        state_bytes=_of_copy(chosen[0], [part.slot_bytes for part in chosen[0].split.parts]),
        kv_format="+".join(dict.fromkeys(group.format for group in groups)),
        arrangements=chosen,
        points=points,
        calibration=points[0].calibration,
    )


def _of_copy(arrangement: Arrangement, part_bytes: Sequence[int]) -> int:
    """Bytes on all devices of a copy together of what its parts have."""
    return sum(part_bytes) * (arrangement.devices // len(part_bytes))


def shape_of(model: str, dtype: str, on_host: bool = False) -> "tuple[ModelShape, ModelConfig]":
    """A model's shape, in a format where one is named, and its configuration, as GPUs or, `on_host`, CPUs load it."""
    from roofline.bundle.shape import as_loaded, shape_in
    from roofline.models.registry import configure

    shape = as_loaded(shape_in(model, dtype), "cpu" if on_host else "gpu")
    return shape, configure(shape.config)[1]


def point(case: Case, arrangement: Arrangement, concurrency: int, calibration: Calibration) -> PlannedPoint:
    """One point of the curve. Requests are spread over the copies as evenly as they can be."""
    least, more = divmod(concurrency, arrangement.replicas)
    shares = [(least + 1, more), (least, arrangement.replicas - more)]
    runs = [(run_copy(case, arrangement, each, calibration), copies) for each, copies in shares if each and copies]
    waiting = max(run.concurrency for run, _ in runs) > arrangement.limits.segments
    return summed(arrangement, concurrency, calibration, runs, waiting, case.price)


def run_copy(case: Case, arrangement: Arrangement, concurrency: int, calibration: Calibration) -> Run:
    """One copy with so many requests at a time, simulated. Where far more are there than it computes at the same time,
    fewer are simulated, and the others wait."""
    executable = arrangement.executable(calibration, case.model)
    engine = LocalEngine(executable, EngineConfig(prefix_cache=False, overlap=False))
    running = arrangement.limits.segments
    simulated = concurrency if concurrency <= most_simulated(running) else QUEUED * running
    try:
        run = ClosedLoop(engine, case.lengths, simulated).run()
    finally:
        engine.close()
    return run if simulated == concurrency else with_queue(run, concurrency)


def most_simulated(running: int) -> int:
    """Requests at a time of a copy up to which all are simulated. running: that it computes at the same time."""
    return min(2 * QUEUED * running, max(SIMULATED, QUEUED * running))


def with_queue(run: Run, concurrency: int) -> Run:
    """What a run would be with more requests at a time, where the copy is full and some wait already: each further one
    waits in the queue for as long as the copy takes to answer one, and steps are the same."""
    wait = (concurrency - run.concurrency) / run.requests_per_s
    requests = [replace(request, submitted=request.submitted - wait) for request in run.requests]
    return replace(run, concurrency=concurrency, requests=requests, simulated=run.concurrency)


def summed(
    arrangement: Arrangement,
    concurrency: int,
    calibration: Calibration,
    runs: Sequence[tuple[Run, int]],
    waiting: bool,
    price: Price | None,
) -> PlannedPoint:
    """The point of copies together. runs: each with the number of copies that run so."""
    served = [request for run, copies in runs for request in run.requests for _ in range(copies)]
    tokens = sum(run.tokens_per_s * copies for run, copies in runs)
    limit = sum(run.ids / run.stats.limit_seconds * copies for run, copies in runs)
    main = runs[0][0]
    stats = main.stats
    usd = None
    if price is not None:
        usd = price.usd_per_hour * arrangement.place.count / 3600 / tokens * 1e6
    tpots = [each.tpot for each in served if each.tpot is not None]
    ttft, seconds = quantiles([each.ttft for each in served]), quantiles([each.seconds for each in served])
    return PlannedPoint(
        arrangement=arrangement,
        concurrency=concurrency,
        calibration=calibration,
        tokens_per_s=tokens,
        requests_per_s=sum(run.requests_per_s * copies for run, copies in runs),
        ttft=ttft,
        tpot=quantiles(tpots) if tpots else None,
        seconds=seconds,
        limit_tokens_per_s=limit,
        share=tokens / limit,
        bound=_bound(arrangement, stats.flops, stats.weight_bytes + stats.kv_bytes),
        flops=stats.flops,
        weight_bytes=stats.weight_bytes,
        kv_bytes=stats.kv_bytes,
        limit_seconds=stats.limit_seconds,
        simulated_seconds=main.seconds,
        requests=len(served),
        preemptions=sum(run.stats.preemptions * copies for run, copies in runs),
        waiting=waiting,
        usd_per_mtok=usd,
        simulated=max(run.simulated for run, _ in runs),
    )


def quantiles(values: Sequence[float]) -> Quantiles:
    """Mean, median and 95th percentile of at least one value."""
    p50, p95 = np.percentile(values, (50, 95))
    return Quantiles(float(np.mean(values)), float(p50), float(p95), len(values))


def _bound(arrangement: Arrangement, flops: float, moved: float) -> str:
    """Whether reads or arithmetic take longer over all steps."""
    reads = moved / arrangement.place.roofs.read_bytes_per_s(arrangement.weights)
    return "memory" if reads >= flops / arrangement.arithmetic[1] else "compute"
