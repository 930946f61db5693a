"""The record: what was measured of each row, the ratios that follow, and the file it is kept in after every row."""

import json
import os
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.rows import BY_KEY, OURS, PEERS, ROWS, Row
from roofline.bench.workloads import WORKLOADS

SCHEMA = "bench.peers/2"
Record = dict[str, Any]


def engine(row: Row, turns: list[dict[str, Any]], missing: str | None = None) -> Record:
    """What is kept of an engine in a row: every repeat, best and median; or why it is missing.

    turns: the workers' answers, each with "seconds". Of ours the fastest turn's shares stand for the row.
    """
    if not turns:
        return {"missing": missing or "not asked"}
    seconds = [turn["seconds"] for turn in turns]
    fastest = turns[seconds.index(min(seconds))]
    kept: Record = {"seconds": [round(value, 6) for value in seconds]}
    if row.group == "start":
        kept |= {"best_s": round(min(seconds), 4), "median_s": round(statistics.median(seconds), 4)}
    else:
        rates = [WORKLOADS[row.workload].tokens / value for value in seconds]
        kept |= {
            "tok_s": [round(rate, 1) for rate in rates],
            "best": round(max(rates), 1),
            "median": round(statistics.median(rates), 1),
        }
    if missing:
        kept["ended"] = missing
    more = {name: value for name, value in fastest.items() if name not in ("seconds", "roofs")}
    shares = [turn["share_of_roof"] for turn in turns if "share_of_roof" in turn]
    if shares:
        more["share_of_roof_median"] = round(statistics.median(shares), 4)
    if len(fastest) > 1:
        more["turns"] = turns
    return {**kept, **more}


def judged(row: Row, engines: dict[str, Record]) -> Record:
    """Ratios ours / theirs of each peer, the best peer with our model, and each target with its figure and verdict.

    Rates are compared by their bests (and medians beside), starts by their medians.
    """
    first, second = ("median_s", "best_s") if row.group == "start" else ("best", "median")
    ours = engines[OURS]
    ratios: dict[str, dict[str, float]] = {}
    for name, theirs in engines.items():
        if name != OURS and first in theirs and first in ours:
            ratios[name] = {
                "median" if row.group == "start" else "best": round(ours[first] / theirs[first], 3),
                "best" if row.group == "start" else "median": round(ours[second] / theirs[second], 3),
            }
    alike = [name for name in ratios if PEERS[name].same_model]
    better = min if row.group == "start" else max
    best_peer = better(alike, key=lambda name: engines[name][first]) if alike else None
    figures = {
        "ratio": ratios[best_peer]["median" if row.group == "start" else "best"] if best_peer else None,
        "seconds": ours.get("median_s"),
        "read_share": ours.get("read_share"),
        "share_of_roof": ours.get("share_of_roof"),
    }
    targets = [
        {
            "figure": target.figure,
            "at_most" if target.most else "at_least": target.value,
            "measured": figures[target.figure],
            "met": target.met(figures[target.figure]),
        }
        for target in row.targets
    ]
    return {"ratios": ratios, "best_peer": best_peer, "targets": targets}


def done(record: Record, row: Row, peers: Iterable[str]) -> bool:
    """Whether a row is measured, with ours and all `peers` in it (a missing one counts: its reason is kept)."""
    engines = record["rows"].get(row.key, {}).get("engines", {})
    return "seconds" in engines.get(OURS, {}) and all(name in engines for name in peers)


def complete(record: Record) -> bool:
    """Whether every row has been measured."""
    return all(done(record, row, ()) for row in ROWS)


def load(path: Path) -> Record | None:
    """The record in a file, None when there is none. Raises ValueError when the file is something else."""
    if not path.exists():
        return None
    record: Record = json.loads(path.read_text())
    if record.get("schema") != SCHEMA:
        raise ValueError(f"{path} is not a record of {SCHEMA}; name another file")
    return record


def save(record: Record, path: Path) -> None:
    """Write the record whole or not at all, its rows in the order of the table."""
    order = list(BY_KEY)
    rows = dict(sorted(record["rows"].items(), key=lambda item: order.index(item[0])))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({**record, "rows": rows}, indent=1) + "\n")
    os.replace(part, path)
