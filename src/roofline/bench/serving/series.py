"""Series of points: a curve over workers, a sweep until the system is saturated, decoding of single requests."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from roofline.bench.load.plan import Plan
from roofline.bench.results.point import INTERRUPTED, Counts, Point
from roofline.bench.results.store import read_points
from roofline.bench.serving.load_test import LoadTest
from roofline.bench.serving.measure import measure
from roofline.bench.traffic.traffic import Traffic
from roofline.common.errors import ConfigError

OPEN_SHARE = 0.9  # of a closed loop's rate, that the open loop beside it offers: it stays below saturation
GAIN = 1.03  # that a level's throughput must have over the best before, or it adds nothing
LEVELS_WITHOUT_GAIN = 2  # after which a system is saturated
MOST_ERRORS = 0.01  # of the requests of a level


@dataclass(frozen=True)
class Sizes:
    """How much is sent at a level. requests: for each worker, but at least `fewest`; seconds: after which no more are
    sent, whichever comes first. Five laps leave three between the first and the last one, from which intervals are a
    third narrower than from two. beside: fields of a plan, of clients that do not read."""

    requests: int = 5
    fewest: int = 32
    seconds: float = 60.0
    beside: Mapping[str, object] = field(default_factory=dict)

    def of(self, workers: int) -> int:
        return max(self.requests * workers, self.fewest)


def levels(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`, and `most` itself."""
    powers = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    return powers if powers[-1] == most else [*powers, most]


def levels_of(path: Path) -> dict[int, float | None]:
    """The levels of the last curve in a file of results, by workers: the rate that was offered beside each, None where
    none was. Raises ConfigError where the file has no curve."""
    rates: dict[int, float | None] = {}
    points = [point for point in read_points(path) if point.kind == "curve" and point.load is not None]
    workers = None
    for point in points:
        if point.run != points[-1].run or point.load is None:
            continue
        if point.load.arrivals == "closed" and point.load.concurrency is not None:
            workers = point.load.concurrency
            rates[workers] = None
        elif workers is not None and point.load.offered is not None:
            rates[workers] = point.load.offered
    if not rates:
        raise ConfigError(f"{path} has no point of a closed loop of `bench curve`: name a file that has a curve")
    return rates


def unlike_levels(path: Path, traffic: Traffic, sizes: Sizes, most: int) -> list[str]:
    """What differs between the last curve in a file of results and one of this traffic, a sentence each. most: workers
    of the new one."""
    points = [point for point in read_points(path) if point.kind == "curve" and point.workload is not None]
    curve_of = [point for point in points if point.run == points[-1].run]
    work = curve_of[0].workload if curve_of else None
    if work is None:
        return []
    unlike = []
    if work.sha256 != traffic.sha256:
        same_name = curve_of[0].preset == f"{traffic.name}@{traffic.version}"
        stops = f"answers end as {work.stop!r} there and {traffic.stop!r} here"
        names = f"{curve_of[0].preset} there and {traffic.name}@{traffic.version} here"
        how = stops if work.stop != traffic.stop else "another seed or file" if same_name else names
        unlike.append(
            f"the traffic is another one ({how}), so `bench check` compares the two with --other-traffic alone"
        )
    for point in curve_of:
        workers = point.load.concurrency if point.load is not None and point.load.arrivals == "closed" else None
        if workers is None or workers > most or point.workload is None or INTERRUPTED in point.validity.flags:
            continue
        if point.workload.requests != sizes.of(workers):
            unlike.append(
                f"at {workers} workers there were {point.workload.requests} requests, and here there are "
                f"{sizes.of(workers)}, so intervals are of different widths: --requests and --fewest say how many"
            )
            break
    return unlike


def curve(
    test: LoadTest, most: int, sizes: Sizes, poisson: bool, rates: Mapping[int, float | None] | None = None
) -> Iterator[Point]:
    """Points of a closed loop with 1, 2, 4, ... workers. poisson: behind each, one of an open loop that offers
    OPEN_SHARE of the rate that the closed loop reached. rates: as `levels_of` has them, whose levels are measured
    instead, with the rates beside them. A level of which no request is answered is the last one."""
    for workers in levels(most) if rates is None else [each for each in rates if each <= most]:
        plan = test.plan(sizes.of(workers), concurrency=workers, seconds=sizes.seconds, **sizes.beside)
        point = measure(test, "curve", plan)
        yield point
        if point.counts is not None and not point.counts.completed:
            return  # with more workers it would not be better
        reached = _value(point, "request_rate")
        rate = reached * OPEN_SHARE if rates is None else rates[workers]
        if poisson and reached > 0 and rate is not None:
            yield measure(test, "curve", _open(test, plan.requests, rate, sizes))


def _open(test: LoadTest, requests: int, rate: float, sizes: Sizes) -> Plan:
    return test.plan(requests, arrivals="poisson", rate=rate, seconds=sizes.seconds, seed=test.points, **sizes.beside)


def sweep(test: LoadTest, most: int, sizes: Sizes) -> Iterator[Point]:
    """Points of a closed loop with 1, 2, 4, ... workers, until the system is saturated (two levels in turn bring less
    than 3 % more tokens a second), or more than 1 % of a level's requests fail or
    are answered without text."""
    best, without_gain = 0.0, 0
    for workers in levels(most):
        plan = test.plan(sizes.of(workers), concurrency=workers, seconds=sizes.seconds, **sizes.beside)
        point = measure(test, "sweep", plan)
        yield point
        rate, counts = _value(point, "answer_rate"), point.counts
        without_gain = 0 if rate > best * GAIN else without_gain + 1
        best = max(best, rate)
        if (counts is not None and unanswered(counts) > MOST_ERRORS) or without_gain >= LEVELS_WITHOUT_GAIN:
            return


def unanswered(counts: Counts) -> float:
    """The share of requests that failed, or whose answer had no text, of those that came to an end."""
    without = counts.failed + counts.empty
    return without / max(1, without + counts.completed)


def decode(test: LoadTest, points: int, repeats: int, batch: int = 1) -> Iterator[Point]:
    """So many points of `batch` requests at a time, each repeated; the traffic has the requests of each in turn."""
    for _ in range(points):
        yield measure(test, "decode", test.plan(repeats * batch, arrivals="batch", concurrency=batch, probes=[]))


def _value(point: Point, name: str) -> float:
    figure = point.metrics.get(name)
    return 0.0 if figure is None or figure.value is None else figure.value
