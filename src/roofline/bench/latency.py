"""The grid of a latency bench: prefill and decoding at several batch sizes, for every rung of the ladder.

latency = TTFT + TPOT x (n - 1), with TTFT from a prompt to its first token, TPOT the mean time of a further one and n
the tokens made. A prefill cell has n = 1. The first call of a shape, in which things are compiled, is kept apart. Rungs
take turns within a cell; the roofs are measured just before and after it.
"""

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from roofline.bench.beside import TOLERANCE
from roofline.bench.ladder import EAGER, Rung, explained, rungs
from roofline.bench.limits import Limit, ModelLimits, Speed
from roofline.bench.runners import Most, Opened, Runner, Subject, open_rungs
from roofline.common.errors import ConfigError, RooflineError

if TYPE_CHECKING:
    from roofline.backends.peers.here import Here

SCHEMA = "bench.latency/1"
BATCHES = (1, 8, 16)
NEW = 32  # tokens that a decode cell makes
# Device -> shape, prompt of a prefill cell, repeats.
DEFAULTS = {"cuda": ("llama-2-7b", 2048, 10), "cpu": ("smollm2-135m", 256, 3)}


@dataclass(frozen=True)
class Cell:
    """`batch` sequences of `prompt` tokens each make `new` tokens each."""

    batch: int
    prompt: int
    new: int

    @property
    def name(self) -> str:
        """As in a table: "prefill 2048 x 8", "decode 1+32 x 8"."""
        what = f"prefill {self.prompt}" if self.new == 1 else f"decode {self.prompt}+{self.new}"
        return f"{what} x {self.batch}"


@dataclass(frozen=True)
class Times:
    """Seconds of one run of a cell. tpot: of a step, None where one token is made."""

    ttft: float
    tpot: float | None
    new: int

    @property
    def latency(self) -> float:
        """TTFT + TPOT x (n - 1)."""
        return self.ttft + (self.tpot or 0.0) * (self.new - 1)


@dataclass(frozen=True)
class Plan:
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


def grid(batches: Sequence[int], prompt: int, new: int = NEW) -> tuple[Cell, ...]:
    """Prefill of `prompt` tokens at each batch size, then decoding of `new` tokens after a prompt of one."""
    if not batches or min(batches) < 1 or len({*batches}) != len(batches):
        raise ConfigError(f"batch sizes {list(batches)} must be different whole numbers of at least 1")
    if prompt < 2 or new < 2:
        raise ConfigError(f"a prompt of {prompt} and {new} new tokens: both must be at least 2")
    return (*(Cell(batch, prompt, 1) for batch in batches), *(Cell(batch, 1, new) for batch in batches))


def run(runner: Runner, cell: Cell) -> Times:
    """One run of a cell."""
    ttft = runner.prefill(cell.batch, cell.prompt)
    steps = cell.new - 1
    return Times(ttft, runner.decode(cell.batch, cell.prompt, steps) / steps if steps else None, cell.new)


def measure(
    opened: Opened, cell: Cell, repeats: int, tell: Callable[[str], None]
) -> tuple[dict[str, list[Times]], dict[str, str]]:
    """(every run of each rung, the first one first; rung -> why it has none) of one cell.

    The first run may compile and the second settles; then the rungs take turns, in both directions.
    """
    runs: dict[str, list[Times]] = {}
    failed: dict[str, str] = {}
    for name, runner in opened.runners.items():
        tell(f"{cell.name}: {name}, first call")
        try:
            runs[name] = [run(runner, cell)]
            run(runner, cell)
        except RooflineError as error:
            runs.pop(name, None)
            failed[name] = str(error)
    for turn in range(repeats):
        tell(f"{cell.name}: round {turn + 1} of {repeats}")
        for name in list(runs) if turn % 2 == 0 else list(runs)[::-1]:
            try:
                runs[name].append(run(opened.runners[name], cell))
            except RooflineError as error:
                del runs[name]
                failed[name] = str(error)
    return runs, failed


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def limit_of(limits: ModelLimits, cell: Cell, speed: Speed) -> Limit:
    """The least time of a cell: of its decoding steps, or of its prompts."""
    if cell.new > 1:
        return limits.steps(cell.batch, cell.prompt, cell.new - 1, speed)
    return limits.step(cell.batch, cell.prompt, 0, speed)


def row(cell: Cell, times: Sequence[Times], eager: Sequence[Times] | None, limit: Limit) -> dict[str, Any]:
    """What is kept of a rung in a cell. times, eager: the first call first; the repeats were taken in turns.

    share: of the limit, by the phase that the cell is about; None, with a reason, where it would be more than all.
    """
    first, repeats = times[0], times[1:]
    latency = spread([each.latency for each in repeats])
    tpots = [each.tpot for each in repeats if each.tpot is not None]
    timed = statistics.median(tpots) * (cell.new - 1) if tpots else latency["median"]
    share: dict[str, Any] = {"share": round(limit.seconds / timed, 4)}
    if limit.seconds > timed * TOLERANCE:
        why = f"{limit.seconds / timed:.0%} of the roofs measured beside it, which cannot be: measure again"
        share = {"share": None, "no_share": why}
    kept: dict[str, Any] = {
        "first_s": first.latency,
        "ttft_s": [each.ttft for each in repeats],
        "tpot_s": tpots,
        "ttft": spread([each.ttft for each in repeats]),
        "tpot": spread(tpots) if tpots else None,
        "latency": latency,
        **share,
    }
    if eager is not None:
        pairs = zip(eager[1:], repeats, strict=True)
        kept["speedup"] = spread([one.latency / other.latency for one, other in pairs])
    return kept


