"""The roofline chart: what each point computes for each byte that it has to read, and how fast, under the roofs."""

import math

from roofline.bench.report import words
from roofline.bench.report.chart import Axis, Chart, Mark, ReportSection, Series, Table
from roofline.bench.report.gather import Gathered
from roofline.bench.report.throughput import devices, note
from roofline.bench.results.point import Device, Limit, Point
from roofline.common.units import human_rate

TERA = 1e12
ALIKE = 0.1  # by which roofs differ that are drawn as one


def section(gathered: Gathered) -> ReportSection | None:
    """None where no point has a limit."""
    places = [(point, each) for point in gathered.points if (each := _place(point)) is not None]
    if not places:
        return None
    max_x = max(x for _, (x, _) in places)
    least = min(x for _, (x, _) in places)
    series: list[Series] = []
    rows: list[tuple[str, ...]] = []
    for number, place in enumerate(gathered.places):
        devices_here = _devices(gathered, place)
        for at, (device, systems) in enumerate(devices_here):
            title = [place] * (len(gathered.places) > 1) + [", ".join(systems)] * (len(devices_here) > 1)
            series += _roofs(device, " ".join(title), 7 - (number + at) % 8, (least, max_x))
    for kind, points in gathered.curves(point for point, _ in places).items():
        marks = []
        for point in points:
            x, y = _place(point) or (0.0, 0.0)
            label = ""
            if point in (points[0], points[-1]):  # others have their tooltip, and the table
                label = f"{words.load_name(point)} {words.percent(words.share(point))}"
            marks.append(Mark(x=x, y=y / TERA, note=note(point), label=label, trusted=words.trusted(point)))
            rows.append(
                (
                    gathered.name(kind), words.load_name(point), words.digits(x), human_rate(y, "op"),
                    *_both_shares(point.limit),
                )
            )  # fmt: skip
        series.append(Series(name=gathered.name(kind), marks=tuple(marks), look=gathered.kinds[kind], kind="dots"))
    chart = Chart(
        title="rooflines",
        x=Axis(title="operations for each byte that is read", log=True),
        y=Axis(title="Tera-operations/s", log=True),
        series=tuple(series),
    )
    text = (
        "Each point lies under the roof that bounds it: the slanted part is memory, at the size of the model, the "
        "level part arithmetic, in the numbers that the model is mostly multiplied in. The "
        "roof by the data sheet is what its maker prints; the measured one is what loops of ours reached on the device."
    )
    headings = ("system", "load", "operations/byte", "reached", "of measured roof", "of data sheet", "bound")
    return ReportSection("rooflines", text, (chart,), Table(headings, tuple(rows)))


def _place(point: Point) -> tuple[float, float] | None:
    """(operations for each byte, operations a second of one device), None where the limit is not known."""
    limit, share = point.limit, words.share(point)
    if limit is None or not share or limit.seconds <= 0 or limit.flops <= 0:
        return None
    read = limit.weight_bytes + limit.kv_bytes
    if read <= 0:
        return None
    return limit.flops / read, limit.flops * share / limit.seconds / devices(point)


def _devices(gathered: Gathered, place: str) -> list[tuple[Device, list[str]]]:
    """The device of a machine as the newest point of each system there describes it, with the roofs that bound this
    system; systems whose roofs are alike share one, and are named with it."""
    out: list[tuple[Device, list[str]]] = []
    for kind, points in gathered.curves(point for point in gathered.points if point.devices).items():
        if kind.place != place:
            continue
        device = max(points, key=lambda point: point.started).devices[0]
        for other, systems in out:
            if _alike(device, other):
                systems.append(kind.system)
                break
        else:
            out.append((device, [kind.system]))
    return out


def _alike(one: Device, other: Device) -> bool:
    """Whether the roofs of two measurements are the same ones, but for what measurements differ by."""
    names = ("measured_flops", "measured_bytes_per_s", "sheet_flops", "sheet_bytes_per_s")
    return all(math.isclose(getattr(one, name), getattr(other, name), rel_tol=ALIKE) for name in names)


def _roofs(device: Device, place: str, look: int, span: tuple[float, float]) -> list[Series]:
    """The roofs of one device of a machine, as far as they are known."""
    kinds = (
        ("measured roof", device.measured_bytes_per_s, device.measured_flops, False),
        ("data sheet", device.sheet_bytes_per_s, device.sheet_flops, True),
    )
    out = []
    for name, read, flops, dashed in kinds:
        if not read:
            continue
        low, high = span[0] / 3, span[1] * 3
        ridge = flops / read if flops else high
        places = [(low, low * read), (min(max(ridge, low), high), min(ridge, high) * read)]
        if ridge < high:
            places.append((high, flops))
        marks = tuple(Mark(x=x, y=y / TERA) for x, y in places)
        rates = f"{human_rate(read, 'B')}" + (f", {human_rate(flops, 'op')}" if flops else "")
        title = " ".join(filter(None, (place, name)))
        out.append(Series(name=f"{title} ({rates})", marks=marks, look=look, kind="line", dashed=dashed))
    return out


def _both_shares(limit: Limit | None) -> tuple[str, str, str]:
    if limit is None:
        return "-", "-", "-"
    return words.percent(limit.share_of_measured), words.percent(limit.share_of_sheet), limit.bound
