"""The cells of a latency grid: how every rung runs a cell, and the figures that come of it.

latency = TTFT + TPOT x (n - 1), where TTFT is the time from a prompt to its first token, TPOT the mean time of each
further token, and n the number of new tokens. A prefill cell has n = 1. The first call of a shape, which may compile
kernels, is recorded apart.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from roofline.bench.latency.limits import WorkLimit
from roofline.bench.latency.runners import Opened, Runner
from roofline.common.errors import ConfigError, describe_error
from roofline.common.json_types import JsonObject
from roofline.hardware.roofs import TOLERANCE

NEW = 32  # tokens that a decode cell makes


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
class CellTimes:
    """Seconds of one run of a cell. tpot: of a step, None where one token is made."""

    ttft: float
    tpot: float | None
    new: int

    @property
    def latency(self) -> float:
        """TTFT + TPOT x (n - 1)."""
        return self.ttft + (self.tpot or 0.0) * (self.new - 1)


def grid(batches: Sequence[int], prompt: int, new: int = NEW) -> tuple[Cell, ...]:
    """Prefill of `prompt` tokens at each batch size, then decoding of `new` tokens after a prompt of one."""
    if not batches or min(batches) < 1 or len({*batches}) != len(batches):
        raise ConfigError(f"batch sizes {list(batches)} must be different whole numbers of at least 1")
    if prompt < 2 or new < 2:
        raise ConfigError(f"a prompt of {prompt} and {new} new tokens: both must be at least 2")
    return (*(Cell(batch, prompt, 1) for batch in batches), *(Cell(batch, 1, new) for batch in batches))


def run(runner: Runner, cell: Cell) -> CellTimes:
    """One run of a cell."""
    ttft = runner.prefill(cell.batch, cell.prompt)
    steps = cell.new - 1
    return CellTimes(ttft, runner.decode(cell.batch, cell.prompt, steps) / steps if steps else None, cell.new)


def measure(
    opened: Opened, cell: Cell, repeats: int, tell: Callable[[str], None]
) -> tuple[dict[str, list[CellTimes]], dict[str, str]]:
    """Run one cell with every rung: (rung -> its runs, the first call first; rung -> why it failed).

    The first run may compile and the second is discarded; then the rungs take turns, in alternating order.
    """
    runs: dict[str, list[CellTimes]] = {name: [] for name in opened.runners}
    failed: dict[str, str] = {}

    def run_once(name: str) -> None:
        try:
            runs[name].append(run(opened.runners[name], cell))
        except Exception as error:  # a rung that fails does not keep the others from being timed
            del runs[name]
            failed[name] = describe_error(error)

    for name in opened.runners:
        tell(f"{cell.name}: {name}, first call")
        run_once(name)
        if name in runs:
            run_once(name)
    for times in runs.values():
        times.pop()
    for turn in range(repeats):
        tell(f"{cell.name}: round {turn + 1} of {repeats}")
        for name in list(runs) if turn % 2 == 0 else list(runs)[::-1]:
            run_once(name)
    return runs, failed


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def row(cell: Cell, times: Sequence[CellTimes], eager: Sequence[CellTimes] | None, limit: WorkLimit) -> JsonObject:
    """The record of a rung in a cell. times, eager: runs of the rung and of the eager rung, the first call first.

    share: least time over measured time of the cell's phase; None, with the reason, where it would exceed 100 %.
    """
    first, repeats = times[0], times[1:]
    latency = spread([repeat.latency for repeat in repeats])
    tpots = [repeat.tpot for repeat in repeats if repeat.tpot is not None]
    timed = statistics.median(tpots) * (cell.new - 1) if tpots else latency["median"]
    share: JsonObject = {"share": round(min(1.0, limit.seconds / timed), 4)}
    if limit.seconds > timed * TOLERANCE:
        why = "it was faster than the roofs measured beside it: the machine was busy meanwhile, measure again"
        share = {"share": None, "no_share": why}
    figures: JsonObject = {
        "first_s": first.latency,
        "ttft_s": [repeat.ttft for repeat in repeats],
        "tpot_s": tpots,
        "ttft": spread([repeat.ttft for repeat in repeats]),
        "tpot": spread(tpots) if tpots else None,
        "latency": latency,
        **share,
    }
    if eager is not None:
        pairs = zip(eager[1:], repeats, strict=True)
        figures["speedup"] = spread([one.latency / other.latency for one, other in pairs])
    return figures
