"""Runs without a server and without waiting: latencies that a test draws, sent by a closed or an open loop."""

import heapq
import math

from roofline.bench.load.events import Events, EventsHead, RequestEvents
from roofline.bench.load.plan import Plan
from roofline.bench.load.schedule import planned_moments

MS = 1_000_000
HEAD = {"traffic": "t", "traffic_sha256": "0", "target": "x", "started": "now", "begin": 0}


def answered(number, moment, latency_ms, tokens=40):
    end = moment + max(round(latency_ms * MS), 1)
    return RequestEvents(
        request=number,
        scheduled=moment,
        dispatched=moment,
        chunks=[moment + (end - moment) // 10, end],
        end=end,
        completion_tokens=tokens,
        prompt_tokens=5,
        status=200,
    )


def closed_loop(count, workers, latency, tokens=lambda: 40):
    """latency: () -> milliseconds of the next request. The run ends as the generator's does, when a worker finds
    nothing to send."""
    free, requests = [0] * workers, []
    for number in range(count):
        each = answered(number, heapq.heappop(free), latency(), tokens())
        requests.append(each)
        heapq.heappush(free, each.end)
    return Events(EventsHead(arrivals="closed", end=free[0], concurrency=workers, **HEAD), requests)


def open_loop(count, rate, latency, seed, arrivals="poisson", servers=None, tokens=lambda: 40):
    """servers: how many requests are served at a time, None: all of them."""
    plan = Plan(traffic="", events="", url="", model="", arrivals=arrivals, rate=rate, seed=seed, requests=count)
    moments = planned_moments(plan, [None] * count)
    free, requests = [0] * (servers or count), []
    for number, moment in enumerate(moments):
        begin = max(heapq.heappop(free), moment)
        each = answered(number, moment, (begin - moment) / MS + latency(), tokens())
        requests.append(each)
        heapq.heappush(free, each.end)
    return Events(EventsHead(arrivals=arrivals, end=moments[-1], rate=rate, **HEAD), requests)


def service(kind, draw):
    """() -> milliseconds, 100 on average: "fixed", "noisy" (25 %), "exponential", "correlated" (0.6 from one to the
    next), "phases" (slow and fast ones, of 5 requests on average)."""
    state = {"z": draw.normal(), "slow": draw.random() < 0.5}

    def latency():
        if kind == "fixed":
            return 100.0
        if kind == "noisy":
            return max(100 * (1 + 0.25 * draw.normal()), 1.0)
        if kind == "exponential":
            return 100 * draw.exponential()
        if kind == "correlated":
            state["z"] = 0.6 * state["z"] + 0.8 * draw.normal()
            return 100 * math.exp(0.4 * state["z"] - 0.08)
        state["slow"] ^= draw.random() < 0.2
        return (150 if state["slow"] else 50) * (1 + 0.1 * draw.normal())

    return latency
