"""roofline bench recompute: raw events in the definitions of another tool."""

from pathlib import Path
from typing import Annotated

from roofline.cli.options import AsJson
from roofline.cli.output import console, plain_table, print_json
from roofline.cli.parser import Argument
from roofline.common.options import Option


def command(
    events: Annotated[Path, Argument("A file of raw events, as --events keeps them.")],
    dialect: Annotated[
        str,
        Option("ours, vllm, guidellm, aiperf, inference-perf or mlperf.", flags=("--as",)),
    ] = "ours",
    as_json: AsJson = False,
) -> None:
    """Compute the figures of a run again, as another tool defines them, and say what differs from ours."""
    import msgspec

    from roofline.bench.load.events import read_events
    from roofline.bench.results.dialects import DIALECTS, recompute
    from roofline.bench.results.metrics import figures

    run = read_events(events)
    metrics = figures(run) if dialect == "ours" else recompute(run, dialect)
    notes = () if dialect == "ours" else DIALECTS[dialect].notes
    if as_json:
        print_json({"as": dialect, "metrics": msgspec.to_builtins(metrics), "notes": list(notes)})
        return
    rows = []
    for name, figure in metrics.items():
        values = [figure.mean if figure.value is None else figure.value, figure.p50, figure.p90, figure.p95, figure.p99]
        cells = ["-" if value is None else f"{value:.3f}" for value in values]
        rows.append([name, figure.unit, str(figure.n), *cells, figure.definition])
    out = console()
    out.print(plain_table(("metric", "unit", "n", "mean", "p50", "p90", "p95", "p99", "definition"), rows))
    for note in notes:
        out.print(f"* {note}", highlight=False)
    if notes:
        out.print(f"as read in {DIALECTS[dialect].read}", style="dim", highlight=False)
