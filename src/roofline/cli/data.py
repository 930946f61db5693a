"""roofline data: what a training run reads."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from roofline.train.order import Order

Folder = Annotated[
    Path, typer.Argument(help="A folder with order.json and receipts.jsonl, as a training run writes it.")
]


def verify_order(a: Folder, b: Folder) -> None:
    """Prove that two runs saw the same samples in the same order, or name the first that differs.

    Each run's receipts are first checked against its own order. Exits with 1 where anything differs.
    """
    from roofline.train.receipts import compare, read, verify

    runs = read(a), read(b)
    for folder, run in zip((a, b), runs, strict=True):
        wrong = verify(run)
        if wrong is not None:
            print(f"{folder}: the receipt of step {wrong} is not that of its order: the run computed something else")
            raise typer.Exit(1)
    found = compare(*runs)
    lengths = " and ".join(f"{len(run.receipts):,}" for run in runs)
    if found.step is None:
        print(f"the same samples in the same order in all {found.steps:,} steps that both took ({lengths})")
        return
    print(f"the runs differ from step {found.step} on ({lengths} steps)")
    if found.sample is not None:
        place, *samples = found.sample
        for folder, run, sample in zip((a, b), runs, samples, strict=True):
            print(f"{folder}: place {place} of that batch is {_named(run.order, sample)}")
    raise typer.Exit(1)


def _named(order: "Order", sample: int) -> str:
    if sample < 0:
        return "empty: its batch is shorter"
    stream, shard, place = order.place(sample)
    return f"sample {sample}: stream {stream}, shard {shard}, number {place} in it"
