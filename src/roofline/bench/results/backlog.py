"""Whether a server keeps up with an open loop: three conditions, all of which a queue that grows all along meets.

* Latency grows with the planned moment by more than independent latencies would. A server with a queue meets this now
  and then also where it keeps up, as its latencies are not independent: a queue comes and goes.
* So the growth, as requests that arrive meanwhile, is more than a queue that comes and goes reaches: how many requests
  a server gets behind by chance grows with the root of their number. The two constants are of simulated servers, of one
  place and of several, with even and uneven times, that answer in batches, and that have slow phases.
* While many requests are in flight, fewer of them end than arrive. Of a server that keeps up more end, as it works off
  there what has piled up.

A server that shares its speed among all requests, instead of letting some wait, answers those of the beginning late
too: its latency grows less, so a small overload of few requests is not seen.
"""

import numpy as np

from roofline.bench.load.events import Events, RequestEvents
from roofline.bench.results.statistics import Values
from roofline.bench.results.window import measured

FEWEST_FOR_TREND = 10
SURE = 2.5  # standard errors that the trend of the latency must have, those of independent latencies
CHANCE, LEAST_BACKLOG = 0.8, 4.0  # requests of backlog that are chance: times the root of their number, and of any
QUIET_SHARE = 0.25  # of the time, in which the fewest requests are in flight: a server may be idle then


def falls_behind(events: Events) -> bool:
    """Whether a server cannot keep up with an open loop. Of blocks, each of which began when the one before had ended,
    a backlog is that of a block, in the mean over all of them."""
    head = events.head
    if head.blocks > 1:
        return _grows_in_blocks(sorted(measured(events), key=lambda each: each.planned), head.blocks)
    requests = [each for each in measured(events) if each.completed and each.dispatched >= head.begin]
    if len(requests) < FEWEST_FOR_TREND:
        return False
    requests.sort(key=lambda each: each.planned)
    moments = np.array([each.planned for each in requests]) / 1e9
    if moments[-1] == moments[0]:
        return True  # all at once, which no server keeps up with
    latencies = np.array([(each.end or 0) - each.planned for each in requests]) / 1e9
    return _latency_grows(latencies, moments) and _fewer_end_than_arrive(requests, moments)


def _grows_in_blocks(requests: list[RequestEvents], blocks: int) -> bool:
    """Whether latency grows within blocks of as many requests each, which began with an idle server."""
    size = len(requests) // blocks
    if size < 3:
        return False
    shape, first = (blocks, size), requests[: size * blocks]
    moments = np.array([each.planned for each in first]).reshape(shape) / 1e9
    latencies = [(each.end or 0) - each.planned if each.completed else np.nan for each in first]
    known = np.ma.masked_invalid(np.array(latencies).reshape(shape) / 1e9)
    if known.count(axis=0).min() == 0:
        return False
    return _latency_grows(np.asarray(known.mean(axis=0)), (moments - moments[:, :1]).mean(axis=0), blocks)


def _latency_grows(latencies: Values, moments: Values, runs: int = 1) -> bool:
    """Whether latency grows by more than chance explains, of independent latencies and of a queue. runs: that these
    are the means of."""
    count = len(latencies)
    off = moments - moments.mean()
    spread = float(off @ off)
    slope = float(off @ latencies) / spread
    residuals = latencies - latencies.mean() - slope * off
    error = float(np.sqrt(residuals @ residuals / (count - 2) / spread))
    return slope > SURE * error and slope * count > CHANCE * np.sqrt(count / runs) + LEAST_BACKLOG


def _fewer_end_than_arrive(requests: list[RequestEvents], moments: Values) -> bool:
    """Whether requests end at a lower rate than they arrive, up to the last arrival and apart from QUIET_SHARE of that
    time."""
    ends = np.array([each.end or 0 for each in requests]) / 1e9
    begin, last = float(moments[0]), float(moments[-1])
    ends = np.sort(ends[ends <= last])
    at = np.concatenate([moments, ends])
    order = np.argsort(at, kind="stable")
    steps = np.concatenate([np.ones(len(moments)), -np.ones(len(ends))])[order]
    in_flight, seconds = np.cumsum(steps), np.diff(at[order], append=last)
    by_number = np.argsort(in_flight, kind="stable")
    quiet = int(np.searchsorted(np.cumsum(seconds[by_number]), QUIET_SHARE * (last - begin)))
    least = max(1.0, float(in_flight[by_number[min(quiet, len(by_number) - 1)]]))
    busy_seconds = float(seconds[in_flight >= least].sum())
    ended = int(np.count_nonzero((steps < 0) & (in_flight + 1 >= least)))
    return ended * (last - begin) < (len(moments) - 1) * busy_seconds
