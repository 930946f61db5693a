"""Points of one or several files, merged: which machines, which traffic, which systems; impossible points refused."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from roofline.bench.load.events import Events, read_events
from roofline.bench.report import words
from roofline.bench.results.collected import (
    DRAWN,
    MARGIN_SECONDS,
    CollectedSeries,
    end_of,
    read_collected,
    series_folder,
    start_of,
)
from roofline.bench.results.point import Point
from roofline.bench.results.store import read_points
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.files import cause_of
from roofline.common.units import human_bytes, human_rate, human_seconds
from roofline.hardware.roofs import TOLERANCE

MOST_POINTS = 500  # of a report: the page of more would not be read, and grow beyond 2 MB


@dataclass(frozen=True)
class CurveKind:
    """What points of one curve have in common: system and machine. Their names, as a reader sees them."""

    system: str
    place: str


@dataclass(frozen=True)
class CollectedRun:
    """Points that one command measured under load, and what the servers' metrics said meanwhile."""

    name: str
    points: list[Point]
    series: list[CollectedSeries]


@dataclass
class Gathered:
    """Points that reports are made of, in the order of their load.

    points: without the impossible ones; kinds: the curves among them, each with its number, by which it has the same
    colour and marker in every chart; refused: a sentence with the arithmetic for each impossible point; events: raw
    events by the id of their point; notes: what is missing; collected: runs beside which servers' metrics were kept.
    """

    points: list[Point]
    kinds: dict[CurveKind, int]
    refused: list[str] = field(default_factory=list)
    events: dict[str, Events] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    collected: list[CollectedRun] = field(default_factory=list)

    @property
    def places(self) -> list[str]:
        """The machines, in the order of their first curve."""
        return list(dict.fromkeys(kind.place for kind in self.kinds))

    def name(self, kind: CurveKind) -> str:
        """A curve's name: with its machine where there are several."""
        return kind.system if len(self.places) == 1 else f"{kind.system}, {kind.place}"

    def traffics(self) -> dict[tuple[str, str], list[Point]]:
        """Points by (preset, hash of the traffic): only points of one traffic may share a chart."""
        groups: dict[tuple[str, str], list[Point]] = {}
        for point in self.points:
            if point.load is not None and point.workload is not None:
                groups.setdefault((point.preset, point.workload.sha256), []).append(point)
        return groups

    def curves(self, points: Iterable[Point]) -> dict[CurveKind, list[Point]]:
        """These points by system and machine; a closed loop and scheduled arrivals are not told apart here."""
        groups: dict[CurveKind, list[Point]] = {}
        for point in points:
            groups.setdefault(kind_of(point), []).append(point)
        return groups


def kind_of(point: Point) -> CurveKind:
    return CurveKind(words.system_name(point), words.place(point))


def gather(paths: Sequence[Path]) -> Gathered:
    """The points of these files, each once, with the raw events that lie beside them.

    Raises ConfigError where a file is no file of results, or has no point; what is wrong with events is noted instead.
    """
    events: dict[str, Events] = {}
    notes: list[str] = []
    points: dict[str, Point] = {}
    of_paths: dict[Path, set[str]] = {}
    for path in paths:
        measured = read_points(path)
        of_paths[path] = {point.id for point in measured}
        for point in measured:
            if point.id not in points:
                points[point.id] = point
                _read_events(point, path.parent, events, notes)
    if not points:
        names = ", ".join(map(str, paths))
        raise ConfigError(f"{names}: there is no point; measure some, for example with roofline bench curve")
    if len(points) > MOST_POINTS:
        raise ConfigError(
            f"{len(points):,} points are more than a report has room for ({MOST_POINTS:,}); name fewer files"
        )
    gathered = of_points(list(points.values()))
    gathered.events, gathered.notes = events, notes
    gathered.collected = [
        run for path, ids in of_paths.items() for run in _collected(path, gathered.points, ids, notes)
    ]
    return gathered


