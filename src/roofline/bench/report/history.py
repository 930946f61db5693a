"""Measurements of the same load over time: their trend by version, and the gate that refuses a slower one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from roofline.bench.report import words
from roofline.bench.report.chart import Axis, Chart, Mark, ReportSection, Series, Table
from roofline.bench.report.gather import Gathered
from roofline.bench.report.ratios import PairedGoodput, ReportRatio, paired_goodputs, pairs, ratio
from roofline.bench.results.point import Point
from roofline.bench.results.statistics import CONFIDENCE
from roofline.common.errors import ConfigError

HIGHER_IS_BETTER = {
    **{words.REQUESTS: True, words.TOKENS: True, words.TTFT: False, words.TPOT: False, words.E2E: False},
    **{words.TRAIN: True, words.STEP: False, words.EFFICIENCY: True},
}


@dataclass(frozen=True)
class LoadKey:
    """What points must share to be measurements of the same. system: its label, without the version; place: the
    machine."""

    preset: str
    sha256: str
    load: str
    system: str
    place: str

    def __str__(self) -> str:
        return ", ".join(dict.fromkeys((self.system, self.preset, self.load)))  # without a load, that is the preset


def key_of(point: Point) -> LoadKey:
    sha256 = "" if point.workload is None else point.workload.sha256
    return LoadKey(point.preset, sha256, words.load_name(point), point.system.label, words.machine(point))


def check_metric(name: str) -> None:
    """Raises ConfigError for a metric whose better direction is not known."""
    if name not in HIGHER_IS_BETTER:
        raise ConfigError(f"metric={name!r} has no trend; choose one of {', '.join(HIGHER_IS_BETTER)}")


def by_key(points: Sequence[Point]) -> dict[LoadKey, list[Point]]:
    """Points of the same load, each by time."""
    groups: dict[LoadKey, list[Point]] = {}
    for point in sorted(points, key=lambda point: point.started):
        groups.setdefault(key_of(point), []).append(point)
    return groups


def trend(gathered: Gathered, name: str) -> ReportSection:
    """A metric over time for each load that was measured, with the ratio of each measurement to the one before.

    Raises ConfigError where no point has the metric.
    """
    check_metric(name)
    charts: list[Chart] = []
    rows: list[tuple[str, ...]] = []
    for key, points in by_key(gathered.points).items():
        own = [point for point in points if words.metric(point, name) is not None]
        if not own:
            continue
        marks = tuple(
            Mark(
                x=number + 1.0,
                y=words.metric(point, name) or 0.0,
                y_interval=words.interval(point, name),
                label=_version(point) + words.interrupted(point),
                note=f"{_version(point)}, {_measured(point)}: {words.digits(words.metric(point, name))}",
                trusted=words.trusted(point),
                doubt=words.doubt(point),
            )
            for number, point in enumerate(own)
        )
        unit = getattr(words.figure(own[0], name), "unit", "")
        charts.append(
            Chart(
                title=f"{key}, {key.place}",
                x=Axis(title="measurement, the oldest first", integral=True),
                y=Axis(title=f"{name.replace('_', ' ')}, {unit}", zero=True),
                series=(Series(name=f"{key}, {key.place}", marks=marks, look=len(charts)),),
            )
        )
        rows += _rows(key, own, name)
    if not rows:
        there = {
            name for point in gathered.points for name in HIGHER_IS_BETTER if words.metric(point, name) is not None
        }
        hint = f"; choose one of {', '.join(sorted(there))}" if there else ""
        raise ConfigError(f"metric={name!r}: no point has it{hint}")
    headings = ("load", "machine", "version", "measured", name.replace("_", " "), "to the one before", "to the first")
    text = "Bars and brackets are 95 % intervals; a ratio whose interval contains 1 shows no change."
    return ReportSection(f"{name.replace('_', ' ')} over time", text, tuple(charts), Table(headings, tuple(rows)))


def _rows(key: LoadKey, points: Sequence[Point], name: str) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for before, point in zip([None, *points], points, strict=False):
        value = words.with_interval(words.metric(point, name), words.interval(point, name))
        last = None if before is None else ratio([point], [before], name)
        first = None if before is None else ratio([point], [points[0]], name)
        ratios = _ratio_text(last), _ratio_text(first)
        measured = _measured(point) + ("" if before is None else words.other_settings([point], [before]))
        rows.append((str(key), key.place, _version(point), measured, value, *ratios))
    return rows


def _version(point: Point) -> str:
    return point.system.version or point.system.fingerprint[:8] or "?"


def _measured(point: Point) -> str:
    """When it was, and whether to its end."""
    return point.started + words.interrupted(point)


def _ratio_text(of: ReportRatio | None) -> str:
    return "-" if of is None else words.with_interval(of.value, of.interval)


@dataclass(frozen=True)
class Finding:
    """One load's verdict. worse: how much slower at the point estimate, 0.05 being 5 %; verdict: "slower" fails a gate;
    "undecided": slower than is allowed, but the interval contains no change, or there is none; exact: of plans, which
    have no noise and so need no interval."""

    name: str
    metric: str
    ratio: ReportRatio
    worse: float
    verdict: str
    exact: bool = False

    def __str__(self) -> str:
        around = self.ratio.interval
        figures = words.digits(self.ratio.value, 4)
        if around is not None:
            figures += f" [{words.digits(around[0], 4)}, {words.digits(around[1], 4)}]"
        elif not self.exact:
            figures += " (no interval)"
        return f"{self.name}: {self.metric.replace('_', ' ')} is {figures} of the old one, {self.verdict}"


@dataclass(frozen=True)
class Allowed:
    """What a gate lets differ beside the version. at_most: the loss that passes, 0.05 being 5 %."""

    at_most: float
    other_traffic: bool = False
    other_machine: bool = False


def check(new: Sequence[Point], old: Sequence[Point], metric: str, allowed: Allowed) -> list[Finding]:
    """A verdict for each load that both have. Raises ConfigError where there is none, or where only traffic or machines
    that differ keep them apart, naming which."""
    check_metric(metric)
    above, below = _relaxed(new, allowed), _relaxed(old, allowed)
    common = [key for key in above if key in below]
    if not common:
        raise ConfigError(_why_apart(list(above), list(below)))
    findings = []
    ratios = {key: between for key in common if (between := ratio(above[key], below[key], metric)) is not None}
    for key, between in ratios.items():
        points_of_key = (*above[key], *below[key])
        early = next(filter(None, map(words.interrupted, points_of_key)), "")
        name = f"{key}{early}{words.other_settings(above[key], below[key])}"
        exact = all(map(words.planned, points_of_key))
        findings.append(_finding(name, metric, between, Doubt(allowed.at_most, len(ratios), exact)))
    if not findings:
        raise ConfigError(f"metric={metric!r}: no load that both files have has it")
    return findings


def _relaxed(points: Sequence[Point], allowed: Allowed) -> dict[LoadKey, list[Point]]:
    """Points by what they must share to be compared."""
    groups: dict[LoadKey, list[Point]] = {}
    for key, own in by_key(points).items():
        sha256 = "" if allowed.other_traffic else key.sha256
        place = "" if allowed.other_machine else key.place
        groups.setdefault(replace(key, sha256=sha256, place=place), []).extend(own)
    return groups


def without_match(new: Sequence[Point], old: Sequence[Point], allowed: Allowed) -> str:
    """Which loads only one of two files has, so that they are not compared, in a sentence; "" where both have all."""
    above, below = _relaxed(new, allowed), _relaxed(old, allowed)
    alone = {"new": [key for key in above if key not in below], "old": [key for key in below if key not in above]}
    if not any(alone.values()):
        return ""
    which = "; ".join(
        f"of the {name} file {', '.join(key.load for key in keys)}" for name, keys in alone.items() if keys
    )
    rates = any(point.load is not None and point.load.offered is not None for point in (*new, *old))
    hint = "; `bench curve --levels-from OLD` offers the rates of an earlier curve again" if rates else ""
    return f"not compared, as the other file has no such load: {which}{hint}"


@dataclass(frozen=True)
class Doubt:
    """What a verdict must be beyond. at_most: the loss that passes; loads: how many are judged in one gate, which any
    of them fails; exact: whether the figures have no noise."""

    at_most: float
    loads: int = 1
    exact: bool = False

    @property
    def widening(self) -> float:
        """How much wider than its own 95 % an interval must be, so that all loads together err as seldom as one of
        them (Bonferroni): a gate over many fails no more often by chance."""
        one_side, quantile = (1 - CONFIDENCE) / 2, NormalDist().inv_cdf
        return quantile(1 - one_side / self.loads) / quantile(1 - one_side)


def _finding(name: str, metric: str, between: ReportRatio, doubt: Doubt) -> Finding:
    higher = HIGHER_IS_BETTER[metric]
    worse = 1 - between.value if higher else between.value - 1
    around = between.interval
    real = doubt.exact
    if around is not None:
        middle, near = math.log(between.value), math.log(around[1] if higher else around[0])
        end = middle + (near - middle) * doubt.widening  # of the interval, on the side of no change
        real = end < 0 if higher else end > 0
    verdict = "passes" if worse <= doubt.at_most else "slower" if real else "undecided"
    return Finding(name=name, metric=metric, ratio=between, worse=worse, verdict=verdict, exact=doubt.exact)


@dataclass(frozen=True)
class GoodputFinding:
    """The verdict of a comparison by goodput. difference: requests a second that keep the objective, of the new one
    less the old one; worse: how many of the offered ones are lost, 0.05 being 5 %; verdict: as of a Finding."""

    name: str
    difference: float
    interval: tuple[float, float]
    worse: float
    verdict: str
    metric: str = words.GOODPUT

    def __str__(self) -> str:
        low, high = self.interval
        figures = f"{self.difference:+.4g} [{low:+.4g}, {high:+.4g}] requests/s"
        return f"{self.name}: goodput differs by {figures} from the old one, {self.verdict}"


def check_pairs(points: Sequence[Point], at_most: float, metric: str = "") -> list[Finding | GoodputFinding]:
    """The same of paired comparisons, which need no second file: B is the new one. metric: that is judged, "": all of
    them, or goodput alone where that decided. Raises ConfigError where there are none, or none of that metric."""
    names = {"throughput": words.TOKENS, "latency": words.E2E}
    every = {names[pair.of] for pair in pairs(points)} | {words.GOODPUT for _ in paired_goodputs(points)}
    if not every:
        raise ConfigError("there is no paired ratio of bench compare in these points: name the older ones (--against)")
    if metric and metric not in every:
        there = ", ".join(sorted(every))
        raise ConfigError(f"metric={metric!r} is not among what bench compare measured here: choose one of {there}")
    goodputs = [pair for pair in paired_goodputs(points) if metric == words.GOODPUT or (not metric and pair.decided)]
    decided = {pair.point.id for pair in goodputs}
    rows = [pair for pair in pairs(points) if metric == names[pair.of] or (not metric and pair.point.id not in decided)]
    doubt = Doubt(at_most, len(rows) + len(goodputs))
    return [
        *(_finding(pair.name, names[pair.of], pair.ratio, doubt) for pair in rows),
        *(_goodput_finding(pair, doubt) for pair in goodputs),
    ]


def _goodput_finding(pair: PairedGoodput, doubt: Doubt) -> GoodputFinding:
    worse = -pair.difference / pair.offered
    end = pair.difference + (pair.interval[1] - pair.difference) * doubt.widening
    verdict = "passes" if worse <= doubt.at_most else "slower" if end < 0 else "undecided"
    return GoodputFinding(pair.name, pair.difference, pair.interval, worse, verdict)


def _why_apart(new: Sequence[LoadKey], old: Sequence[LoadKey]) -> str:
    """What keeps two files apart that share no load."""
    for mine in new:
        for theirs in old:
            if replace(mine, sha256=theirs.sha256) == theirs:
                return (
                    f"{mine}: the traffic differs ({mine.sha256[:8]} and {theirs.sha256[:8]}), so a ratio would "
                    "compare different work; measure the same traffic file, or say --other-traffic"
                )
            if replace(mine, place=theirs.place) == theirs:
                return (
                    f"{mine}: the machines differ ({mine.place} and {theirs.place}), so a ratio would compare them "
                    "too; measure on one machine, or say --other-machine"
                )
    names = "; ".join(dict.fromkeys(map(str, old)))
    return f"the two files have no load in common: the old one has {names}; measure the same preset, load and label"
