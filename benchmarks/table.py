"""The tables of a record, and the README's part that is made of them.

    python -m benchmarks.table RECORD [--readme README.md]

No figure in that part is typed by hand: a test compares the README with the record that it names.
"""

import argparse
import os
import re
from pathlib import Path
from typing import Any

from benchmarks import record as records
from benchmarks.rows import GROUPS, OURS, PEERS, ROWS, Row

MARKED = re.compile(r"<!-- results(?:: (?P<record>\S+))? -->\n.*?<!-- end of results -->\n", re.DOTALL)
FIGURES = {"read_share": "of the read roof", "share_of_roof": "of the roofs"}


def rate(value: float) -> str:
    """A rate with three digits or all of its whole ones."""
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def shown(row: Row, engine: dict[str, Any]) -> str:
    """An engine's figure in a cell."""
    if "missing" in engine:
        return "-"
    return f"{engine['median_s']:.2f} s" if row.group == "start" else rate(engine["best"])


def target_text(target: dict[str, Any]) -> str:
    """A target as the table says it."""
    sign, value = ("<=", target["at_most"]) if "at_most" in target else (">=", target["at_least"])
    if target["figure"] == "ratio":
        return f"{sign} {value:g} x"
    return f"{sign} {value:g} s" if target["figure"] == "seconds" else f"{sign} {value:.0%} {FIGURES[target['figure']]}"


def verdict(target: dict[str, Any]) -> str:
    """Met or not; a share with its figure, which no other column has to show."""
    if target["measured"] is None:
        return "not measured"
    return "met" if target["met"] else "**missed**"


def limits(engine: dict[str, Any], kind: str) -> str:
    """What bounds our row: of a decode bytes and reads, of the others the ops at their roofs."""
    if "share_of_roof" not in engine:
        return "-"
    if kind == "decode":
        moved = f"{engine['bytes_per_token'] / 1e6:.1f} MB a token at {engine['gb_s']:.1f} GB/s"
        return f"{moved}: {engine['read_share']:.0%} of reads ({engine['read_roof_gb_s']:.0f} GB/s)"
    return f"{engine['share_of_roof']:.0%} of the roofs"


def against(record: dict[str, Any]) -> str:
    """Markdown: every row measured, ours beside the best peer with the same model, share of the roof, target."""
    lines = [
        "| row (tokens/s) | **Roofline** | best peer | ratio, best (median) | share of the roof beside it | target | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in (row for row in ROWS if row.key in record["rows"]):
        kept = record["rows"][row.key]
        ours, best = kept["engines"][OURS], kept["best_peer"]
        group = GROUPS[row.group].title
        title = f"{group}: {row.title}" if group and row.group != "start" else row.title
        peer, ratio = "-", "-"
        if best:
            both = kept["ratios"][best]
            peer = f"{best} {shown(row, kept['engines'][best])}"
            ratio = f"{both['best']:.2f} ({both['median']:.2f})"
        wanted = "; ".join(target_text(target) for target in kept["targets"])
        found = "; ".join(verdict(target) for target in kept["targets"])
        cells = (title, f"**{shown(row, ours)}**", peer, ratio, limits(ours, row.kind), wanted, found)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def all_engines(record: dict[str, Any]) -> str:
    """Markdown: the rows of the first group, a column an engine that gave a figure in any of them."""
    rows = [row for row in ROWS if row.group == "q4_1" and row.key in record["rows"]]
    names = [
        name
        for name in (OURS, *GROUPS["q4_1"].peers)
        if any("best" in record["rows"][row.key]["engines"].get(name, {}) for row in rows)
    ]
    heads = ["**Roofline**" if name == OURS else name + ("" if PEERS[name].same_model else " \\*") for name in names]
    lines = [f"| tokens/s | {' | '.join(heads)} |", "|---|" + "---|" * len(names)]
    for row in rows:
        engines = record["rows"][row.key]["engines"]
        cells = [shown(row, engines.get(name, {"missing": ""})) for name in names]
        lines.append(f"| {row.title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def notes(record: dict[str, Any], link: str) -> str:
    """What the figures were taken on and how, and which engines are missing and why."""
    machine = record["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    text = [
        f"SmolLM2-135M-Instruct Q4_1 on {machine['cores']} cores of {machine['cpu']} "
        f"({machine['memory_gib']:.0f} GiB), {record['started'][:10]}; {versions}. Engines take turns within a row, "
        "prefix cache and speculation off. Rates are the best of the repeats, starts the median (their ratios are of "
        "seconds); the ratio of medians stands beside that of bests. Serve rows count generated tokens. The roofs are "
        "measured in the same process just before and after each of our runs. transformers and vLLM run the same "
        "weights in bf16; \\* other, random weights in the format that llama.cpp repacks."
    ]
    missing: dict[str, str] = {}
    for kept in record["rows"].values():
        missing |= {name: engine["missing"] for name, engine in kept["engines"].items() if "missing" in engine}
    if missing:
        text.append("Missing: " + "; ".join(f"{name} ({reason})" for name, reason in missing.items()) + ".")
    text.append(f"Every repeat: [{link}]({link}).")
    return " ".join(text)


def part(record: dict[str, Any], link: str) -> str:
    """The README's part, markers included. link: the record's path as seen from the README."""
    tables = f"{against(record)}\n\n{all_engines(record)}\n\n{notes(record, link)}"
    return f"<!-- results: {link} -->\n\n{tables}\n\n<!-- end of results -->\n"


def filled(text: str, record: dict[str, Any], link: str) -> str:
    """A README with its part made anew. Raises ValueError when it has no markers, or more than one pair."""
    if len(MARKED.findall(text)) != 1:
        raise ValueError("the README needs one <!-- results --> and, after it, <!-- end of results -->")
    return MARKED.sub(lambda _: part(record, link), text)


def fill(readme: Path, path: Path) -> None:
    """Make the README's part anew from the record at `path`."""
    record = records.load(path)
    if record is None:
        raise SystemExit(f"there is no {path}")
    link = Path(os.path.relpath(path, readme.parent)).as_posix()
    readme.write_text(filled(readme.read_text(), record, link))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--readme", type=Path, help="write the tables between this file's markers")
    args = parser.parse_args()
    if args.readme:
        fill(args.readme, args.record)
    else:
        record = records.load(args.record) or parser.error(f"there is no {args.record}")
        print(f"{against(record)}\n\n{all_engines(record)}\n\n{notes(record, str(args.record))}")


if __name__ == "__main__":
    main()
