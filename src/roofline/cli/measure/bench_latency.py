"""roofline bench latency: what each technique brings to prefill and to decoding, beside the limit of this chip."""

import json
import sys
from pathlib import Path
from typing import Annotated

from roofline.bench.latency.options import LatencyOptions
from roofline.cli.options import AsJson, Threads
from roofline.cli.output import check_output, console, print_json, print_table, ruled_table
from roofline.common.json_types import JsonObject
from roofline.common.options import Option
from roofline.common.units import human_seconds

COLUMNS = ("first", "TTFT", "TPOT", "latency", "low", "high", "vs eager", "of limit")


def command(
    options: LatencyOptions,
    explain: Annotated[bool, Option("Say what each rung is for, and run nothing.")] = False,
    threads: Threads = None,
    as_json: AsJson = False,
    out: Annotated[Path | None, Option("Also write the record into a file.", flags=("--out", "-o"))] = None,
) -> None:
    """Time prefill and decoding with one technique after the other: latency = TTFT + TPOT x (n - 1)."""
    if explain:
        rungs = _explain(options)
        print_json(rungs) if as_json else _show_rungs(rungs)
        return
    from roofline.bench.latency.grid import bench_latency
    from roofline.common.files import write_atomically

    def keep(record: JsonObject) -> None:
        """Write what is measured by now, or print it where it cannot be written."""
        try:
            if out is not None:
                write_atomically(out, json.dumps(record, indent=1) + "\n")
        except OSError:
            print_json(record)
            raise

    check_output(out)
    record = bench_latency(
        options,
        threads=threads,
        tell=lambda text: print(text, file=sys.stderr, flush=True),
        keep=keep,
    )
    print_json(record) if as_json else show(record)


def _explain(options: LatencyOptions) -> dict[str, JsonObject]:
    from roofline.bench.latency import grid as latency
    from roofline.bench.latency import ladder, runners
    from roofline.bench.peers.available import here as look

    here = look(options.device)
    subject = latency.subject_of(options.preset, options.layers, latency.DEFAULTS[here.device])
    rungs = ladder.rungs(options.rungs)
    return {rung.name: ladder.explained(rung, runners.why_missing(rung, subject, here)) for rung in rungs}


def _show_rungs(rungs: dict[str, JsonObject]) -> None:

    out = console()
    for name, rung in rungs.items():
        out.print(f"[bold]{name}[/] helps {' and '.join(dict.fromkeys(rung['phases']))}", highlight=False)
        out.print(f"  {rung['why']}", highlight=False, markup=False)
        if "missing" in rung:
            out.print(f"  not here: {rung['missing']}", style="yellow", highlight=False, markup=False)


def show(record: JsonObject) -> None:
    """A table for each cell, then what is missing, and what the figures are."""

    out = console(highlight=False, markup=False)
    device, model = record["device"], record["model"]
    out.print(f"{model['name']} in {model['dtype']}, random weights, on {device['name']}")
    if record["smaller"]:
        out.print(record["smaller"])
    for cell in record["cells"]:
        out.print()
        limit = cell["limit"]
        least = f"{limit['of']} take at least {human_seconds(limit['seconds'])}, bound by {limit['bound']}"
        out.print(f"{cell['cell']}: {least}", style="bold")
        table = ruled_table(None, ("ms", *COLUMNS), left_aligned=("ms",))
        for name, row in cell["rungs"].items():
            table.add_row(name, *_figures(row))
        print_table(out, table)
        for name, why in cell["failed"].items():
            out.print(f"{name} failed: {why}", style="yellow")
        for name, row in cell["rungs"].items():
            if "no_share" in row:
                out.print(f"{name}: {row['no_share']}", style="yellow")
    out.print()
    for name, rung in record["rungs"].items():
        if "missing" in rung:
            out.print(f"{name} is missing: {rung['missing']}")
    for name, text in record["definitions"].items():
        out.print(f"{name}: {text}", style="dim")
    out.print(f"roofs: {record['cells'][-1]['roofs']['source']}", style="dim")


def _figures(row: JsonObject) -> list[str]:
    latency, gain = row["latency"], row.get("speedup")
    seconds = [row["first_s"], row["ttft"]["median"], row["tpot"] and row["tpot"]["median"], *latency.values()]
    return [
        *("" if value is None else _ms(value) for value in seconds),
        "" if gain is None else f"{gain['median']:.2f}",
        "-" if row["share"] is None else f"{row['share']:.1%}",
    ]


def _ms(seconds: float) -> str:
    """Three digits, more where they are whole."""
    ms = 1e3 * seconds
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"
