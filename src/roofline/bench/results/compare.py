"""When a comparison of two systems is decided: paired ratios that are looked at again and again.

Whoever looks at an interval after every block, and stops as soon as it excludes 1, errs far more often than the
interval says. So the looks are planned: there is a fixed number of them, and each spends an equal part of the error
that is allowed to all of them together (Bonferroni). That holds whatever the blocks' distribution does over time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from roofline.bench.results.statistics import CONFIDENCE, Ratio, paired_ratio

LOOKS = (4, 6, 9, 13, 19, 28)  # pairs after which there is a look; the last one is the budget

Verdict = Literal["A is higher", "B is higher", "no difference", "undecided"]
By = Literal["throughput", "latency"]


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
    better = by == "throughput"
    return f"{verdict}, which is {'better' if better else 'worse'}"


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
