"""When a comparison of two systems is decided: paired ratios, or differences, that are looked at again and again.

Whoever looks at an interval after every block, and stops as soon as it excludes 1, errs far more often than the
interval says. So the looks are planned: there is a fixed number of them, and each spends an equal part of the error
that is allowed to all of them together (Bonferroni). That holds whatever the blocks' distribution does over time.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Generic, Literal, TypeVar

from roofline.bench.results.statistics import CONFIDENCE, Interval, Ratio, paired_difference, paired_ratio

LOOKS = (4, 6, 9, 13, 19, 28)  # pairs after which there is a look; the last one is the budget

Verdict = Literal["A is higher", "B is higher", "no difference", "undecided"]
By = Literal["throughput", "latency", "goodput"]


@dataclass(frozen=True)
class Decision:
    """What is known of the ratio of B to A after so many pairs. margin: the difference that matters, such as 0.03."""

    ratio: Ratio
    verdict: Verdict
    margin: float

    def sentence(self, by: By) -> str:
        """The verdict with its figures. by: what the ratio is of."""
        ratio = self.ratio
        of_all = f"{ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] over {ratio.pairs} rounds"
        if self.verdict == "no difference":
            return f"no difference > {self.margin:.1%}: B/A is {of_all}"
        if self.verdict == "undecided":
            return f"undecided within the budget: B/A is {of_all}"
        return f"{in_words(self.verdict, by)}: B/A is {of_all}"


def in_words(verdict: str, by: str) -> str:
    """A verdict, and for whom it is good: of latencies the higher one is worse."""
    if verdict not in ("A is higher", "B is higher"):
        return verdict
    better = by != "latency"
    return f"{verdict}, which is {'better' if better else 'worse'}"


@dataclass(frozen=True)
class GoodputDecision:
    """What is known of the goodput of B less that of A after so many pairs, at the same offered rate.

    a, b: requests a second of each side that keep the objective; difference: b - a, with its interval; margin: the
    difference that matters, as a share of the offered rate.
    """

    a: float
    b: float
    interval: Interval
    verdict: Verdict
    margin: float
    rounds: int

    @property
    def difference(self) -> float:
        return self.b - self.a

    def sentence(self, by: By = "goodput") -> str:
        """The verdict with its figures."""
        figures = self.figures()
        if self.a == self.b == 0:
            figures += "; no request to either side keeps the objective, so it tells the two apart in nothing: widen it"
        if self.verdict == "no difference":
            return f"no difference > {self.margin:.1%} of the offered rate: {figures}"
        if self.verdict == "undecided":
            return f"undecided within the budget: {figures}"
        return f"{in_words(self.verdict, by)}: {figures}"

    def figures(self) -> str:
        """Both sides, and the difference with its interval."""
        low, high = self.interval
        return (
            f"A {self.a:.3g}, B {self.b:.3g} requests/s within the objective, B - A {self.difference:+.3g} "
            f"[{low:+.3g}, {high:+.3g}] over {self.rounds} rounds"
        )


AnyDecision = TypeVar("AnyDecision", Decision, GoodputDecision)


class _SequentialPairs(ABC, Generic[AnyDecision]):
    """Collects pairs and says when they decide. margin: how far two sides may be apart without a difference; looks:
    after how many pairs it may decide, in ascending order."""

    def __init__(self, margin: float, looks: Sequence[int]) -> None:
        self._margin, self._looks = margin, tuple(looks)
        self.a: list[float] = []
        self.b: list[float] = []

    def add(self, a: float, b: float) -> AnyDecision | None:
        """Add a pair. A decision where this is a planned look that decides, or the last one; None to go on."""
        self.a.append(a)
        self.b.append(b)
        if len(self.a) not in self._looks:
            return None
        decision = self.decision()
        return decision if decision.verdict != "undecided" or len(self.a) >= self._looks[-1] else None

    @abstractmethod
    def decision(self) -> AnyDecision:
        """What the pairs so far say, at the error of one look."""

    @property
    def _error(self) -> float:
        """The error of one look."""
        return (1 - CONFIDENCE) / len(self._looks)

    def _verdict(self, low: float, high: float, equal: float) -> Verdict:
        """What an interval of B against A says, which is `equal` where the two sides are the same."""
        if equal - self._margin < low and high < equal + self._margin:
            return "no difference"
        if low > equal:
            return "B is higher"
        return "A is higher" if high < equal else "undecided"


class SequentialGoodput(_SequentialPairs[GoodputDecision]):
    """Collects the shares of requests that keep an objective, of blocks at the same offered rate, and says when they
    decide. A share may be 0, so they are compared by differences, not by ratios.

    rate: requests a second that are offered; requests: of a side in a pair; margin: as a share of the rate; looks:
    after how many pairs it may decide, in ascending order.
    """

    def __init__(self, rate: float, requests: int, margin: float, looks: Sequence[int] = LOOKS) -> None:
        super().__init__(margin, looks)
        self.rate, self._requests = rate, requests

    def decision(self) -> GoodputDecision:
        """What the pairs so far say, at the error of one look. Shares that never differ say no more than so many
        requests can: that of n, each of which keeps the objective, as many as ln(2 / error) / n may not."""
        low, high = paired_difference(self.a, self.b, self._error)
        middle, least = fmean(self.b) - fmean(self.a), math.log(2 / self._error) / (self._requests * len(self.a))
        low, high = min(low, middle - least), max(high, middle + least)
        return GoodputDecision(
            a=fmean(self.a) * self.rate,
            b=fmean(self.b) * self.rate,
            interval=(low * self.rate, high * self.rate),
            verdict=self._verdict(low, high, 0),
            margin=self._margin,
            rounds=len(self.a),
        )


class Sequential(_SequentialPairs[Decision]):
    """Collects pairs and says when they decide. margin: a ratio between 1 - margin and 1 + margin is no difference;
    looks: after how many pairs it may decide, in ascending order."""

    def __init__(self, margin: float, looks: Sequence[int] = LOOKS) -> None:
        super().__init__(margin, looks)

    def decision(self) -> Decision:
        """What the pairs so far say, at the error of one look."""
        ratio = paired_ratio(self.a, self.b, self._error)
        return Decision(ratio, self._verdict(ratio.low, ratio.high, 1), self._margin)
