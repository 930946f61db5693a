"""roofline train card: throughput cards side by side."""

from collections.abc import Sequence
from typing import Annotated

from roofline.cli.options import AsJson
from roofline.cli.output import console, plain_table, print_json, print_table
from roofline.cli.parser import Argument
from roofline.common.json_types import JsonObject
from roofline.common.options import Option


def _conventions(_: str) -> list[str]:
    from roofline.train.report.flops import ADAPTED, CONVENTIONS

    return list(dict.fromkeys((*CONVENTIONS, *ADAPTED)))


Convention = Annotated[str, Option("How FLOPs are counted.", choices=_conventions)]


def command(
    places: Annotated[list[str], Argument("Folders of runs, cards, or records of `roofline bench train`.")],
    convention: Annotated[
        str | None, Option("How FLOPs are counted; default: foundry, of adapters lora.", choices=_conventions)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what runs reached, in the columns of LLM Foundry's tables; cards that count otherwise are refused."""
    from roofline.train.report import cards
    from roofline.train.report.flops import usual

    records = [cards.read(place) for place in places]
    cards.check(records, places)
    print_json(records) if as_json else show(records, places, convention or usual(records[0]["flops"]))


def show(records: Sequence[JsonObject], names: Sequence[str], convention: str) -> None:
    """A line for each figure and a column for each card: twenty columns fit no terminal."""

    from roofline.train.report.cards import row

    columns = [row(card, convention) for card in records]
    out = console()
    print_table(out, plain_table(("", *names), [[name, *(column[name] for column in columns)] for name in columns[0]]))
    out.print(f"FLOPs as {convention}: {records[0]['conventions'][convention]}", highlight=False)
    for card, name in zip(records, names, strict=True):
        first, last = card["speed"]["steps"]
        left_out = card["speed"]["left_out"]["steps"]
        against = card["peak"]["source"] if card["peak"] else f"no MFU: {card['no_peak']}"
        out.print(f"{name}: steps {first} to {last}, the {left_out} before left out; {against}", highlight=False)
