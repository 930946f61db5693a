"""`roofline bench latency`: prefill and decoding at several batch sizes, for every rung of the ladder.

Rungs take turns within a cell of the grid (see cells.py); the roofs are measured just before and after each cell.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import roofline
from roofline.backends.cpu.select import choose_threads
from roofline.bench.latency.cells import Cell, grid, measure, row
from roofline.bench.latency.ladder import EAGER, Rung, explained, rungs
from roofline.bench.latency.limits import LatencyLimits, Speeds
from roofline.bench.latency.options import LatencyOptions, numbers
from roofline.bench.latency.runners import Most, Opened, Subject, open_rungs
from roofline.bench.peers.available import Here
from roofline.bench.peers.available import here as look
from roofline.common.errors import ConfigError, RooflineError
from roofline.common.json_types import JsonObject
from roofline.hardware.detect import detect
from roofline.models import presets
from roofline.weights.checkpoint import read_config

SCHEMA = "bench.latency/1"


@dataclass(frozen=True)
class Default:
    """What is timed on a kind of device unless options say otherwise; layers None: all of the preset's."""

    preset: str
    layers: int | None
    prompt: int
    repeats: int


DEFAULTS = {"cuda": Default("llama-2-7b", None, 2048, 10), "cpu": Default("smollm2-135m", 4, 256, 3)}


@dataclass(frozen=True)
class LatencyPlan:
    """What is run: cells, rungs, timed repeats of each."""

    cells: tuple[Cell, ...]
    ladder: tuple[Rung, ...]
    repeats: int

    @property
    def most(self) -> Most:
        """The largest of everything."""
        return Most(
            max(cell.batch for cell in self.cells),
            max(cell.batch * (cell.prompt + cell.new) for cell in self.cells),
            max(cell.prompt + cell.new for cell in self.cells),
            max(cell.batch * cell.prompt for cell in self.cells if cell.new > 1),
        )


def bench_latency(
    options: LatencyOptions,
    *,
    threads: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
    keep: Callable[[JsonObject], None] = lambda record: None,
) -> JsonObject:
    """Time every rung in every cell of the grid, and return the record.

    Args:
        threads: of a CPU; None: the usable cores.
        tell: receives a line about each thing that is done.
        keep: receives the record after every cell, so that a run that is cut off leaves the cells before.

    Raises ConfigError and UnsupportedError for options that do not exist, go together, or run here at all.
    """
    here = look(options.device)
    default = DEFAULTS[here.device]
    subject = subject_of(options.preset, options.layers, default)
    cells = grid(numbers(options.batch), options.prompt or default.prompt, options.new)
    plan = LatencyPlan(cells, tuple(rungs(options.rungs)), options.repeats or default.repeats)
    if plan.most.length > subject.config["max_position"]:
        positions = subject.config["max_position"]
        raise ConfigError(f"{plan.most.length} tokens do not fit {subject.name}, which has {positions:,} positions")
    started = datetime.now(UTC).isoformat(timespec="seconds")
    opened = open_rungs(list(plan.ladder), subject, here, plan.most, threads)
    try:
        if not opened.runners:
            raise RooflineError(f"no rung runs here: {'; '.join(f'{k}: {v}' for k, v in opened.missing.items())}")
        record = _head(subject, here, plan, started, threads) | {
            "smaller": smaller(subject if options.preset is None else None, options.prompt, here.device),
            "rungs": {rung.name: explained(rung, opened.missing.get(rung.name, "")) for rung in plan.ladder},
            "complete": False,
            "cells": [],
        }
        for cell in _cells(plan, opened, LatencyLimits(subject.config), here, threads, tell):
            record["cells"].append(cell)
            record["complete"] = len(record["cells"]) == len(plan.cells)
            keep(record)
        return record
    finally:
        opened.close()


def _cells(
    plan: LatencyPlan,
    opened: Opened,
    limits: LatencyLimits,
    here: Here,
    threads: int | None,
    tell: Callable[[str], None],
) -> Iterator[JsonObject]:
    for cell in plan.cells:
        tell(f"{cell.name}: roofs")
        speeds = Speeds(here.device, int(limits.work(cell.batch, 1, cell.prompt)[1]), threads)
        runs, failed = measure(opened, cell, plan.repeats, tell)
        speed = speeds.best()
        limit, eager = limits.step(cell.batch, cell.prompt, 0, speed), runs.get(EAGER)
        if cell.new > 1:
            limit = limits.steps(cell.batch, cell.prompt, cell.new - 1, speed)
        yield {
            "cell": cell.name,
            **asdict(cell),
            "limit": asdict(limit) | {"of": "all decoding steps" if cell.new > 1 else "the prompts"},
            "roofs": asdict(speed),
            "rungs": {name: row(cell, times, None if name == EAGER else eager, limit) for name, times in runs.items()},
            "notes": {name: notes for name in runs if (notes := opened.runners[name].notes())},
            "failed": failed,
        }


def subject_of(preset: str | None, layers: int | None, default: Default) -> Subject:
    """A named shape, or the one of a folder's config.json, with so many of its layers. Raises ConfigError."""
    if preset is None:
        preset, layers = default.preset, layers or default.layers
    is_preset = preset in presets.names() or not Path(preset).is_dir()
    config = presets.preset(preset) if is_preset else read_config(Path(preset))
    layer_count = config["layers"]
    if layers is not None and layers > layer_count:
        raise ConfigError(f"{preset} has {layer_count} layers, not {layers}")
    source = f"preset:{preset}" if is_preset else preset
    return Subject(source, {**config, "layers": layers or layer_count}, cut=layers is not None and layers < layer_count)


def smaller(subject: Subject | None, prompt: int | None, device: str) -> str:
    """How the default grid of a CPU is smaller than a GPU's, in words; empty where options set all of it.

    subject: the default model, None where options name another.
    """
    ours, theirs = DEFAULTS["cpu"], DEFAULTS["cuda"]
    instead = [] if subject is None else [f"the shape {subject.name} instead of {theirs.preset}"]
    instead += [f"prompts of {ours.prompt} instead of {theirs.prompt:,} tokens"] if prompt is None else []
    return f"on a CPU: {' and '.join(instead)}" if device == "cpu" and instead else ""


def _head(subject: Subject, here: Here, plan: LatencyPlan, started: str, threads: int | None) -> JsonObject:
    machine = detect()
    cpu = {"chip": machine.chip, "cores": machine.usable_cores, "threads": choose_threads(threads).value}
    return {
        "schema": SCHEMA,
        "bench": "latency",
        "started": started,
        "device": {"type": here.device, "name": here.name, "vendor": here.vendor},
        "machine": cpu | {"memory_bytes": machine.memory_total},
        "versions": {"roofline": roofline.__version__, "python": sys.version.split()[0], **here.versions},
        "model": {"name": subject.name, "config": dict(subject.config)}
        | {"dtype": "bf16", "weights": f"random:{subject.seed}"},
        "repeats": plan.repeats,
        "definitions": {
            "latency": "TTFT + TPOT x (n - 1)",
            "first": "the latency of a shape's first call, in which things are compiled",
            "vs eager": "eager's latency / the rung's in the same round, median",
            "of limit": "least time at the roofs measured beside the cell / median time, of prompts or of all steps",
        },
    }