def bench_latency(
    preset: str | None = None,
    names: str | None = None,
    *,
    device: str = "auto",
    batches: Sequence[int] = BATCHES,
    prompt: int | None = None,
    new: int = NEW,
    repeats: int | None = None,
    threads: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
    keep: Callable[[dict[str, Any]], None] = lambda record: None,
) -> dict[str, Any]:
    """Run the grid and give the record.

    Args:
        preset: a name of models.presets, or a folder with a config.json; None: Llama-2-7B's on a GPU, a smaller on a
            CPU. Weights are random.
        names: of rungs, as `ladder.rungs` takes them; None: each technique alone.
        device: "auto", "cpu" or "cuda". batches, prompt, new, repeats: of the grid; None: by device.
        threads: of a CPU; None: the usable cores.
        tell: told what is being done. keep: given the record after every cell: a run that is cut off leaves those.

    Raises ConfigError, UnsupportedError: what was asked for does not exist, fit together, or run here at all.
    """
    from roofline.backends.peers.here import here as look

    here = look(device)
    shape, length, count = DEFAULTS[here.device]
    subject = subject_of(preset or shape)
    plan = Plan(grid(batches, prompt or length, new), tuple(rungs(names)), repeats or count)
    if plan.most.length > subject.config["max_position"]:
        positions = subject.config["max_position"]
        raise ConfigError(f"{plan.most.length} tokens do not fit {subject.name}, which has {positions:,} positions")
    started = datetime.now(UTC).isoformat(timespec="seconds")
    opened = open_rungs(list(plan.ladder), subject, here, plan.most, threads)
    try:
        if not opened.runners:
            raise RooflineError(f"no rung runs here: {'; '.join(f'{k}: {v}' for k, v in opened.missing.items())}")
        record = _head(subject, here, plan, started, threads) | {
            "smaller": smaller(preset, prompt, here.device),
            "rungs": {rung.name: explained(rung, opened.missing.get(rung.name, "")) for rung in plan.ladder},
            "complete": False,
            "cells": [],
        }
        for cell in _cells(plan, opened, ModelLimits(subject.config), here, threads, tell):
            record["cells"].append(cell)
            record["complete"] = len(record["cells"]) == len(plan.cells)
            keep(record)
        return record
    finally:
        opened.close()


def _cells(
    plan: Plan,
    opened: Opened,
    limits: ModelLimits,
    here: "Here",
    threads: int | None,
    tell: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    from roofline.bench.speeds import Speeds

    for cell in plan.cells:
        tell(f"{cell.name}: roofs")
        speeds = Speeds(here.device, int(limits.work(cell.batch, 1, cell.prompt)[1]), threads)
        runs, failed = measure(opened, cell, plan.repeats, tell)
        speed = speeds.best()
        limit = limit_of(limits, cell, speed)
        eager = runs.get(EAGER)
        yield {
            "cell": cell.name,
            **asdict(cell),
            "limit": asdict(limit) | {"of": "all decoding steps" if cell.new > 1 else "the prompts"},
            "roofs": asdict(speed),
            "rungs": {name: row(cell, times, None if name == EAGER else eager, limit) for name, times in runs.items()},
            "failed": failed,
        }


def subject_of(what: str) -> Subject:
    """A named shape, or the one of a folder's config.json. Raises ConfigError."""
    from pathlib import Path

    from roofline.models import presets
    from roofline.weights.checkpoint import read_config

    if what in presets.names() or not Path(what).is_dir():
        return Subject(f"preset:{what}", presets.preset(what))
    return Subject(what, read_config(Path(what)))


def smaller(preset: str | None, prompt: int | None, device: str) -> str:
    """What a CPU runs instead of the grid of a GPU, empty where nothing was chosen for it."""
    ours, theirs = DEFAULTS["cpu"], DEFAULTS["cuda"]
    instead = [f"the shape {ours[0]} instead of {theirs[0]}"] if preset is None else []
    instead += [f"prompts of {ours[1]} instead of {theirs[1]:,} tokens"] if prompt is None else []
    return f"on a CPU: {' and '.join(instead)}" if device == "cpu" and instead else ""


def _head(subject: Subject, here: "Here", plan: Plan, started: str, threads: int | None) -> dict[str, Any]:
    import roofline
    from roofline.backends.cpu.select import choose_threads
    from roofline.hardware.detect import detect

    machine = detect()
    cpu = {"chip": machine.chip, "cores": machine.usable_cores, "threads": choose_threads(threads).value}
    return {
        "schema": SCHEMA,
        "bench": "latency",
        "started": started,
        "device": {"type": here.device, "name": here.name, "vendor": here.vendor},
        "machine": cpu | {"memory_bytes": machine.memory_total},
        "versions": {"roofline": roofline.__version__, "python": sys.version.split()[0], **here.versions},
        "model": {
            "name": subject.name,
            "config": dict(subject.config),
            "dtype": "bf16",
            "weights": f"random:{subject.seed}",
        },
        "repeats": plan.repeats,
        "definitions": {
            "latency": "TTFT + TPOT x (n - 1)",
            "first": "the latency of a shape's first call, in which things are compiled",
            "vs eager": "eager's latency / the rung's in the same round, median",
            "of limit": "least time at the roofs measured beside the cell / median time, of prompts or of all steps",
        },
    }
