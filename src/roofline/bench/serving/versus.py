"""Two systems compared in turns: blocks in the order A B B A with the same requests and arrivals, until it is decided.

A round is four blocks. The two halves send the next requests of the traffic each, to one system and then to the other,
so that neither sees a request twice; a drift of the machine that is even over a round cancels in the round's ratio.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from roofline.bench.load.events import Events, RequestEvents
from roofline.bench.load.plan import Plan
from roofline.bench.results.compare import (
    LOOKS,
    By,
    Decision,
    GoodputDecision,
    Sequential,
    SequentialGoodput,
)
from roofline.bench.results.metrics import answer_tokens, good_share
from roofline.bench.results.objectives import Objective
from roofline.bench.results.point import Point
from roofline.bench.results.window import measured
from roofline.bench.serving.load_test import LoadTest, NotKept
from roofline.bench.serving.measure import point_of
from roofline.common import log

MOST_FAILED, FEWEST_SENT = 0.05, 100  # of the requests to a side, counted as at least so many
_MOMENTS = (
    "scheduled",
    "dispatched",
    "connected",
    "sent",
    "headers",
    "first_byte",
    "first_reasoning",
    "first_text",
    "end",
)


@dataclass(frozen=True)
class Terms:
    """How systems are compared. requests: of a block; concurrency: workers of a closed loop; rate: requests a second
    of a Poisson process instead; by: what decides; margin: a difference that does not matter; rounds: at most; promise:
    of a service, whose goodput is compared at a rate."""

    requests: int
    concurrency: int = 1
    rate: float | None = None
    by: By = "throughput"
    margin: float = 0.03
    rounds: int = LOOKS[-1]
    promise: Objective | None = None

    @property
    def most_rounds(self) -> int:
        """With those that are left out because requests fail."""
        return self.rounds + self.rounds // 4 + 1

    @property
    def looks(self) -> tuple[int, ...]:
        """The rounds after which it may be decided, the last of them the budget."""
        return (*(look for look in LOOKS if look < self.rounds), self.rounds)


@dataclass
class VersusResult:
    """What was measured of A and B by now. events: of all blocks of each, one after the other; lost_rounds: that were
    left out because requests failed; failure: why it was given up, in words."""

    throughput: Sequential
    latency: Sequential
    by: By
    goodput: SequentialGoodput | None = None  # at a rate, under a promise
    events: dict[str, list[Events]] = field(default_factory=lambda: {"A": [], "B": []})
    decision: Decision | GoodputDecision | None = None
    interrupted: bool = False
    lost_rounds: int = 0
    failure: str = ""

    @property
    def rounds(self) -> int:
        """Those that count for what decides."""
        return len(self.deciding.a)

    @property
    def verdict(self) -> Decision | GoodputDecision:
        return self.decision or self.deciding.decision()

    @property
    def deciding(self) -> Sequential | SequentialGoodput:
        if self.by == "goodput":
            assert self.goodput is not None, "it decides at a rate under a promise alone"
            return self.goodput
        return self.throughput if self.by == "throughput" else self.latency


def compare(a: LoadTest, b: LoadTest, terms: Terms, on_round: Callable[[VersusResult], None]) -> VersusResult:
    """Run rounds until they decide, or the budget is used up. on_round: called after each of them.

    A round in which a request fails is left out, as its blocks did not do the same work, and told. Where more than
    MOST_FAILED of the requests to a side fail, or too many rounds are lost, the comparison is given up, with what there
    is. Where goodput decides, a request that fails is one that does not keep the promise instead. After Ctrl-C what
    there is.
    """
    tests, failed, sent = {"A": a, "B": b}, {"A": 0, "B": 0}, {"A": 0, "B": 0}
    comparison = VersusResult(
        Sequential(terms.margin, terms.looks), Sequential(terms.margin, terms.looks), terms.by, _goodput(terms)
    )
    for number in range(terms.most_rounds):
        blocks: list[tuple[str, Events]] = []
        for block, name in enumerate("ABBA"):
            events = tests[name].send(_plan(tests[name], terms, first=(2 * number + block // 2) * terms.requests))
            if events.head.interrupted:
                comparison.interrupted = True
                return comparison
            blocks.append((name, events))
            causes = _failures(events)
            sent[name] += terms.requests
            failed[name] += len(causes)
            if causes and terms.by != "goodput":
                cause = f"{failed[name]} of {sent[name]} requests to {name} failed, the last one with: {causes[-1]}"
                log.get("bench").warning("round %d is left out: %s", number + 1, cause)
                if failed[name] > MOST_FAILED * max(sent[name], FEWEST_SENT):
                    comparison.failure = f"{cause}; the comparison was given up"
                    return comparison
                break
        if len(blocks) < len("ABBA") or (terms.by != "goodput" and _failures(blocks[-1][1])):
            comparison.lost_rounds += 1
            continue
        _add(comparison, blocks, terms)
        on_round(comparison)
        if comparison.decision is not None:
            return comparison
    comparison.failure = f"{comparison.lost_rounds} rounds were left out because requests failed: too few are left"
    return comparison


def _goodput(terms: Terms) -> SequentialGoodput | None:
    if terms.rate is None or terms.promise is None:
        return None
    return SequentialGoodput(terms.rate, 2 * terms.requests, terms.margin, terms.looks)


def _add(comparison: VersusResult, blocks: Sequence[tuple[str, Events]], terms: Terms) -> None:
    """Add the ratios of a round in which no request failed, and the shares of requests that keep the promise. At a rate
    there is no ratio of throughputs: both sides have the offered one, and a block's length has its drain in it."""
    rates: dict[str, list[float]] = {"A": [], "B": []}
    delays: dict[str, list[float]] = {"A": [], "B": []}
    for name, events in blocks:
        comparison.events[name].append(events)
    decisions: dict[By, Decision | GoodputDecision | None] = {}
    if not any(_failures(events) for _, events in blocks):
        for name, events in blocks:
            rates[name].append(block_rate(events) if terms.rate is None else 0.0)
            delays[name].append(block_latency(events))
        decisions["latency"] = comparison.latency.add(*(_middle(delays[name]) for name in "AB"))
        if terms.rate is None:
            decisions["throughput"] = comparison.throughput.add(*(_middle(rates[name]) for name in "AB"))
    if comparison.goodput is not None and terms.promise is not None:
        shares = {side: [good_share(events, terms.promise) for name, events in blocks if name == side] for side in "AB"}
        decisions["goodput"] = comparison.goodput.add(*(float(np.mean(shares[side])) for side in "AB"))
    comparison.decision = decisions[comparison.by]


