"""What was measured here, of whatever kind of file: points, a record of `bench latency`, one of `bench train`."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from roofline.bench.report import words
from roofline.bench.report.gather import of_points
from roofline.bench.results.point import Point
from roofline.bench.results.store import read_points
from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonObject
from roofline.hardware.roofs import TOLERANCE


@dataclass(frozen=True)
class Own:
    """A figure of this machine. figure: with its unit; share: of the measured roof, None where that is not known;
    bound: "memory" or "compute", "" where that is not known; other_load: cores that other programs used, "-" where the
    file does not say."""

    name: str
    machine: str
    figure: str
    share: float | None
    bound: str = ""
    trusted: bool = True
    other_load: str = "-"


def read_own(paths: Sequence[Path]) -> tuple[list[Own], list[str]]:
    """The figures in these files, and a sentence with the arithmetic for each point that cannot be true.

    Raises ConfigError, naming the file, for one of no such kind.
    """
    figures: list[Own] = []
    points: list[Point] = []
    for path in paths:
        record = _record(path)
        if record is None:
            points += read_points(path)
            continue
        try:
            figures += _of_latency(record) if record.get("bench") == "latency" else _of_training(record)
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is no record of bench latency or bench train: {error!r} is missing") from error
    gathered = of_points(points)
    return [*map(_of_point, gathered.points), *figures], gathered.refused


def _record(path: Path) -> JsonObject | None:
    """The record that a file is, None where it has points."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None  # points, or what their reader refuses with a sentence
    return value if isinstance(value, dict) and "bench" in value else None


def _of_point(point: Point) -> Own:
    name = f"{words.system_name(point)}, {point.system.model or point.preset}, {words.load_name(point)}"
    rate = words.with_interval(words.metric(point, words.TOKENS), words.interval(point, words.TOKENS))
    tpot = words.metric(point, words.TPOT)
    return Own(
        name=name,
        machine=words.place(point),
        figure=f"{rate} tokens/s" + ("" if tpot is None else f", TPOT {words.digits(tpot)} ms"),
        share=words.share(point),
        bound="" if point.limit is None else point.limit.bound,
        trusted=words.trusted(point),
        other_load=f"{point.host.load:.1f}",
    )


def _of_latency(record: JsonObject) -> Iterator[Own]:
    """A figure for each technique in each cell; those that the record refuses a share have none here."""
    for cell in record["cells"]:
        for rung, row in cell["rungs"].items():
            decodes = cell["new"] > 1
            seconds = row["tpot" if decodes else "ttft"]["median"]
            yield Own(
                name=f"{record['model']['name']}, {cell['cell']}, {rung}",
                machine=record["device"]["name"],
                figure=f"{words.digits(1000 * seconds)} ms" + (" a token" if decodes else ""),
                share=row["share"],
                bound=cell["limit"]["bound"],
            )


def _of_training(record: JsonObject) -> Iterator[Own]:
    card = record["card"]
    share = card["roof"]["share"] if card["roof"] else None
    yield Own(
        name=f"{card['model']['name']}, {card['precision']}",
        machine=f"{card['devices']} x {card['device']['name']}",
        figure=f"{words.digits(card['flops']['foundry']['tflops_per_device'])} TFLOP/s a device, "
        f"{words.digits(card['speed']['tokens_per_s'])} tokens/s",
        share=share if share is not None and share <= TOLERANCE else None,
        bound="compute",
    )
