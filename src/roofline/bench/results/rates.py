"""What a second brings of a run: requests, tokens, answers that keep a promise; each with a 95 % interval.

Not the count of what ended within a window: a window of few laps cuts up to a lap of work off at either end, and
counts a burst or misses it. What is used instead is what the way of sending fixes:

* Closed loops keep their workers busy, so throughput is the number in flight over the mean latency (Little's law): a
  ratio of sums over requests, whose interval is that of a ratio.
* Open loops that the server keeps up with deliver what is offered: the amount of a request times the rate of arrivals.
  Where it falls behind (`backlog.py`), the gaps between ends of answers tell what it can do.
* Batches are rounds that begin and end: the sum of what they brought over the sum of their times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from roofline.bench.load.events import Events, RequestEvents
from roofline.bench.results.backlog import falls_behind
from roofline.bench.results.statistics import Interval, Values, ratio_interval
from roofline.bench.results.window import Span, measured, most_in_flight

Amount = Callable[[RequestEvents], float]  # that a request counts: 1, its tokens, 0 of one that failed
SAME_RATE = 1e-3  # by which planned moments may miss the rate that they were planned for


@dataclass(frozen=True)
class Rate:
    """An amount a second. n: requests that it is taken over."""

    value: float
    interval: Interval | None
    n: int


@dataclass(frozen=True)
class _Units:
    """What a rate is a ratio of: amounts, the seconds that they took; at_a_time: how many of them run side by side, as
    a factor of the rate; beside: how many neighbours of them were under way at a time, and share what moved the system
    then; steady: whether the ratio is that of all the run, so that it has an interval."""

    amounts: Values
    seconds: Values
    at_a_time: float = 1.0
    beside: float = 1.0
    steady: bool = True

    def rate(self, n: int) -> Rate:
        total = float(self.seconds.sum())
        if total <= 0:
            return Rate(0.0, None, 0)
        around = ratio_interval(self.amounts, self.seconds, self.beside) if self.steady else None
        interval = None if around is None else (around[0] * self.at_a_time, around[1] * self.at_a_time)
        return Rate(float(self.amounts.sum()) / total * self.at_a_time, interval, n)


def rate_of(events: Events, span: Span, amount: Amount) -> Rate:
    """The amount of requests a second. span: of the requests whose amounts and latencies count."""
    sent = sorted(measured(events), key=lambda each: each.dispatched)
    ended = [each for each in sent if each.end is not None and span.holds(each)]
    arrivals = events.head.arrivals
    if not ended:
        return Rate(0.0, None, 0)
    if arrivals == "closed":
        return _closed(events, ended, amount).rate(len(ended))
    if arrivals == "batch":
        return _batches(ended, amount).rate(len(ended))
    if falls_behind(events):
        return _between_ends(events, sent, amount).rate(len(ended))
    return _offered(events, sent, ended, amount).rate(len(ended))


def _closed(events: Events, ended: Sequence[RequestEvents], amount: Amount) -> _Units:
    at_a_time = busy(events)
    return _Units(_amounts(ended, amount), _latencies(ended), at_a_time, beside=max(at_a_time, 1.0))


def busy(events: Events) -> float:
    """How many requests of a closed loop are under way at a time, probes too, while all workers have something to send:
    a little fewer than there are workers, where the client takes its time between two requests."""
    sent = sorted(events.requests, key=lambda each: each.dispatched)
    most = most_in_flight(events)
    workers = min(events.head.concurrency or most, len(sent))
    begin, end = sent[workers - 1].dispatched, sent[-1].dispatched
    if len(sent) < 2 * workers or end <= begin:
        return float(most)
    inside = sum(max(min(end if each.end is None else each.end, end) - max(each.dispatched, begin), 0) for each in sent)
    return inside / (end - begin)


def _batches(ended: Sequence[RequestEvents], amount: Amount) -> _Units:
    """Rounds: the requests that were planned for the same moment."""
    rounds: dict[int | None, list[RequestEvents]] = {}
    for each in ended:
        rounds.setdefault(each.scheduled, []).append(each)
    groups = list(rounds.values())
    edges = [min(each.dispatched for each in group) for group in groups]
    edges.append(max(each.end or 0 for each in groups[-1]))
    amounts = np.array([sum(map(amount, group)) for group in groups])
    return _Units(amounts, np.diff(edges) / 1e9)


def _offered(events: Events, sent: Sequence[RequestEvents], ended: Sequence[RequestEvents], amount: Amount) -> _Units:
    """The amounts over the gaps between arrivals. A plan that came to exactly its rate has no other gaps than the mean
    one: how they were strewn over the run says nothing about its rate."""
    head = events.head
    if head.rate and head.blocks > 1:  # what stands between two of them is no gap of the plan
        return _Units(_amounts(ended, amount), np.full(len(ended), 1 / head.rate))
    moments = np.array([each.planned for each in sent], dtype=float)
    count, last = len(moments), float(moments[-1])
    if head.rate and head.arrivals in ("constant", "poisson", "gamma"):
        planned = (count - 1 if head.arrivals == "constant" else count) / head.rate * 1e9
        covered = last - float(moments[0]) if head.arrivals == "constant" else last
        if abs(covered - planned) <= SAME_RATE * planned:
            return _Units(_amounts(ended, amount), np.full(len(ended), 1 / head.rate))
    before = dict(zip(map(id, sent[1:]), np.diff(moments) / 1e9, strict=True))
    behind_another = [each for each in ended if id(each) in before]  # nobody knows the gap before the first one
    gaps = np.array([before[id(each)] for each in behind_another])
    return _Units(_amounts(behind_another, amount), gaps, steady=head.arrivals != "ramp")


def _between_ends(events: Events, sent: Sequence[RequestEvents], amount: Amount) -> _Units:
    """The amounts of answers over the gaps between their ends: those before the arrivals ended, or all of them where
    most came later."""
    by_end = sorted((each for each in sent if each.end is not None), key=lambda each: each.end or 0)
    in_time = [each for each in by_end if (each.end or 0) <= events.head.end]
    chosen = in_time if 2 * len(in_time) >= len(by_end) else by_end
    if len(chosen) < 2:
        return _Units(np.zeros(0), np.zeros(0))
    gaps = np.diff([each.end or 0 for each in chosen]) / 1e9
    return _Units(_amounts(chosen[1:], amount), gaps, steady=events.head.arrivals != "ramp")


def _amounts(requests: Sequence[RequestEvents], amount: Amount) -> Values:
    return np.array([amount(each) for each in requests], dtype=float)


def _latencies(requests: Sequence[RequestEvents]) -> Values:
    return np.array([(each.end or 0) - each.dispatched for each in requests]) / 1e9
