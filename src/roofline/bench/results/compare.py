"""When a comparison of two systems is decided: paired ratios, or differences, that are looked at again and again.

Whoever looks at an interval after every block, and stops as soon as it excludes 1, errs far more often than the
interval says. So the looks are planned: there is a fixed number of them, and each spends an equal part of the error
that is allowed to all of them together (Bonferroni). That holds whatever the blocks' distribution does over time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

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


class SequentialGoodput:
    """Collects the shares of requests that keep an objective, of blocks at the same offered rate, and says when they
    decide. A share may be 0, so they are compared by differences, not by ratios.

    rate: requests a second that are offered; requests: of a side in a pair; margin: as a share of the rate; looks:
    after how many pairs it may decide, in ascending order.
    """

    def __init__(self, rate: float, requests: int, margin: float, looks: Sequence[int] = LOOKS) -> None:
        self._rate, self._requests, self._margin, self._looks = rate, requests, margin, tuple(looks)
        self.a: list[float] = []
        self.b: list[float] = []

    def add(self, a: float, b: float) -> GoodputDecision | None:
        """Add the shares of a pair. As `Sequential.add`."""
        self.a.append(a)
        self.b.append(b)
        if len(self.a) not in self._looks:
            return None
        decision = self.decision()
        return decision if decision.verdict != "undecided" or len(self.a) >= self._looks[-1] else None

    def decision(self) -> GoodputDecision:
        """What the pairs so far say, at the error of one look. Shares that never differ say no more than so many
        requests can: that of n, each of which keeps the objective, as many as ln(2 / error) / n may not."""
        error = (1 - CONFIDENCE) / len(self._looks)
        low, high = paired_difference(self.a, self.b, error)
        middle, least = fmean(self.b) - fmean(self.a), math.log(2 / error) / (self._requests * len(self.a))
        low, high = min(low, middle - least), max(high, middle + least)
        verdict: Verdict = "undecided"
        if -self._margin < low and high < self._margin:
            verdict = "no difference"
        elif low > 0:
            verdict = "B is higher"
        elif high < 0:
            verdict = "A is higher"
        return GoodputDecision(
            a=fmean(self.a) * self._rate,
            b=fmean(self.b) * self._rate,
            interval=(low * self._rate, high * self._rate),
            verdict=verdict,
            margin=self._margin,
            rounds=len(self.a),
        )


class Sequential:
    """Collects pairs and says when they decide. margin: a ratio between 1 - margin and 1 + margin is no difference;
    looks: after how many pairs it may decide, in ascending order."""

    def __init__(self, margin: float, looks: Sequence[int] = LOOKS) -> None:
        self._margin, self._looks = margin, tuple(looks)
        self.a: list[float] = []
        self.b: list[float] = []

    def add(self, a: float, b: float) -> Decision | None:
        """Add a pair. A decision where this is a planned look that decides, or the last one; None to go on."""
        self.a.append(a)
        self.b.append(b)
        if len(self.a) not in self._looks:
            return None
        decision = self.decision()
        return decision if decision.verdict != "undecided" or len(self.a) >= self._looks[-1] else None

    def decision(self) -> Decision:
        """What the pairs so far say, at the error of one look."""
        ratio = paired_ratio(self.a, self.b, (1 - CONFIDENCE) / len(self._looks))
        verdict: Verdict = "undecided"
        if 1 - self._margin < ratio.low and ratio.high < 1 + self._margin:
            verdict = "no difference"
        elif ratio.low > 1:
            verdict = "B is higher"
        elif ratio.high < 1:
            verdict = "A is higher"
        return Decision(ratio, verdict, self._margin)
