"""A report of measured points: which sections it has, in which order."""

from collections.abc import Sequence

from roofline.bench.report import cost, intensity, moments, ratios, replicas_over_time, throughput, words
from roofline.bench.report.chart import ReportSection, Table
from roofline.bench.report.gather import Gathered
from roofline.bench.report.page import Report
from roofline.bench.report.throughput import Slo
from roofline.bench.results.point import Point
from roofline.bench.results.unread import unread_in_words
from roofline.hardware.host_settings import in_words


def report(gathered: Gathered, title: str = "", slo: Slo | None = None, prices: cost.Prices | None = None) -> Report:
    """All that these points can show. prices: None leaves money out."""
    sections: list[ReportSection | None] = [*throughput.sections(gathered, slo or Slo())]
    sections += [ratios.forest(gathered), ratios.machines(gathered), intensity.section(gathered)]
    sections += moments.sections(gathered)
    sections += replicas_over_time.sections(gathered)
    sections += cost.sections(gathered, prices) if prices is not None else []
    sections += [_other_figures(gathered), _conditions(gathered), _definitions(gathered)]
    return Report(
        title=title or _title(gathered),
        about=_about(gathered),
        sections=tuple(section for section in sections if section is not None),
        refused=tuple(gathered.refused),
        notes=(*gathered.notes, *_doubts(gathered), *_unread(gathered)),
    )


def _title(gathered: Gathered) -> str:
    if not gathered.points:
        return "nothing that can be true"
    kinds = sorted({"planned" if words.planned(point) else "measured" for point in gathered.points})
    return f"{', '.join(dict.fromkeys(point.preset for point in gathered.points))} {' and '.join(kinds)}"


def _about(gathered: Gathered) -> str:
    if not gathered.points:
        return f"All points were refused: {len(gathered.refused)}."
    days = sorted({point.started[:10] for point in gathered.points})
    span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    parts = [f"{len(gathered.points)} point{'s' * (len(gathered.points) != 1)}", " and ".join(gathered.places), span]
    if gathered.refused:
        parts.insert(1, f"{len(gathered.refused)} refused")
    return " · ".join(parts)


def _doubts(gathered: Gathered) -> list[str]:
    """What a reader must know before believing the charts."""
    doubtful = [point for point in gathered.points if not words.trusted(point)]
    if not doubtful:
        return []
    reasons: dict[str, list[str]] = {}
    for point in doubtful:
        name = f"{words.system_name(point)}, {words.load_name(point)}"
        reasons.setdefault(words.doubt(point), []).append(name)
    return [f"In grey, because {reason}: {'; '.join(names)}." for reason, names in reasons.items()]


def _unread(gathered: Gathered) -> list[str]:
    """Of points whose servers had clients that did not read: how many, and what became of them."""
    return [
        f"{words.system_name(point)}, {words.load_name(point)}: {unread_in_words(point.unread)}. The figures are of "
        "the requests whose answers were read."
        for point in gathered.points
        if point.unread is not None
    ]


def _other_figures(gathered: Gathered) -> ReportSection | None:
    """Points without traffic, such as those of decode and of plans, by their figures."""
    in_charts = {id(point) for points in gathered.traffics().values() for point in points}
    points = [point for point in gathered.points if id(point) not in in_charts]
    rows = tuple(
        (
            words.system_name(point),
            f"{point.kind}, {point.preset}",
            name,
            words.with_interval(words.central(figure), figure.ci95),
            figure.unit,
            words.percent(words.share(point) if figure.unit == "tokens/s" else None),
            figure.definition,
        )
        for point in points
        for name, figure in point.metrics.items()
    )
    # A measurement that came to nothing is a result, too.
    empty = [point for point in points if not point.metrics]
    rows += tuple(
        (words.system_name(point), f"{point.kind}, {point.preset}", "; ".join(point.validity.flags), "-", "-", "-", "-")
        for point in empty
    )
    if not rows:
        return None
    headings = ("system", "what", "metric", "value", "unit", "of the limit", "definition")
    return ReportSection("other figures", "", (), Table(headings, rows))


def _conditions(gathered: Gathered) -> ReportSection | None:
    """What somebody needs to measure the same again, for each system on each machine."""
    if not gathered.points:
        return None
    rows = []
    for kind, points in gathered.curves(gathered.points).items():
        rows.append((gathered.name(kind), *_condition(points)))
    headings = ("system", "model", "machine", "software", "traffic", "fidelity")
    text = (
        "What was measured where. The grade of a point is A where a reader lacks nothing to measure the same again, "
        "and a letter lower for each of these that is missing: the server's version, a limit, a trusted client, five "
        "answers."
    )
    return ReportSection("how it was measured", text, (), Table(headings, tuple(rows)))


def _condition(points: Sequence[Point]) -> tuple[str, ...]:
    point = points[-1]
    host = point.host
    busy = max(point.host.load for point in points)
    settings = in_words(host.settings) if host.settings is not None else ""
    machine = f"{words.place(point)}; {host.chip}, {host.cores} cores, at most {busy:.1f} cores of other load"
    machine += f"; {settings}" if settings else ""
    traffic = "; ".join(
        dict.fromkeys(
            f"{point.workload.name} {point.workload.sha256[:8]}, {point.workload.requests} requests, prefix cache "
            f"{point.workload.prefix_cache}"
            for point in points
            if point.workload is not None
        )
    )
    probes = [point.fidelity for point in points if point.fidelity is not None]
    equal, sent = sum(probe.equal for probe in probes), sum(probe.probes for probe in probes)
    fidelity = f"{equal} of {sent} probes answered as when idle" if probes else "no probes"
    options = " ".join(f"{name}={value}" for name, value in point.system.options.items())
    model = " ".join(filter(None, (point.system.model, point.system.weight_formats, options)))
    return model or "-", machine, host.system or "-", traffic or "-", fidelity


def _definitions(gathered: Gathered) -> ReportSection | None:
    """How each metric is computed: tools give different things the same name."""
    loads: dict[tuple[str, str, str], dict[str, None]] = {}
    for point in gathered.points:
        for name, figure in point.metrics.items():
            loads.setdefault((name, figure.unit, figure.definition), {})[words.kind_of_load(point)] = None
    everything = {load for names in loads.values() for load in names}
    rows = [(*key, "all" if names.keys() == everything else ", ".join(names)) for key, names in loads.items()]
    several = len(everything) > 1
    headings = ("metric", "unit", "definition", *(["of"] if several else []))
    table = Table(headings, tuple(row if several else row[:-1] for row in rows))
    return ReportSection("definitions", "", (), table) if rows else None
