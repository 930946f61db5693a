"""Series of points: a curve over workers, a sweep until the system is saturated, decoding of single requests."""

from collections.abc import Iterator
from dataclasses import dataclass

from roofline.bench.load.plan import Plan
from roofline.bench.results.point import Counts, Point
from roofline.bench.serving.load_test import LoadTest
from roofline.bench.serving.measure import measure

OPEN_SHARE = 0.9  # of a closed loop's rate, that the open loop beside it offers: it stays below saturation
GAIN = 1.03  # that a level's throughput must have over the best before, or it adds nothing
LEVELS_WITHOUT_GAIN = 2  # after which a system is saturated
MOST_ERRORS = 0.01  # of the requests of a level


@dataclass(frozen=True)
class Sizes:
    """How much is sent at a level. requests: for each worker, but at least `fewest`; seconds: after which no more are
    sent, whichever comes first. Five laps leave three between the first and the last one, from which intervals are a
    third narrower than from two."""

    requests: int = 5
    fewest: int = 32
    seconds: float = 60.0

    def of(self, workers: int) -> int:
        return max(self.requests * workers, self.fewest)


def levels(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`, and `most` itself."""
    powers = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    return powers if powers[-1] == most else [*powers, most]


def curve(test: LoadTest, most: int, sizes: Sizes, poisson: bool) -> Iterator[Point]:
    """Points of a closed loop with 1, 2, 4, ... workers. poisson: behind each, one of an open loop that offers
    OPEN_SHARE of the rate that the closed loop reached. A level of which no request is answered is the last one."""
    for workers in levels(most):
        plan = test.plan(sizes.of(workers), concurrency=workers, seconds=sizes.seconds)
        point = measure(test, "curve", plan)
        yield point
        if point.counts is not None and not point.counts.completed:
            return  # with more workers it would not be better
        rate = _value(point, "request_rate")
        if poisson and rate > 0:
            yield measure(test, "curve", _open(test, plan.requests, rate * OPEN_SHARE, sizes.seconds))


def _open(test: LoadTest, requests: int, rate: float, seconds: float) -> Plan:
    return test.plan(requests, arrivals="poisson", rate=rate, seconds=seconds, seed=test.points)


def sweep(test: LoadTest, most: int, sizes: Sizes) -> Iterator[Point]:
    """Points of a closed loop with 1, 2, 4, ... workers, until the system is saturated (two levels in turn bring less
    than 3 % more tokens a second), or more than 1 % of a level's requests fail or
    are answered without text."""
    best, without_gain = 0.0, 0
    for workers in levels(most):
        point = measure(test, "sweep", test.plan(sizes.of(workers), concurrency=workers, seconds=sizes.seconds))
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
