"""Runs without a server and without waiting: latencies that a test draws, sent by a closed or an open loop."""

import heapq
import math
from dataclasses import dataclass

import numpy as np

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


@dataclass(frozen=True)
class BatchingEngine:
    """An engine that computes a step for all of its requests at once, in a closed loop that is full.

    A step takes `fixed` milliseconds, `each` more for every request in it, `prompt` more for every token of a prompt
    that it begins with; wander: the standard deviation of the logarithm of what moves all of a step, memory: its
    correlation from one step to the next; lengths, prompts: of answers and prompts in tokens, evenly drawn.
    """

    wander: float = 0.0
    memory: float = 0.0
    lengths: tuple[int, int] = (10, 80)
    prompts: tuple[int, int] = (50, 900)
    fixed: float = 8.0
    each: float = 0.25
    prompt: float = 0.05

    def moments(self, trials, workers, count, draw):
        """(dispatched, first token, end) in milliseconds and tokens, [trials, count] each."""
        tokens = draw.integers(*self.lengths, (trials, count), endpoint=True)
        prompts = draw.integers(*self.prompts, (trials, count), endpoint=True)
        dispatched, first, end = (np.zeros((trials, count)) for _ in range(3))
        upcoming, request = np.full(trials, workers), np.tile(np.arange(workers), (trials, 1))  # [trials, workers]
        remaining, begins = tokens[:, :workers].copy(), np.ones((trials, workers), dtype=bool)
        now, state = np.zeros(trials), draw.normal(size=trials)
        while (active := remaining > 0).any():
            state = self.memory * state + math.sqrt(1 - self.memory**2) * draw.normal(size=trials)
            begun = (np.take_along_axis(prompts, request, 1) * (begins & active)).sum(1)
            step = self.fixed + self.each * active.sum(1) + self.prompt * begun
            now = now + step * np.exp(self.wander * state - self.wander**2 / 2) * active.any(1)
            trial, place = np.nonzero(begins & active)
            first[trial, request[trial, place]] = now[trial]
            begins[:] = False
            remaining = remaining - active
            trial, place = np.nonzero(active & (remaining <= 0))
            end[trial, request[trial, place]] = now[trial]
            for row, column in zip(trial, place, strict=True):  # in the order of places, as a queue would
                if (number := upcoming[row]) < count:
                    upcoming[row] += 1
                    request[row, column], remaining[row, column] = number, tokens[row, number]
                    begins[row, column], dispatched[row, number] = True, now[row]
        return dispatched, first, end, tokens

    def rates(self, workers, laps=60):
        """(requests, tokens) a second in the long run, from what long runs deliver between two moments."""
        draw = np.random.Generator(np.random.Philox(key=workers))
        _, first, end, tokens = self.moments(16, workers, workers * laps, draw)
        ends = np.sort(end, axis=1)
        low, high = ends[:, 5 * workers, None], ends[:, -5 * workers, None]
        inside = np.clip((np.minimum(end, high) - np.maximum(first, low)) / np.maximum(end - first, 1e-9), 0, 1)
        delivered = ((tokens - 1) * inside + ((first >= low) & (first < high))).sum(1)
        seconds = (high - low)[:, 0] / 1e3
        return ((end >= low) & (end < high)).sum(1).mean() / seconds.mean(), delivered.mean() / seconds.mean()

    def runs(self, trials, workers, count, draw):
        """The events of so many runs."""
        for each in zip(*self.moments(trials, workers, count, draw), strict=True):
            requests = [
                RequestEvents(
                    request=number,
                    scheduled=round(begin * MS),
                    dispatched=round(begin * MS),
                    chunks=[round(first * MS), round(end * MS)],
                    end=round(end * MS),
                    completion_tokens=int(tokens),
                    prompt_tokens=5,
                    status=200,
                )
                for number, (begin, first, end, tokens) in enumerate(zip(*each, strict=True))
            ]
            last = sorted(request.end for request in requests)[-workers]  # a worker finds nothing to send
            yield Events(EventsHead(arrivals="closed", end=last, concurrency=workers, **HEAD), requests)
