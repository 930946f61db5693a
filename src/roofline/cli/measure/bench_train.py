"""roofline bench train: the training loop's speed on random rows, as a throughput card."""

from pathlib import Path
from typing import Annotated

import typer

from roofline.cli.options import AsJson


def command(
    what: Annotated[
        str, typer.Argument(help="A preset (mpt-125m, llama-3.2-1b, ...), or a YAML file of a run.")
    ] = "mpt-125m",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps that count.")] = 10,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Steps before them.")] = 3,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="KEY.KEY=VALUE of the configuration; may be repeated.")
    ] = None,
    nproc: Annotated[int, typer.Option(min=1, help="Processes on this machine, which share each step.")] = 1,
    convention: Annotated[str, typer.Option(help="Of FLOPs: foundry, torchtitan or matmul.")] = "foundry",
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also write the record into a file.")] = None,
) -> None:
    """Time the training loop on random rows: no data is needed, nothing is kept but the record."""
    import json

    from roofline.bench.train import bench_train
    from roofline.cli.training.card import known, show

    known(convention)
    record = bench_train(what, changes or [], steps=steps, warmup=warmup, processes=nproc)
    if out is not None:
        out.write_text(json.dumps(record, indent=1) + "\n")
    if as_json:
        print(json.dumps(record))
    else:
        show([record["card"]], [what], convention)
        print(f"again: {record['command']}")
