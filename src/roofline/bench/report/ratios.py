"""Ratios: of systems that were measured in turns, of machines to their roofs, of one version to another."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from roofline.bench.report import words
from roofline.bench.report.chart import Axis, Chart, Interval, Mark, ReportSection, Rule, Series, Table
from roofline.bench.report.gather import CurveKind, Gathered, kind_of
from roofline.bench.report.throughput import devices, traffic_name
from roofline.bench.results.compare import in_words
from roofline.bench.results.point import Point
from roofline.bench.results.statistics import CONFIDENCE
from roofline.train.parity.statistics import t_quantile


@dataclass(frozen=True)
class ReportRatio:
    """A ratio with its 95 % interval, None where neither repeats nor intervals say one."""

    value: float
    interval: Interval | None


def ratio(new: Sequence[Point], old: Sequence[Point], name: str) -> ReportRatio | None:
    """Of a metric of two groups of points that were measured apart; None where either lacks it.

    Logarithms are averaged. Their spread is that among points where a group has three or more, else what the points'
    own intervals say, each end by itself (MOVER, Donner and Zou 2012): intervals may reach farther to one side.
    """
    above, below = _logarithm(new, name), _logarithm(old, name)
    if above is None or below is None:
        return None
    value = math.exp(above.middle - below.middle)
    if above.reaches is None or below.reaches is None:
        return ReportRatio(value, None)
    down, up = math.hypot(above.reaches[0], below.reaches[1]), math.hypot(above.reaches[1], below.reaches[0])
    return ReportRatio(value, (value * math.exp(-down), value * math.exp(up)))


@dataclass(frozen=True)
class _Logarithm:
    """The mean logarithm of a metric. reaches: how far its 95 % interval goes down and up, None where nothing says
    it."""

    middle: float
    reaches: tuple[float, float] | None


def _logarithm(points: Sequence[Point], name: str) -> _Logarithm | None:
    values = [value for point in points if (value := words.metric(point, name)) is not None and value > 0]
    if not values:
        return None
    logarithms = [math.log(value) for value in values]
    middle, count = fmean(logarithms), len(logarithms)
    if count >= 3:
        reach = t_quantile(1 - CONFIDENCE, count - 1) * stdev(logarithms) / math.sqrt(count)
        return _Logarithm(middle, (reach, reach))
    intervals = [around for point in points if (around := words.interval(point, name)) is not None and around[0] > 0]
    if len(intervals) < len(values):
        return _Logarithm(middle, None)
    down = math.hypot(*(at - math.log(low) for at, (low, _) in zip(logarithms, intervals, strict=True))) / count
    up = math.hypot(*(math.log(high) - at for at, (_, high) in zip(logarithms, intervals, strict=True))) / count
    return _Logarithm(middle, (down, up))


@dataclass(frozen=True)
class PairedRatio:
    """A paired ratio of two systems that were measured in turns, B to A, as `bench compare` writes it.

    of: "throughput" or "latency"; name: who was compared, under which load; point: B's.
    """

    of: str
    name: str
    ratio: ReportRatio
    point: Point


@dataclass(frozen=True)
class PairedGoodput:
    """How many more requests a second of B than of A keep an objective, at an offered rate: a difference, as a side may
    keep none. decided: whether the comparison was decided by it."""

    name: str
    difference: float
    interval: Interval
    offered: float
    decided: bool
    point: Point


def paired_goodputs(points: Sequence[Point]) -> list[PairedGoodput]:
    """The differences of goodput among these points, taken from B's."""
    out = []
    for name, point in _named_pairs(points):
        value, low, high = (point.extra.get(f"goodput_{part}") for part in ("difference", "low", "high"))
        offered = None if point.load is None else point.load.offered
        if isinstance(value, float) and isinstance(low, float) and isinstance(high, float) and offered:
            decided = point.extra.get("by") == "goodput"
            out.append(
                PairedGoodput(
                    name=name, difference=value, interval=(low, high), offered=offered, decided=decided, point=point
                )
            )
    return out


def _named_pairs(points: Sequence[Point]) -> Iterator[tuple[str, Point]]:
    """(who was compared, under which load; B's point) of all that were measured in turns."""
    labels = {point.run: words.system_name(point) for point in points if point.extra.get("side") == "A"}
    for point in points:
        if point.extra.get("side") == "B":
            first = labels.get(point.run, "A")
            yield f"{words.system_name(point)} / {first}, {point.preset}, {words.load_name(point)}", point


def pairs(points: Sequence[Point]) -> list[PairedRatio]:
    """The paired ratios among these points: each stands in the points of both sides, and is taken from B's."""
    out = []
    for name, point in _named_pairs(points):
        for of in ("throughput", "latency"):
            value, low, high = (point.extra.get(f"{of}_{part}") for part in ("ratio", "low", "high"))
            if isinstance(value, float) and isinstance(low, float) and isinstance(high, float):
                out.append(PairedRatio(of, name, ReportRatio(value, (low, high)), point))
    return out