def _plan(test: LoadTest, terms: Terms, first: int) -> Plan:
    if terms.rate is None:
        plan = test.plan(terms.requests, concurrency=terms.concurrency, probes=[])
    else:
        plan = test.plan(terms.requests, arrivals="poisson", rate=terms.rate, seed=first, probes=[])
    return msgspec.structs.replace(plan, first=first)


def _failures(events: Events) -> list[str]:
    """Why requests of a block failed."""
    causes = [each.error or ("the answer had no text" if each.empty else "") for each in measured(events)]
    return [cause for cause in causes if cause]


def _middle(values: list[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def block_rate(events: Events) -> float:
    """Answer tokens of a block a second, from its first request to its last answer's end."""
    requests = [request for request in measured(events) if request.end is not None]
    seconds = max(request.end or 0 for request in requests) - min(request.dispatched for request in requests)
    return sum(answer_tokens(request) for request in requests) / (seconds / 1e9)


def block_latency(events: Events) -> float:
    """The mean time of a block's requests from their planned moments to their answers' ends, in milliseconds."""
    ends = [(request.end or 0) - request.planned for request in measured(events)]
    return float(np.mean(ends)) / 1e6


def points(a: LoadTest, b: LoadTest, terms: Terms, comparison: VersusResult) -> list[Point]:
    """A point of each side over all of its blocks, with the ratios, and kept in the results. Raises NotKept with those
    that cannot be."""
    points: list[Point] = []
    lost: list[NotKept] = []
    for name, test in (("A", a), ("B", b)):
        if not comparison.events[name]:
            continue
        events = one_after_the_other(comparison.events[name])
        point = point_of(test, "compare", _plan(test, terms, 0), events)
        extra = {**point.extra, "side": name, "by": terms.by, "margin": terms.margin}
        if comparison.rounds:
            extra["verdict"] = comparison.verdict.verdict
            for what, ratios in (("throughput", comparison.throughput), ("latency", comparison.latency)):
                if not ratios.a:
                    continue
                ratio = ratios.decision().ratio
                extra |= {f"{what}_ratio": ratio.ratio, f"{what}_low": ratio.low, f"{what}_high": ratio.high}
            if comparison.goodput is not None:
                decision = comparison.goodput.decision()
                low, high = decision.interval
                extra |= {"goodput_difference": decision.difference, "goodput_low": low, "goodput_high": high}
            extra["rounds"] = comparison.rounds
        point = with_goodput(point, name, comparison)
        window = msgspec.structs.replace(point.window, repeats=len(comparison.events[name]), order="ABBA")
        point = msgspec.structs.replace(point, run=a.run, window=window, extra=extra)
        try:
            points.append(test.keep(point, events))
        except NotKept as error:
            lost.append(error)
    if lost:
        raise NotKept([point for each in lost for point in each.points], lost[0].cause)
    return points


def with_goodput(point: Point, side: str, comparison: VersusResult) -> Point:
    """The point with the goodput that was compared: of all its requests, not of those of a window."""
    figure, share = point.metrics.get("goodput"), point.metrics.get("good_share")
    if comparison.goodput is None or not comparison.goodput.a or figure is None or share is None:
        return point
    decision, rate = comparison.goodput.decision(), comparison.goodput.rate
    value = decision.a if side == "A" else decision.b
    around = figure.ci95
    if around is not None and figure.value:
        around = (around[0] * value / figure.value, around[1] * value / figure.value)
    figures = {
        "goodput": msgspec.structs.replace(
            figure,
            value=value,
            ci95=around,
            definition=f"{share.definition.partition(';')[0]} * requests offered a second",
        ),
        "good_share": msgspec.structs.replace(share, value=value / rate),
    }
    return msgspec.structs.replace(point, metrics={**point.metrics, **figures})


def one_after_the_other(blocks: list[Events]) -> Events:
    """Blocks as one run: each begins when the one before has ended."""
    requests: list[RequestEvents] = []
    start = 0
    for block in blocks:
        requests += [_shifted(request, start) for request in block.requests]
        start += max((request.end or 0) for request in block.requests)
    head = msgspec.structs.replace(blocks[0].head, begin=0, end=start, blocks=len(blocks))
    joules = [(block.head.joules, block.head.joules_seconds) for block in blocks]
    if head.joules is not None:
        counted, seconds = (sum(each or 0.0 for each in column) for column in zip(*joules, strict=True))
        head = msgspec.structs.replace(head, joules=counted, joules_seconds=seconds)
    return Events(head, requests)


def _shifted(request: RequestEvents, by: int) -> RequestEvents:
    moments = {name: None if (at := getattr(request, name)) is None else at + by for name in _MOMENTS}
    return msgspec.structs.replace(request, **moments, chunks=[at + by for at in request.chunks])
