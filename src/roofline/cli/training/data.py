"""roofline data: what a training run reads."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roofline.cli.options import DEFAULT_MODEL

if TYPE_CHECKING:
    from roofline.train.data.order import Order

Folder = Annotated[
    Path, typer.Argument(help="A folder with order.json and receipts.jsonl, as a training run writes it.")
]


def tokenize(
    sources: Annotated[list[Path], typer.Argument(help="Text, .jsonl and .parquet files, or folders of them.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="A new folder for the shards.")],
    tokenizer: Annotated[str, typer.Option(help="The model whose tokenizer it is: a name or a path.")] = DEFAULT_MODEL,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a row: the context a model is trained with.")] = 2048,
    column: Annotated[str, typer.Option(help="Where .jsonl and .parquet have their text.")] = "text",
    end: Annotated[bool, typer.Option("--end/--no-end", help="Put the end token behind each document.")] = True,
    compression: Annotated[str | None, typer.Option(help="zstd, gz or bz2, with a level (zstd:7) or without.")] = None,
) -> None:
    """Write texts as shards of token rows (MosaicML's MDS format), documents packed, their boundaries kept."""
    import time

    from roofline import bundle
    from roofline.train.data import tokenize as shards

    words, _ = bundle.load_text_of(tokenizer)
    started = time.monotonic()
    texts = shards.documents(sources, column)
    done = shards.tokenize(texts, out, words, tokenizer, length, end=end, compression=compression)
    seconds = time.monotonic() - started
    print(
        f"{out}: {done.rows:,} rows of {done.length} tokens from {done.documents:,} documents in {seconds:.1f} s "
        f"({done.tokens / seconds:,.0f} tokens/s); {done.left_out:,} tokens behind the last whole row are left out"
    )


def learn_vocabulary(
    sources: Annotated[list[Path], typer.Argument(help="Text, .jsonl and .parquet files, or folders of them.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="A new folder for the tokenizer.")],
    size: Annotated[int, typer.Option(help="Tokens it may have.")] = 8192,
    column: Annotated[str, typer.Option(help="Where .jsonl and .parquet have their text.")] = "text",
) -> None:
    """Learn a byte-level BPE tokenizer from texts, for `data tokenize` and for a model of your own."""
    from roofline.train.data import tokenize as shards
    from roofline.train.data.learn_vocabulary import learn

    print(f"{out}: {learn(shards.documents(sources, column), out, size):,} tokens")


def verify_order(a: Folder, b: Folder) -> None:
    """Prove that two runs saw the same samples in the same order, or name the first that differs.

    Each run's receipts are first checked against its own order. Exits with 1 where anything differs.
    """
    from roofline.train.data.receipts import compare, read, verify

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
