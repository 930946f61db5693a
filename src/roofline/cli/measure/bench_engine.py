"""roofline bench engine: the engine's speed on the peers' workloads, beside the limit of this chip."""

from collections.abc import Sequence
from typing import Annotated, Literal

from roofline.backends.options import DEFAULT_MODEL
from roofline.cli.measure.timed import TimedLoad
from roofline.cli.options import AsJson, Draft, ModelArgument
from roofline.cli.output import console, plain_table, print_json, print_table
from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonObject
from roofline.common.options import Option, declared
from roofline.engine.config import EngineConfig


def command(
    load: TimedLoad,
    model: ModelArgument = DEFAULT_MODEL,
    as_json: AsJson = False,
    serve: Annotated[bool, Option("Run the serve rows, which take longest.")] = True,
    rows: Annotated[str | None, Option("Only rows whose key contains one of these, with commas.")] = None,
    speculate: Annotated[Literal["off", "ngram", "draft", "mtp"], declared(EngineConfig)["speculate"]] = "off",
    draft: Draft = None,
    speculate_tokens: Annotated[int, declared(EngineConfig)["speculate_tokens"]] = 4,
) -> None:
    """Time prefill, decode and serving. Prefix cache and speculation are off; every repeat is recorded.

    With --speculate, time instead answers about natural texts, with and without it in turn.
    """
    names = None if rows is None else [part.strip() for part in rows.split(",") if part.strip()]
    if speculate == "off":
        from roofline.bench.engine import bench_engine

        if draft is not None:
            raise ConfigError("--draft MODEL needs --speculate draft")
        record, show = bench_engine(model, names, serve=serve, load=load), _show
    else:
        from roofline.bench.speculation import bench_speculation

        if (speculate == "draft") != (draft is not None):
            raise ConfigError("speculating with a draft model needs both --speculate draft and --draft MODEL")
        record = bench_speculation(model, speculate, names, draft=draft, tokens=speculate_tokens, load=load)
        show = _show_speculation
    print_json(record) if as_json else show(record)


def _show_speculation(record: JsonObject) -> None:
    rows = []
    for name, row in record["rows"].items():
        accepted = "-" if row["acceptance"] is None else f"{row['acceptance']:.0%}"
        rates = f"{record[name]:.1f}", f"{max(row['without_tok_s']):.1f}", f"{row['ratio']:.2f}"
        counts = accepted, str(row["drafted"]), f"{row['tokens_per_step']:.2f}", str(row["held"])
        rows.append([name.removesuffix("_out_tok_s"), *rates, *counts])
    headings = ("row", "tok/s", "without", "ratio", "accepted", "of drafted", "tokens/step", "held")
    how, turns = record["speculation"], record["repeats"]["in_turn"]
    _print(record, headings, rows, f"{how['mode']}, up to {how['tokens']} tokens; best of {turns}; the ids are equal")


def _show(record: JsonObject) -> None:
    rows = []
    for name, row in record["rows"].items():
        repeats = " ".join(f"{rate:.1f}" for rate in row["tok_s"])
        moved = f"{row['bytes_per_token'] / 1e6:.1f}", f"{row['gb_s']:.1f}", f"{row['read_share']:.1%}"
        share = f"{row['share_of_roof']:.1%}"
        rates = name.removesuffix("_tok_s"), f"{record[name]:.1f}", repeats
        rows.append([*rates, *moved, f"{row['gop_s']:.0f}", share])
    headings = ("row", "tok/s", "all repeats", "MB/token", "GB/s", "of reads", "Gop/s", "share of roof")
    notes = [f"loaded in {record['load_s']:.2f} s; prefix cache and speculation are off; roofs as beside each row"]
    for name, row in record["rows"].items():
        if row["correction"]:
            notes.append(f"{name.removesuffix('_tok_s')}: {row['correction']}")
    _print(record, headings, rows, "\n".join(notes))


def _print(record: JsonObject, headings: Sequence[str], rows: Sequence[Sequence[str]], notes: str) -> None:
    """What was timed, the table, and what its figures are."""

    chosen, out = record["chosen"], console()
    if "device" in chosen:
        out.print(f"{record['model']} on {chosen['device']}")
    else:
        chip = record["machine"]["chip"]
        out.print(f"{record['model']} on {chip}: isa {chosen['isa']}; threads {chosen['threads']}")
    print_table(out, plain_table(headings, rows))
    out.print(notes)
