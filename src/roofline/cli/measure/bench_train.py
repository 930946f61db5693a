"""roofline bench train: the training loop's speed on random rows, as a throughput card."""

import json
from pathlib import Path
from typing import Annotated

from roofline.cli.options import AsJson
from roofline.cli.output import check_output, print_json
from roofline.cli.parser import Argument
from roofline.cli.training.card import Convention
from roofline.common.options import Option


def command(
    what: Annotated[str, Argument("A preset (mpt-125m, llama-3.2-1b, ...), or a YAML file of a run.")] = "mpt-125m",
    steps: Annotated[int, Option("Steps that count.", minimum=1)] = 10,
    warmup: Annotated[int, Option("Steps before them.", minimum=0)] = 3,
    changes: Annotated[list[str] | None, Option("KEY.KEY=VALUE of the configuration.", flags=("--set",))] = None,
    nproc: Annotated[int, Option("Processes on this machine, which share each step.", minimum=1)] = 1,
    convention: Convention = "foundry",
    as_json: AsJson = False,
    out: Annotated[Path | None, Option("Also write the record into a file.", flags=("--out", "-o"))] = None,
) -> None:
    """Time the training loop on random rows: no data is needed, nothing is kept but the record."""
    from roofline.bench.train import bench_train
    from roofline.cli.training.card import show
    from roofline.common.files import write_atomically

    check_output(out)
    record = bench_train(what, changes or [], steps=steps, warmup=warmup, processes=nproc)
    if as_json:
        print_json(record)
    else:
        show([record["card"]], [what], convention)
        print(f"again: {record['command']}")
    if out is not None:
        write_atomically(out, json.dumps(record, indent=1) + "\n")