def forest(gathered: Gathered) -> ReportSection | None:
    """The ratios of systems that were measured in turns, one below the other; None where there are none."""
    rows = pairs(gathered.points)
    if not rows:
        return None
    marks = tuple(
        Mark(
            x=pair.ratio.value,
            y=number,
            x_interval=pair.ratio.interval,
            note=f"{pair.of}: {words.with_interval(pair.ratio.value, pair.ratio.interval)}",
            trusted=words.trusted(pair.point),
            doubt=words.doubt(pair.point),
        )
        for number, pair in enumerate(rows)
    )
    chart = Chart(
        title="paired ratios",
        x=Axis(title="ratio", log=True),
        y=Axis(title="", categories=tuple(f"{pair.of}: {pair.name}" for pair in rows)),
        series=(Series(name="ratio with its 95 % interval", marks=marks, look=0, kind="dots"),),
        rules=(Rule("x", 1.0, "no difference"),),
    )
    table = Table(
        ("what", "of", "ratio", "low", "high", "verdict"),
        tuple(
            (pair.name, pair.of, words.digits(pair.ratio.value, 4), *_ends(pair.ratio.interval), _verdict(pair))
            for pair in rows
        )
        + tuple(_goodput_rows(gathered.points)),
    )
    text = (
        "Systems measured in turns under the same traffic; above 1 the first one has more throughput, or a longer "
        "latency. An interval that contains 1 shows no difference."
    )
    return ReportSection("paired ratios", text, (chart,), table)


def _goodput_rows(points: Sequence[Point]) -> list[tuple[str, ...]]:
    """What was compared by requests within an objective, at an offered rate: differences, as a share may be 0."""
    rows = []
    for pair in paired_goodputs(points):
        cells = [words.digits(figure) for figure in (pair.difference, *pair.interval)]
        verdict = str(pair.point.extra.get("verdict", "-")) if pair.decided else "-"
        rows.append((pair.name, "goodput: difference in requests/s", *cells, in_words(verdict, "goodput")))
    return rows


def _verdict(pair: PairedRatio) -> str:
    """What the comparison concluded, of the figure that decided it."""
    decided = pair.point.extra.get("by") == pair.of
    return in_words(str(pair.point.extra.get("verdict", "-")), pair.of) if decided else "-"


def _ends(around: Interval | None) -> tuple[str, str]:
    return ("-", "-") if around is None else (words.digits(around[0], 4), words.digits(around[1], 4))


@dataclass(frozen=True)
class MachineBest:
    """The best trusted point of a system on a machine, and the roofs of its devices together."""

    kind: CurveKind
    point: Point
    bytes_per_s: float
    flops: float


def machines(gathered: Gathered) -> ReportSection | None:
    """What each machine gives for its roofs: the ratio of throughputs divided by the ratio of roofs. None where no
    traffic was measured on two machines."""
    rows: list[tuple[str, ...]] = []
    shares: list[float] = []
    for (preset, sha256), points in gathered.traffics().items():
        best = _best(points)
        shares += [share for each in best if (share := words.share(each.point)) is not None]
        for base in best[:1]:
            rows += [
                (traffic_name(preset, sha256), *_worth(base, each))
                for each in best[1:]
                if each.kind.place != base.kind.place
            ]
    if not rows:
        return None
    text = (
        "The best trusted point of each system on each machine, against the first machine. Worth is the ratio of "
        "throughputs divided by the ratio of the roofs that bound the points: 1 means that the machine gives as much "
        "for its roof as the first one does. Roofs are the measured ones where both machines have them, else those of "
        "the data sheets."
    )
    if len(shares) > 1 and all(share > 0 for share in shares):
        harmonic = len(shares) / sum(1 / share for share in shares)
        text += f" The harmonic mean of the best shares of the limit is {words.percent(harmonic)}."
    headings = ("traffic", "system", "against", "throughput", "memory roof", "compute roof", "bound", "worth")
    return ReportSection("what each machine gives for its roofs", text, (), Table(headings, tuple(rows)))


def _best(points: Sequence[Point]) -> list[MachineBest]:
    best: dict[CurveKind, Point] = {}
    for point in points:
        rate = words.metric(point, words.REQUESTS)
        kind = kind_of(point)
        if (
            rate
            and words.trusted(point)
            and (kind not in best or rate > (words.metric(best[kind], words.REQUESTS) or 0))
        ):
            best[kind] = point
    return [MachineBest(kind, point, *_roofs(point, True)) for kind, point in best.items()]


def _roofs(point: Point, measured: bool) -> tuple[float, float]:
    """(bytes, operations) a second of all devices of a point; 0 where they are not known."""
    if not point.devices:
        return 0.0, 0.0
    device, count = point.devices[0], devices(point)
    if measured:
        return device.measured_bytes_per_s * count, device.measured_flops * count
    return device.sheet_bytes_per_s * count, device.sheet_flops * count


def _worth(base: MachineBest, other: MachineBest) -> tuple[str, ...]:
    throughput = ratio([other.point], [base.point], words.REQUESTS)
    pairs = [_roofs(each.point, True) for each in (other, base)]
    if not all(rate for pair in pairs for rate in pair):
        pairs = [_roofs(each.point, False) for each in (other, base)]
    memory, compute = (above / below if above and below else None for above, below in zip(*pairs, strict=True))
    bound = base.point.limit.bound if base.point.limit is not None else ""
    roof = {"memory": memory, "compute": compute}.get(bound)
    assert throughput is not None, "the best points have a rate"
    worth = throughput.value / roof if roof else None
    text = words.with_interval(throughput.value, throughput.interval)
    figures = (words.digits(memory), words.digits(compute), bound or "-", words.digits(worth))
    return f"{other.kind.system}, {other.kind.place}", f"{base.kind.system}, {base.kind.place}", text, *figures
