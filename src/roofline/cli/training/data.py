"""roofline data: what a training run reads."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from roofline.backends.options import DEFAULT_MODEL
from roofline.cli.parser import Argument
from roofline.common.options import Option, Options, option

if TYPE_CHECKING:
    from collections import Counter

    from roofline.train.data.order import Order

Folder = Annotated[Path, Argument("A folder with order.json and receipts.jsonl, as a training run writes it.")]
Sources = Annotated[list[Path], Argument("Texts, JSON, CSV, Parquet and Arrow files, or folders of them.")]
Column = Annotated[str, Option("Where a record has its text; files that are text have none.")]


@dataclass(frozen=True)
class AroundOptions(Options):
    """What stands around each document."""

    end: bool = option(True, "Put the end token behind each document.")
    bos_text: str = option("", "Put before each document; special tokens in it count as such.")
    eos_text: str | None = option(None, "Put behind each document, in place of the end token.")


def tokenize(
    options: AroundOptions,
    sources: Sources,
    out: Annotated[Path, Option("A new folder for the shards.", flags=("--out", "-o"))],
    tokenizer: Annotated[str, Option("The model whose tokenizer it is: a name or a path.")] = DEFAULT_MODEL,
    length: Annotated[int, Option("Tokens of a row: the context a model is trained with.", minimum=2)] = 2048,
    column: Column = "text",
    compression: Annotated[str | None, Option("zstd, gz, bz2 or br, also with a level (zstd:7), or snappy.")] = None,
) -> None:
    """Write texts as shards of token rows (MosaicML's MDS format), documents packed, their boundaries kept."""
    from collections import Counter

    from roofline import bundle
    from roofline.train.data import tokenize as shards

    words, _ = bundle.load_text_of(tokenizer)
    started, unused, around = time.monotonic(), Counter[str](), shards.Around(options.bos_text, options.eos_text)
    texts = shards.documents(sources, column, unused)
    done = shards.tokenize(
        texts, out, words, tokenizer, length, end=options.end, around=around, compression=compression
    )
    seconds = time.monotonic() - started
    print(
        f"{out}: {done.rows:,} rows of {done.length} tokens from {done.documents:,} documents in {seconds:.1f} s "
        f"({done.tokens / seconds:,.0f} tokens/s); {done.left_out:,} tokens behind the last whole row are left out"
    )
    _tell_of_rest(sources, unused, done.empty)
    if words.vocabulary.prefix and not done.begin:
        first = "".join(words.vocabulary.spelling(token) or "" for token in words.vocabulary.prefix)
        print(f"the tokenizer begins a text with {first}, which no document has here: --bos-text '{first}' puts it")


def _tell_of_rest(sources: list[Path], unused: "Counter[str]", empty: int = 0) -> None:
    """Print what of the sources was not used."""
    from roofline.cli.training.told_data import told_of_unused
    from roofline.common.units import counted
    from roofline.train.data.record_files import skipped_files

    if empty:
        print(f"{counted(empty, 'text')} without a character {'was' if empty == 1 else 'were'} left out")
    for line in told_of_unused(unused, [path.name for source in sources for path in skipped_files(source)]):
        print(line)


def learn_vocabulary(
    sources: Sources,
    out: Annotated[Path, Option("A new folder for the tokenizer.", flags=("--out", "-o"))],
    size: Annotated[int, Option("Tokens it may have.")] = 8192,
    column: Column = "text",
) -> None:
    """Learn a byte-level BPE tokenizer from texts, for `data tokenize` and for a model of your own."""
    from collections import Counter

    from roofline.train.data import tokenize as shards
    from roofline.train.data.learn_vocabulary import learn

    unused = Counter[str]()
    print(f"{out}: {learn(shards.documents(sources, column, unused), out, size):,} tokens")
    _tell_of_rest(sources, unused)


def verify_order(a: Folder, b: Folder) -> int:
    """Prove that two runs saw the same samples in the same order, or name the first that differs.

    Each run's receipts are first checked against its own order. Exits with 1 where anything differs, or where a run of
    an older version did not record what its rows held.
    """
    from roofline.train.data.receipts import compare, read, verify

    runs = read(a), read(b)
    for folder, run in zip((a, b), runs, strict=True):
        wrong = verify(run)
        if wrong is not None:
            print(f"{folder}: the receipt of step {wrong} is not that of its order: the run computed something else")
            return 1
    comparison = compare(*runs)
    lengths = " and ".join(f"{len(run.receipts):,}" for run in runs)
    if comparison.step is None and comparison.unproven:
        print(
            f"not proven: the sample numbers agree in all {comparison.steps:,} steps that both took ({lengths}), but "
            f"of {comparison.unproven:,} of them a run of an older version recorded no digest of its rows: that both "
            "read the same data set cannot be told; a run that is repeated records them"
        )
        return 1
    if comparison.step is None:
        print(f"the same samples in the same order in all {comparison.steps:,} steps that both took ({lengths})")
        return 0
    print(f"the runs differ from step {comparison.step} on ({lengths} steps)")
    if comparison.sample is not None:
        place, *samples = comparison.sample
        for folder, run, sample in zip((a, b), runs, samples, strict=True):
            print(f"{folder}: place {place} of that batch is {_describe(run.order, sample)}")
    elif comparison.content:
        index = runs[0].order.difference(runs[1].order) or "the indexes do not tell them apart"
        print(f"the sample numbers agree, but not what their rows held: the data sets are others ({index})")
    return 1


def _describe(order: "Order", sample: int) -> str:
    if sample < 0:
        return "empty: its batch is shorter"
    stream, shard, place = order.place(sample)
    return f"sample {sample}: stream {stream}, shard {shard}, number {place} in it"