def of_points(points: Sequence[Point]) -> Gathered:
    """The same of points that are at hand, without events."""
    refused = [text for point in points if (text := impossible(point))]
    possible = sorted((point for point in points if not impossible(point)), key=_order)
    kinds = dict.fromkeys(kind_of(point) for point in possible)
    return Gathered(possible, {kind: number for number, kind in enumerate(kinds)}, refused)


def _order(point: Point) -> tuple[str, str, bool, str, float, str]:
    """By machine and system; of these, closed loops before scheduled arrivals; then by load, then by time."""
    load, names = point.load, (words.place(point), words.system_name(point))
    if load is None:
        return *names, False, "", 0.0, point.started
    amount = load.concurrency if load.arrivals in ("closed", "batch") else load.offered
    return *names, load.arrivals not in ("closed", "batch"), load.arrivals, amount or 0.0, point.started


def impossible(point: Point) -> str:
    """Why a point cannot be true, with the arithmetic; "" where it can."""
    limit = point.limit
    if limit is None:
        return ""
    shares = [("measured", limit.share_of_measured), ("data sheet's", limit.share_of_sheet)]
    beyond = [(which, share) for which, share in shares if share is not None and share > TOLERANCE]
    if not beyond:
        return ""
    which, share = beyond[0]
    reached = words.metric(point, words.TOKENS) or share * limit.tokens_per_s
    read = human_bytes(limit.weight_bytes + limit.kv_bytes)
    return (
        f"{words.system_name(point)} on {words.place(point)}, {words.load_name(point)}: {words.digits(reached)} "
        f"tokens/s were measured, and {words.digits(reached / share)} are possible at most by the {which} "
        f"roofs{_rates(point, which)}: {limit.flops:.3g} operations and {read} of weights, keys and values take "
        f"{human_seconds(limit.seconds)}, bound by {limit.bound}. That is {share:.0%} of the limit: something was not "
        f"read, not computed, or not counted as the point says."
    )


def _rates(point: Point, which: str) -> str:
    """The roofs of one device of the point, as far as it knows them."""
    if not point.devices:
        return ""
    device = point.devices[0]
    read, flops = device.measured_bytes_per_s, device.measured_flops
    if which != "measured":
        read, flops = device.sheet_bytes_per_s, device.sheet_flops
    rates = [human_rate(read, "B")] * bool(read) + [human_rate(flops, "op")] * bool(flops)
    return f" ({', '.join(rates)})" if rates else ""


def _collected(path: Path, points: Sequence[Point], ids: set[str], notes: list[str]) -> list[CollectedRun]:
    """The runs beside which series lie. points: of all files; ids: of those in this one."""
    folder = series_folder(path)
    if not folder.is_dir():
        return []
    runs: dict[str, list[Point]] = {}
    for point in points:
        if point.id in ids and point.load is not None:
            runs.setdefault(point.run, []).append(point)
    collected = []
    for name, measured in runs.items():
        begin, end = start_of(measured) - MARGIN_SECONDS, end_of(measured) + MARGIN_SECONDS
        try:
            series = read_collected(folder, DRAWN, begin, end, notes.append)
        except UnsupportedError as error:
            notes.append(f"no chart shows {folder}: {error}")
            break
        if series:
            collected.append(CollectedRun(name, sorted(measured, key=lambda point: start_of([point])), series))
    return collected


def _read_events(point: Point, folder: Path, events: dict[str, Events], notes: list[str]) -> None:
    """The events of a point, if it has any; else a note of what is wrong with them."""
    if point.events is None:
        return
    path = folder / point.events
    if not path.exists() and Path(point.events).exists():  # as older commands wrote it, from where they ran
        path = Path(point.events)
    where = f"{words.system_name(point)}, {words.load_name(point)}"
    try:
        data = path.read_bytes()
    except OSError as error:
        notes.append(f"{where}: its raw events are not at {path} ({cause_of(error)}), so no chart shows them")
        return
    if point.events_sha256 and hashlib.sha256(data).hexdigest() != point.events_sha256:
        notes.append(f"{where}: {path} does not hold the events that it was measured from, so no chart shows them")
        return
    try:
        events[point.id] = read_events(path)
    except ConfigError as error:
        notes.append(f"{where}: {error}")
