"""Plans beside measurements on this machine: `python -m benchmarks.plan [MODEL] [-o FILE]`.

Calibrates on two workloads and compares six others, each measured through the real engine in a closed loop and
simulated with the same requests on a virtual clock. Other programs disturb it: run it on a machine that is quiet.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from roofline import bundle
from roofline.backends.base import Executable
from roofline.backends.capacity import Capacity
from roofline.backends.fit import ModelSplit, split_on_host
from roofline.backends.simulated.backend import THIS_MACHINE, roofs_of, simulate
from roofline.backends.simulated.calibration import Calibration
from roofline.bench.plan.assumptions import in_words
from roofline.bench.plan.calibrate import calibration_of, timed_steps
from roofline.bench.plan.closed_loop import ClosedLoop, Lengths, Run
from roofline.bench.plan.plan import quantiles, shape_of
from roofline.common.units import now_utc
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.hardware.detect import detect

# Requests at once, prompt, answer; the calibration has others (`bench/plan/calibrate.py`).
COMPARED = ((1, 128, 64), (2, 1024, 48), (4, 256, 64), (8, 64, 96), (16, 128, 32), (32, 128, 32))
WITHIN = 0.10
REPEATS = 3  # of which the faster one counts: other programs only ever slow it down
WAVES = 2


@dataclass(frozen=True)
class Compared:
    """A figure of a workload, measured and planned. Times in seconds."""

    workload: str
    figure: str
    measured: float
    planned: float

    @property
    def error(self) -> float:
        """Planned over measured, less 1."""
        return self.planned / self.measured - 1


def figures(run: Run) -> dict[str, float]:
    """What is compared of a run."""
    ttft = quantiles([request.ttft for request in run.requests])
    tpot = quantiles([request.tpot for request in run.requests if request.tpot is not None])
    latency = quantiles([request.seconds for request in run.requests])
    times = {"TTFT": ttft, "TPOT": tpot, "E2E": latency}
    each = {f"{name} {at}": getattr(value, at) for name, value in times.items() for at in ("p50", "p95")}
    return {"tokens/s": run.tokens_per_s, **each}


def loop(executable: Executable, workload: tuple[int, int, int]) -> Run:
    """A closed loop of one workload."""
    concurrency, prompt, answer = workload
    engine = LocalEngine(executable, EngineConfig(prefix_cache=False, overlap=False))
    return ClosedLoop(engine, [Lengths(prompt, answer)], concurrency, max(WAVES, 8 // concurrency)).run()


def compare(model: str) -> tuple[Calibration, list[Compared]]:
    """Measure, plan, and set the one beside the other."""
    split, roofs = split_on_host(*shape_of(model, "", on_host=True)), roofs_of(THIS_MACHINE)
    loaded = bundle.load(model, text=False)
    executable = loaded.executable
    rows: list[Compared] = []
    try:
        steps = timed_steps(executable)
        measured = {}
        for workload in COMPARED:
            print(_name(workload), file=sys.stderr, flush=True)
            runs = [loop(executable, workload) for _ in range(REPEATS)]
            measured[workload] = figures(min(runs, key=lambda run: run.seconds))
        steps += timed_steps(executable)  # before and after, since a machine's speed drifts
        calibration = calibration_of(steps, split.parts[0].program, roofs, f"{len(steps)} steps")
        for workload, figure in measured.items():
            planned = figures(loop(_simulated(split, executable, calibration), workload))
            rows += [Compared(_name(workload), key, figure[key], planned[key]) for key in figure]
    finally:
        executable.close()
    return calibration, rows


def _name(workload: tuple[int, int, int]) -> str:
    return "{} x {}+{}".format(*workload)


def _simulated(split: ModelSplit, executable: Executable, calibration: Calibration) -> Executable:
    """The same executable, simulated."""
    capacity = Capacity(executable.limits, executable.max_context, executable.num_pages)
    return simulate(split, capacity, roofs_of(THIS_MACHINE), calibration, None, "this machine")


def show(calibration: Calibration, rows: Sequence[Compared]) -> None:
    """A table with the error of each figure."""
    print(f"calibration: {in_words(calibration)}, from {calibration.source}")
    names = list(dict.fromkeys(row.figure for row in rows))
    print("| workload | " + " | ".join(f"{name}: measured, planned" for name in names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for workload in dict.fromkeys(row.workload for row in rows):
        cells = [_cell(row) for row in rows if row.workload == workload]
        print(f"| {workload} | " + " | ".join(cells) + " |")
    inside = sum(abs(row.error) <= WITHIN for row in rows)
    print(f"{inside} of {len(rows)} figures within {WITHIN:.0%}")


def _cell(row: Compared) -> str:
    if row.figure == "tokens/s":
        return f"{row.measured:.1f}, {row.planned:.1f} ({row.error:+.1%})"
    return f"{row.measured * 1e3:.2f}, {row.planned * 1e3:.2f} ms ({row.error:+.1%})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("-o", "--out", type=Path, help="also write the comparison into this JSON file")
    options = parser.parse_args()
    calibration, rows = compare(options.model)
    show(calibration, rows)
    if options.out is not None:
        record = {
            "model": options.model,
            "machine": detect().chip,
            "measured": now_utc(),
            "calibration": asdict(calibration),
            "rows": [{**asdict(row), "error": row.error} for row in rows],
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(abs(row.error) <= WITHIN for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
