"""Which requests of a run figures are taken from: those that were sent while the load was full.

A lap is as many requests as are under way at a time: the workers of a closed loop, the mean number in flight of an
open one. The first lap finds an empty system, or meets all of itself at once; the last one runs while the load ends.
Both are left out by their number in the order of dispatch: to choose requests by their latency, or by whether they
ended within a window, would favour the short ones.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from roofline.bench.load.events import Events, RequestEvents

LAPS_TO_FILL, LAPS_TO_EMPTY = 3, 4  # laps of a run whose first one, and whose last one, are left out
FEWEST_LEFT = 5  # requests that must remain, so that there is a median
_STEADY = ("closed", "constant", "poisson", "gamma")  # arrivals that are the same from the first to the last


@dataclass(frozen=True)
class Span:
    """The window: nanoseconds since the run's beginning, of the moments at which requests are dispatched."""

    begin: int
    end: int

    @property
    def seconds(self) -> float:
        return max(self.end - self.begin, 1) / 1e9

    def holds(self, request: RequestEvents) -> bool:
        """Whether a request was dispatched in it."""
        return self.begin <= request.dispatched <= self.end


def measured(events: Events) -> list[RequestEvents]:
    """All requests but probes."""
    return [request for request in events.requests if not request.probe]


def in_span(requests: Iterable[RequestEvents], span: Span) -> list[RequestEvents]:
    """The completed requests that were dispatched in it."""
    return [each for each in requests if each.completed and span.holds(each)]


def measured_span(events: Events) -> Span:
    """The window of a run: what its head says, without the first and the last lap where there are enough laps."""
    head = events.head
    all_of_it = Span(head.begin, head.end)
    requests = _of_head(events)
    if head.arrivals not in _STEADY or not requests:
        return all_of_it
    cut_before = any(each.dispatched < head.begin for each in measured(events))  # by another tool's warm-up
    cut_behind = any(each.dispatched > head.end for each in measured(events))
    lap, laps = lap_of(events), _laps_left_out(events)
    begin = requests[lap].dispatched if laps > 0 and not cut_before else head.begin
    end = requests[-lap - 1].dispatched if laps > 1 and not cut_behind else head.end
    return Span(begin, end)


def _laps_left_out(events: Events) -> int:
    """0, 1 (the first), or 2 (the last one too)."""
    lap, count = lap_of(events), len(_of_head(events))
    if count >= max(LAPS_TO_EMPTY * lap, 2 * lap + FEWEST_LEFT):
        return 2
    return int(count >= max(LAPS_TO_FILL * lap, lap + FEWEST_LEFT))


def is_short(events: Events) -> bool:
    """Whether the run has too few laps to leave the first and the last of them out."""
    return events.head.arrivals in _STEADY and _laps_left_out(events) < 2


def lap_of(events: Events) -> int:
    """How many requests are under way at a time: workers of a closed loop, the mean number of other arrivals."""
    head, requests = events.head, _of_head(events)
    if head.arrivals == "closed":
        return max(1, head.concurrency or most_in_flight(events))
    ended = [each for each in requests if each.end is not None]
    if len(ended) < 2:
        return 1
    in_flight = sum((each.end or 0) - each.dispatched for each in ended)
    return max(1, math.ceil(in_flight / max(ended[-1].dispatched - ended[0].dispatched, 1)))


def _of_head(events: Events) -> list[RequestEvents]:
    """The requests that were dispatched within the head's window, in the order of their dispatch."""
    all_of_it = Span(events.head.begin, events.head.end)
    return sorted(filter(all_of_it.holds, measured(events)), key=lambda each: each.dispatched)


def most_in_flight(events: Events) -> int:
    """The most requests, with probes, that were under way at a time."""
    steps = [(each.dispatched, 1) for each in events.requests]
    steps += [(each.end, -1) for each in events.requests if each.end is not None]
    now = most = 0
    for _, step in sorted(steps):
        now += step
        most = max(most, now)
    return most
