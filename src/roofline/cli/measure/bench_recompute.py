"""roofline bench recompute: raw events in the definitions of another tool."""

from pathlib import Path
from typing import Annotated

from roofline.cli.options import AsJson
from roofline.cli.output import console, plain_table, print_json, print_table
from roofline.cli.parser import Argument
from roofline.common.options import Option


def command(
    events: Annotated[
        Path,
        Argument(
            "A file of raw events, as --events keeps them, of `vllm bench serve --save-result --save-detailed`, of "
            "GuideLLM's JSON output, or of AIPerf (profile_export.jsonl or profile_export_aiperf.json)."
        ),
    ],
    dialect: Annotated[
        str,
        Option("ours, vllm, guidellm, aiperf, inference-perf or mlperf.", flags=("--as",)),
    ] = "ours",
    run: Annotated[
        int | None, Option("Which run of another tool's file that has several, from 1.", minimum=1, unit="run")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute the figures of a run again, as another tool defines them, and say what differs from ours.

    A figure that a file does not carry the moments for is absent, and named; so are requests that did not complete.
    """
    import msgspec

    from roofline.bench.results.dialects import DIALECTS, recompute
    from roofline.bench.results.metrics import counts
    from roofline.bench.results.recorded import read_run

    recorded = read_run(events, run)
    figures = recompute(recorded.events, dialect)
    metrics = {name: figure for name, figure in figures.items() if figure.n}
    absent = [name for name in figures if name not in metrics]
    notes = [*recorded.notes, *(() if dialect == "ours" else DIALECTS[dialect].notes)]
    if as_json:
        row = {
            "as": dialect,
            "requests": msgspec.to_builtins(counts(recorded.events)),
            "metrics": msgspec.to_builtins(metrics),
            "absent": absent,
            "notes": notes,
        }
        print_json({"written_by": recorded.tool, **row} if recorded.tool else row)
        return
    rows = []
    for name, figure in metrics.items():
        values = [figure.mean if figure.value is None else figure.value, figure.p50, figure.p90, figure.p95, figure.p99]
        cells = ["-" if value is None else f"{value:.3f}" for value in values]
        rows.append([name, figure.unit, str(figure.n), *cells, figure.definition])
    out = console()
    print_table(out, plain_table(("metric", "unit", "n", "mean", "p50", "p90", "p95", "p99", "definition"), rows))
    if absent:
        out.print(f"absent: {', '.join(absent)}", highlight=False)
    for note in notes:
        out.print(f"* {note}", highlight=False)
    if dialect != "ours":
        out.print(f"as read in {DIALECTS[dialect].read}", style="dim", highlight=False)
