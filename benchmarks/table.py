"""Makes the tables of measured results in the documents from a record of `make bench-peers`.

    python -m benchmarks.table RECORD [--documents README.md docs/explanation/measured.md]

The README has a summary of a few rows, docs/explanation/measured.md every row. Neither has a figure that is typed by
hand: a test compares both with the record that they name.
"""

import argparse
import os
import re
from pathlib import Path
from typing import Any

from benchmarks import record as records
from benchmarks.rows import GROUPS, OURS, PEERS, ROWS, Row

MARKED = re.compile(
    r"<!-- (?P<part>results|summary)(?:: (?P<record>\S+))? -->\n.*?<!-- end of (?P=part) -->\n", re.DOTALL
)
SUMMARY_ROWS = (
    "q4_1/prefill_512",
    "q4_1/decode_ctx8",
    "q4_1/serve_8x128+64",
    "q4_1/serve_64x128+64",
    "start/first_token",
)
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


def summary(record: dict[str, Any]) -> str:
    """Markdown: SUMMARY_ROWS, ours beside the best peer with the same model, and the machine in a sentence."""
    lines = ["| | **Roofline** | best peer | ratio |", "|---|---|---|---|"]
    for row in (row for row in ROWS if row.key in SUMMARY_ROWS and row.key in record["rows"]):
        kept = record["rows"][row.key]
        best = kept["best_peer"]
        peer = f"{best} {shown(row, kept['engines'][best])}" if best else "-"
        ratio = f"{kept['ratios'][best]['best']:.2f}" if best else "-"
        title = row.title if row.group == "start" else f"{row.title}, tokens/s"
        lines.append(f"| {title} | **{shown(row, kept['engines'][OURS])}** | {peer} | {ratio} |")
    machine = record["machine"]
    where = f"{machine['cores']} cores of {machine['cpu']} ({machine['memory_gib']:.0f} GiB)"
    return "\n".join(lines) + f"\n\nSmolLM2-135M-Instruct Q4_1 on {where}, {record['started'][:10]}."


def part(name: str, record: dict[str, Any], link: str) -> str:
    """The part "results" or "summary" of a document, markers included. link: the record's path as seen from there."""
    tables = f"{against(record)}\n\n{all_engines(record)}\n\n{notes(record, link)}"
    text = tables if name == "results" else summary(record)
    return f"<!-- {name}: {link} -->\n\n{text}\n\n<!-- end of {name} -->\n"


def filled(text: str, record: dict[str, Any], link: str) -> str:
    """A document with its part made anew. Raises ValueError when it has no markers, or more than one pair."""
    if len(MARKED.findall(text)) != 1:
        raise ValueError("the document needs one <!-- results --> (or summary) and, after it, <!-- end of results -->")
    return MARKED.sub(lambda match: part(match["part"], record, link), text)


def fill(document: Path, path: Path) -> None:
    """Make the document's part anew from the record at `path`."""
    record = records.load(path)
    if record is None:
        raise SystemExit(f"there is no {path}")
    link = Path(os.path.relpath(path, document.parent)).as_posix()
    document.write_text(filled(document.read_text(), record, link))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--documents", type=Path, nargs="+", help="write the tables between these files' markers")
    args = parser.parse_args()
    if args.documents:
        for document in args.documents:
            fill(document, args.record)
    else:
        record = records.load(args.record) or parser.error(f"there is no {args.record}")
        print(f"{against(record)}\n\n{all_engines(record)}\n\n{notes(record, str(args.record))}")


if __name__ == "__main__":
    main()
