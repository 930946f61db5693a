"""What `roofline plan --fleet` prints: each pair of policies, and what was assumed."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.cli.output import console, print_json, print_table, ruled_table
from roofline.common.json_types import JsonObject
from roofline.common.units import human_rate, human_seconds

if TYPE_CHECKING:
    from roofline.bench.plan.fleet.figures import FleetFigures, Times
    from roofline.bench.plan.fleet.fleet import FleetPlan

COLUMNS = (
    *("routing", "scaling", "replicas", "used", "tok/s", "TTFT p50", "TTFT p95", "TTFT p99", "TPOT p50", "TPOT p95"),
    *("refused", "resent", "hits"),
)


def run(path: Path, as_json: bool, out: Path | None) -> None:
    """Simulate the fleet of a file and print what it did."""
    from roofline.bench.plan.fleet.fleet import plan_fleet
    from roofline.bench.plan.fleet.spec import read_spec

    plan = plan_fleet(read_spec(path), lambda text: print(text, file=sys.stderr, flush=True))
    print_json(record(plan), indent=1) if as_json else show(plan)
    if out is not None:
        from roofline.bench.plan.fleet.points import points_of
        from roofline.bench.results.store import append_points
        from roofline.common.units import now_utc

        append_points(points_of(plan, f"fleet {now_utc()}"), out)


def show(plan: "FleetPlan") -> None:
    """Print the figures of a fleet for people."""
    from roofline.bench.plan.assumptions import in_words

    out, spec = console(highlight=False, markup=False), plan.spec
    chip = plan.arrangement.place.name
    out.print(
        f"{spec.name}: {spec.model.name} on replicas of {spec.model.devices} x {chip}, {spec.least:,} to {spec.most:,}"
    )
    prices = ("USD/Mtok",) if spec.price is not None else ()
    table = ruled_table(None, (*COLUMNS, *prices), ("routing", "scaling"), padding=1)
    for figures in plan.figures:
        table.add_row(*_row(figures))
    print_table(out, table, keys=2)
    first = plan.figures[0]
    wall = sum(figures.wall_seconds for figures in plan.figures)
    out.print(
        f"{human_seconds(first.seconds)} of the fleet, {first.requests:,} requests each, simulated in {wall:.1f} s "
        f"({_method(plan)})",
        style="dim",
    )
    out.print(f"assumed: {in_words(plan.calibration)} ({plan.calibration.source})", style="dim")


def _method(plan: "FleetPlan") -> str:
    if plan.service is None:
        return "every replica with the real scheduler"
    return "replicas as a model that was fitted to runs of the real scheduler"


def _row(figures: "FleetFigures") -> list[str]:
    least, most = figures.least_replicas, figures.most_replicas
    replicas = f"{figures.replicas:,.0f}" + (f" ({least:,}-{most:,})" if least < most else "")
    ttft = [human_seconds(figures.ttft.percentile(percent)) for percent in (50, 95, 99)]
    tpot = [human_seconds(figures.tpot.percentile(percent)) for percent in (50, 95)]
    counts = f"{figures.refused:,}", f"{figures.resent:,}", f"{figures.hits:.0%}" if figures.hits else "-"
    rate = human_rate(figures.tokens_per_s, "").removesuffix("/s")
    price = [] if figures.usd_per_mtok is None else [f"{figures.usd_per_mtok:.2f}"]
    return [figures.routing, figures.scaling, replicas, f"{figures.used:.0%}", rate, *ttft, *tpot, *counts, *price]


def record(plan: "FleetPlan") -> JsonObject:
    """The figures as plain data."""
    from dataclasses import asdict

    return {
        "name": plan.spec.name,
        "model": plan.spec.model.name,
        "chip": plan.arrangement.place.name,
        "devices": plan.spec.model.devices,
        "assumed": asdict(plan.calibration),
        "policies": [_figures(figures) for figures in plan.figures],
    }


def _figures(figures: "FleetFigures") -> JsonObject:
    names = (
        *("routing", "scaling", "method", "seconds", "requests", "answered", "refused", "resent", "tokens", "used"),
        *("replicas", "least_replicas", "most_replicas", "started", "failures", "hits", "wall_seconds", "usd"),
    )
    plain = {name: getattr(figures, name) for name in names}
    return {
        **plain,
        "usd_per_mtok": figures.usd_per_mtok,
        "ttft_s": _times(figures.ttft),
        "tpot_s": _times(figures.tpot),
    }


def _times(times: "Times") -> JsonObject:
    return {"mean": times.mean, "n": times.count, **{f"p{at}": times.percentile(at) for at in (50, 90, 95, 99)}}
