"""Reads what a training run has recorded in its folder: losses, gradient norms, probes, receipts, hand-overs."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonMapping, JsonObject
from roofline.train.config.flatten import flatten
from roofline.train.data import receipts
from roofline.train.parity.layers import UNIT
from roofline.train.run.projection import SIZE
from roofline.train.run_folder import CONFIG, LOG, PROBES, RELAY

T = TypeVar("T")


@dataclass(frozen=True)
class RecordedRun:
    """The record of a run.

    steps: int64 [n], ascending. loss, norm: float64 [n], of each step; a missing norm is nan. probes: lines of
    probes.jsonl. order: the order and its receipts, if there are any. handovers: (steps done, who took over). settings:
    the configuration by "section.key".
    """

    folder: Path
    steps: NDArray[np.int64]
    loss: NDArray[np.float64]
    norm: NDArray[np.float64]
    probes: tuple[JsonObject, ...]
    order: receipts.Run | None
    handovers: tuple[tuple[int, str], ...]
    settings: JsonMapping = field(default_factory=dict)


def read_run(folder: Path) -> RecordedRun:
    """The record in a folder, without a last line that a crash cut. Raises ConfigError naming file, line and cause."""
    if not (folder / LOG).is_file():
        raise ConfigError(f"{folder} holds no {LOG}: name the folder of a training run")
    by_step = {line[0]: line[1:] for line in _lines(folder / LOG, _step) if line is not None}
    if not by_step:
        raise ConfigError(f"{folder / LOG} has no step yet: let the run go on")
    steps = np.array(sorted(by_step), np.int64)
    values = np.array([by_step[int(step)] for step in steps], np.float64)
    probes = tuple(_lines(folder / PROBES, _probe)) if (folder / PROBES).is_file() else ()
    order = receipts.read(folder) if (folder / receipts.CONFIG).is_file() else None
    settings = dict(flatten(_mapping(folder / CONFIG)))
    return RecordedRun(
        folder=folder,
        steps=steps,
        loss=values[:, 0],
        norm=values[:, 1],
        probes=probes,
        order=order,
        handovers=_handovers(folder / RELAY),
        settings=settings,
    )


def _lines(path: Path, parse: Callable[[JsonObject], T]) -> Iterator[T]:
    """The parsed lines of a file. Raises ConfigError if one is damaged, except a last one without an end."""
    try:
        lines = path.read_text("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is damaged: it is no text") from error
    for number, line in enumerate(lines[:-1], 1):
        try:
            yield parse(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: line {number} is damaged: {' '.join(repr(error).split())[:120]}") from error


def _step(line: JsonObject) -> tuple[int, float, float] | None:
    """(step, loss, norm) of a step's line; None for other lines."""
    if "loss" not in line:
        return None
    step, loss, norm = line["step"], line["loss"], line.get("grad_norm")
    if type(step) is not int:
        raise TypeError(f"step {step!r} is not a whole number")
    # JSON has no nan or infinity: the log has null instead.
    loss, norm = (math.nan if value is None else _number(value) for value in (loss, norm))
    return step, loss, norm


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


def _probe(line: JsonObject) -> JsonObject:
    """A line of probes.jsonl, after checking everything that is read from it."""
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
    """The first step of each leg of a relay but the first, and its name."""
    try:
        return tuple((int(leg["from"]), str(leg["name"])) for leg in _mapping(path).get("legs", [])[1:])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {' '.join(repr(error).split())[:120]}") from error


def _mapping(path: Path) -> JsonObject:
    """The mapping in a JSON file, empty if there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {' '.join(repr(error).split())[:120]}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is damaged: it holds no keys")
    return content
