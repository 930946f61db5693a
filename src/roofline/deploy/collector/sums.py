"""What the replicas of a fleet have counted together: sums that never go back, whatever becomes of a replica.

A total is what was added to it, never a sum over the replicas that are there: of each series the growth since the
last scrape is added. A replica that begins anew grows from 0, one that leaves takes nothing along, and one that comes
back under its name goes on from what it was last seen with.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import Metric

from roofline.deploy.collector.page import (
    COUNTED,
    MAX_SERIES,
    REPLICA_PREFIX,
    MetricFamily,
    MetricsPage,
    SeriesKey,
    buckets_of,
    without_edge,
)
from roofline.deploy.collector.rules import gauge_rule

MAX_FLEET_SERIES = 50_000  # totals: labels of replicas that come and go must not fill the memory
MAX_FLEET_FAMILIES = 2_000
MAX_REMEMBERED_SERIES = 100_000  # last values, of all replicas that have left


@dataclass
class LastSeen:
    """What a replica had counted when it was scraped last."""

    birth: float | None
    counts: dict[SeriesKey, float]


class FleetSums:
    """The totals of a fleet, and the gauges of the replicas that answered last."""

    def __init__(self) -> None:
        self._families: dict[str, MetricFamily] = {}  # of what is counted, with the totals
        self._edges: dict[str, tuple[float, ...]] = {}  # of histograms, by name
        self._last: OrderedDict[str, LastSeen] = OrderedDict()  # by replica; those seen last at the end
        self._pages: dict[str, MetricsPage] = {}  # of replicas that answer
        self._series = 0
        self.restarts = 0  # processes that took a replica's place, as far as its metrics tell

    def take(self, replica: str, page: MetricsPage, with_history: bool = True) -> list[str]:
        """Add what a replica has counted since its last scrape. Returns what is not added, a sentence each.

        with_history: whether a replica that was never seen before brings all that it has counted, or what it counts
        from now on.
        """
        last = self._last.get(replica)
        if last is not None and None not in (last.birth, page.birth) and last.birth != page.birth:
            self.restarts += 1
            last = LastSeen(page.birth, {})
        skips = last is None and not with_history
        last = last or LastSeen(page.birth, {})
        refused: list[str] = []
        fell = is_short = False
        for family in page.families.values():
            if family.kind in COUNTED:
                problem = self._problem(family)
                if problem is not None:
                    refused.append(problem)
                    continue
                began_anew, left_out = self._add(family, last.counts, skips)
                fell, is_short = fell or began_anew, is_short or left_out
                last.counts |= family.series
        if fell:
            self.restarts += 1
        if is_short:
            refused.append(f"the fleet has {MAX_FLEET_SERIES:,} series, and no new one is added")
        if len(last.counts) > 2 * MAX_SERIES:  # labels that come and go
            there = {key for family in page.families.values() for key in family.series}
            last.counts = {key: value for key, value in last.counts.items() if key in there}
        self._last[replica], self._pages[replica] = LastSeen(page.birth, last.counts), page
        self._last.move_to_end(replica)
        self._forget()
        return refused

    def silent(self, replica: str) -> None:
        """A replica does not answer, or left: its counts stay, its gauges do not."""
        self._pages.pop(replica, None)

    def families(self) -> Iterator[Metric]:
        """All totals, and what gauges are together, under the replicas' own names and without a label for a replica."""
        for family in self._families.values():
            yield as_metric(family)
        gauges: dict[str, MetricFamily] = {}
        values: dict[SeriesKey, list[float]] = {}
        for page in self._pages.values():
            for family in page.families.values():
                if family.kind == "gauge" and gauge_rule(family.name) is not None:
                    gauges.setdefault(family.name, family)
                    for key, value in family.series.items():
                        if math.isfinite(value):
                            values.setdefault(key, []).append(value)
        for name, family in gauges.items():
            rule = gauge_rule(name)
            together = {key: rule(values[key]) for key in values if key[0] == name} if rule is not None else {}
            if together and name not in self._families:
                yield as_metric(MetricFamily(name, "gauge", family.help, together))

    def histogram(self, name: str) -> list[tuple[float, float]]:
        """Return the totals of a histogram over all its label sets, by upper edge; empty where there is none."""
        family = self._families.get(name)
        counts: dict[float, float] = {}
        if family is not None and family.kind == "histogram":
            for buckets in buckets_of(family).values():
                for edge, count in buckets:
                    counts[edge] = counts.get(edge, 0.0) + count
        return sorted(counts.items())

    def _problem(self, family: MetricFamily) -> str | None:
        """Why a family cannot be added to the fleet's, None where it can be."""
        if family.name not in self._families and len(self._families) >= MAX_FLEET_FAMILIES:
            return f"{family.name}: the fleet has {MAX_FLEET_FAMILIES:,} families, and no new one is added"
        total = self._families.setdefault(family.name, MetricFamily(family.name, family.kind, family.help))
        if total.kind != family.kind:
            return f"{family.name} is a {family.kind}, and of the replicas seen before a {total.kind}"
        if family.kind != "histogram":
            return None
        for buckets in buckets_of(family).values():
            edges = tuple(edge for edge, _ in buckets)
            expected = self._edges.setdefault(family.name, edges)
            if edges != expected:
                return (
                    f"the buckets of {family.name} end at {_in_words(edges)}, and those of the replicas seen before at "
                    f"{_in_words(expected)}: they cannot be added. Have all replicas of one version, and start the "
                    "collector again"
                )
        return None

    def _add(self, family: MetricFamily, before: dict[SeriesKey, float], skips: bool) -> tuple[bool, bool]:
        """Add what a family has grown by. Returns whether any of it had begun anew, and whether there was no room for
        some of it. skips: what it has so far is no growth."""
        total = self._families[family.name].series
        # The buckets of one histogram begin anew together, or they would no longer add up to its count.
        fallen = {
            without_edge(key[1])
            for key, value in family.series.items()
            if value < before.get(key, 0.0) and not self._may_fall(family, key)
        }
        left_out = False
        for key, value in family.series.items():
            if key not in total:
                if self._series >= MAX_FLEET_SERIES:
                    left_out = True
                    continue
                self._series += 1
            first = value if skips else 0.0 if without_edge(key[1]) in fallen else before.get(key, 0.0)
            total[key] = total.get(key, 0.0) + (value - first)
        return bool(fallen), left_out

    def _may_fall(self, family: MetricFamily, key: SeriesKey) -> bool:
        """Whether a series is the sum of observations below 0, which says nothing of a new process when it falls."""
        if family.kind == "counter" or key[0] != f"{family.name}_sum":
            return False
        return family.series[key] < 0 or self._edges.get(family.name, (0.0,))[0] < 0

    def _forget(self) -> None:
        """Forget replicas that left longest ago, where too much is remembered of such."""
        away = [name for name in self._last if name not in self._pages]
        size = sum(len(self._last[name].counts) for name in away)
        for name in away:
            if size <= MAX_REMEMBERED_SERIES:
                return
            size -= len(self._last.pop(name).counts)


def as_metric(family: MetricFamily) -> Metric:
    """Return a family as prometheus_client writes it."""
    metric = Metric(family.name, family.help, family.kind)
    for (name, labels), value in family.series.items():
        metric.add_sample(name, dict(labels), value)
    return metric


def of_replica(family: MetricFamily, replica: str) -> MetricFamily:
    """Return a family of one replica as the fleet shows it: under a name of its own, so that no sum over the fleet's
    name counts anything twice, with the label `replica`. A label that has the name already gets another one, as
    Prometheus does it."""
    series = {}
    for (name, labels), value in family.series.items():
        pairs = [("exported_replica" if label == "replica" else label, text) for label, text in labels]
        series[f"{REPLICA_PREFIX}{name}", tuple(sorted([*pairs, ("replica", replica)]))] = value
    return MetricFamily(f"{REPLICA_PREFIX}{family.name}", family.kind, family.help, series)


def _in_words(edges: tuple[float, ...]) -> str:
    text = ", ".join(f"{edge:g}" for edge in edges)
    return text if len(text) <= 120 else f"{text[:119]}…"
