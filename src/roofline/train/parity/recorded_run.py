"""A training run as its folder records it: losses, gradient norms, probes, order receipts, hand-overs."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonMapping, JsonObject
from roofline.train.data import receipts
from roofline.train.parity.layers import UNIT
from roofline.train.run.projection import SIZE

LOG, PROBES, RELAY, CONFIG = "log.jsonl", "probes.jsonl", "relay.json", "config.json"


@dataclass(frozen=True)
class Recorded:
    """What a run left.

    steps: int64 [n], ascending: steps done. loss, norm: float64 [n], of that step; a norm that is not there is nan.
    probes: lines of probes.jsonl. order: its receipts, None without. handovers: (steps done then, who took over).
    settings: its configuration, by "section.key".
    """

    folder: Path
    steps: NDArray[np.int64]
    loss: NDArray[np.float64]
    norm: NDArray[np.float64]
    probes: tuple[JsonObject, ...]
    order: receipts.Run | None
    handovers: tuple[tuple[int, str], ...]
    settings: JsonMapping = field(default_factory=dict)


def read(folder: Path) -> Recorded:
    """Raises ConfigError naming file, line and cause. A last line that a crash cut is left out."""
    if not (folder / LOG).is_file():
        raise ConfigError(f"{folder} holds no {LOG}: name the folder of a training run")
    taken: dict[int, tuple[float, float]] = {}
    for line in _lines(folder / LOG, _step):
        if line is not None:
            taken[line[0]] = line[1:]
    if not taken:
        raise ConfigError(f"{folder / LOG} has no step yet: let the run go on")
    steps = np.array(sorted(taken), np.int64)
    values = np.array([taken[int(step)] for step in steps], np.float64)
    probes = tuple(_lines(folder / PROBES, _probe)) if (folder / PROBES).is_file() else ()
    order = receipts.read(folder) if (folder / receipts.CONFIG).is_file() else None
    settings = dict(_flat(_whole(folder / CONFIG), ""))
    return Recorded(folder, steps, values[:, 0], values[:, 1], probes, order, _handovers(folder / RELAY), settings)


def _lines(path: Path, take: Callable[[Any], Any]) -> Iterator[Any]:
    try:
        lines = path.read_text("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is damaged: it is no text") from error
    whole = lines[:-1]  # what stands behind the last line's end was cut
    for number, line in enumerate(whole, 1):
        try:
            yield take(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: line {number} is damaged: {' '.join(repr(error).split())[:120]}") from error


def _step(line: Any) -> tuple[int, float, float] | None:
    """(step, loss, norm) of a step's line; None for other lines."""
    if "loss" not in line:
        return None
    step, loss, norm = line["step"], line["loss"], line.get("grad_norm")
    if type(step) is not int:
        raise TypeError(f"step {step!r} is not a whole number")
    # JSON has no word for what is not finite: a run's log has null there.
    found = [math.nan if value is None else _number(value) for value in (loss, norm)]
    return step, found[0], found[1]


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


def _probe(line: Any) -> JsonObject:
    """A line of probes.jsonl with all that is read from it."""
    if line["precision"] not in UNIT:
        raise ValueError(f"precision {line['precision']!r} is not one of {', '.join(UNIT)}")
    if type(line["step"]) is not int or type(line["tokens"]) is not int:
        raise TypeError("step and tokens are whole numbers")
    list(line["rows"])
    for kind, size in (("activations", "rms"), ("gradients", "norm")):
        for part in line[kind]:
            _number(part[size])
            if type(part["size"]) is not int or not isinstance(part["name"], str):
                raise TypeError(f"{part['name']!r} has no name or size")
            if len([_number(value) for value in part["sketch"]]) != SIZE:
                raise ValueError(f"the sketch of {part['name']} has not {SIZE} numbers")
    return dict(line)


def _handovers(path: Path) -> tuple[tuple[int, str], ...]:
    """Where each leg of a relay but the first begins."""
    try:
        return tuple((int(leg["from"]), str(leg["name"])) for leg in _whole(path).get("legs", [])[1:])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {' '.join(repr(error).split())[:120]}") from error


def _whole(path: Path) -> JsonObject:
    """A file's mapping, empty where there is none."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {' '.join(repr(error).split())[:120]}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is damaged: it holds no keys")
    return found


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else key)
    else:
        yield path, value
