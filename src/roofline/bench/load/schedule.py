"""When requests of an open loop are sent: moments that are planned before the run and do not depend on answers."""

import math
import random
from collections.abc import Sequence
from itertools import accumulate

from roofline.bench.load.plan import Plan
from roofline.bench.traffic.traffic import TrafficRequest
from roofline.common.errors import ConfigError


def planned_moments(plan: Plan, requests: Sequence[TrafficRequest]) -> list[int]:
    """The moment of each request, in nanoseconds since the beginning. Raises ConfigError for a trace whose traffic does
    not say when its requests came.

    Gaps at random are stretched such that all requests together come at exactly the rate: two runs that differ in
    nothing but their seed offer the same load.
    """
    count = len(requests)
    if plan.arrivals == "constant":
        seconds = [number / plan.rate for number in range(count)]
    elif plan.arrivals in ("poisson", "gamma"):
        shape = 1.0 if plan.arrivals == "poisson" else plan.burstiness
        draw = random.Random(plan.seed)
        gaps = [draw.gammavariate(shape, 1.0) for _ in range(count)]
        stretch = count / plan.rate / sum(gaps)
        seconds = [moment * stretch for moment in accumulate(gaps)]
    elif plan.arrivals == "ramp":
        seconds = _ramp(count, plan.rate_from, plan.rate)
    else:
        seconds = [_recorded(request) / 1e6 / plan.trace_speed for request in requests]
    return [round(moment * 1e9) for moment in seconds]


def count_in_time(plan: Plan, count: int) -> int:
    """How many requests of an even rate there is time for, so that those together come at exactly the rate; of other
    arrivals all of them."""
    even = plan.arrivals in ("constant", "poisson", "gamma")
    return min(count, max(1, math.floor(plan.rate * plan.seconds + 1e-9))) if even else count


def _ramp(count: int, start: float, end: float) -> list[float]:
    """Moments whose rate grows evenly from `start` to `end`: where the area under the rate is 0, 1, 2, ..."""
    length = 2 * count / (start + end)
    slope = (end - start) / length
    if abs(slope) * length < 1e-9 * end:
        return [number / end for number in range(count)]
    return [(math.sqrt(start * start + 2 * slope * number) - start) / slope for number in range(count)]


def _recorded(request: TrafficRequest) -> int:
    if request.at_us is None:
        raise ConfigError("this traffic does not say when its requests came: choose other arrivals than trace")
    return request.at_us
