"""A few real steps of a model on this machine, timed, and the calibration that they give."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roofline.backends.prices import PriceTable, StepPrices
from roofline.backends.simulated.calibration import Calibration, fitted
from roofline.bench.engine import Watched
from roofline.bench.workloads import token_ids
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams

if TYPE_CHECKING:
    from roofline.backends.base import Executable
    from roofline.program.ir import Program
    from roofline.program.passes.price import RoofRates

PROMPTS = (16, 32, 64, 128, 256, 512, 1024)  # tokens of prompts that are computed one after the other
ROWS, ROW_STEPS = 32, 4  # answers at a time, of which every so many steps one ends
REPEATS = 3


@dataclass(frozen=True)
class TimedStep:
    """A real step: its size (`StepCost.work`), and its seconds, the engine's own work included."""

    work: tuple[float, ...]
    seconds: float


def timed_steps(executable: "Executable", repeats: int = REPEATS) -> list[TimedStep]:
    """Runs two workloads through an engine on an executable that does not queue, and times every step: prompts of
    several lengths, one at a time; and answers side by side of which one after the other ends."""
    watched = Watched(executable)
    engine = LocalEngine(watched, EngineConfig(prefix_cache=False, overlap=False))  # type: ignore[arg-type]
    longest = engine.limits.max_model_len
    prompts = [[(prompt, 4)] for prompt in PROMPTS if prompt + 4 <= longest]
    rows = min(ROWS, engine.limits.sequences)
    side_by_side = [(8, min(ROW_STEPS * (at + 1), longest - 8)) for at in range(rows)]
    steps = []
    for workload in [*prompts, side_by_side] * repeats:
        steps += _timed(engine, watched, workload)
    return steps


def _timed(engine: LocalEngine, watched: Watched, workload: Sequence[tuple[int, int]]) -> list[TimedStep]:
    """Every step of some requests at once: prompt, answer."""
    vocab = min(30000, engine.executable.vocab_size)
    for seed, (prompt, answer) in enumerate(workload):
        engine.submit(token_ids(prompt, seed, vocab), SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True))
    steps = []
    while engine.has_work:
        watched.works.clear()
        started = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - started
        steps += [TimedStep(work, seconds) for work in watched.works]
    return steps


def calibration_of(steps: Sequence[TimedStep], program: "Program", roofs: "RoofRates", source: str) -> Calibration:
    """The calibration of steps of a Program at these roofs."""
    from roofline.program.passes.price import price

    weights = price(program).weight_bytes
    prices = StepPrices(PriceTable.of(program), None, weights)
    limits = prices.bounds([step.work for step in steps], roofs, weights).sum(axis=1)  # seconds, [steps]
    rows = [(float(limit), int(step.work[1])) for step, limit in zip(steps, limits, strict=True)]
    return fitted(rows, [step.seconds for step in steps], source)


def calibrate(model: str, kv_cache_dtype: str, tell: Callable[[str], None]) -> Calibration:
    """Load a model on this machine's CPU, time a few steps, and compare them with the roofs that were measured of it.

    Raises ConfigError where these were never measured.
    """
    from roofline import bundle
    from roofline.backends.simulated.backend import THIS_MACHINE, roofs_of

    roofs = roofs_of(THIS_MACHINE)
    loaded = bundle.load(model, backend="cpu", kv_cache_dtype=kv_cache_dtype, text=False)
    try:
        tell("timing a few steps on this machine")
        steps = timed_steps(loaded.executable)
    finally:
        loaded.executable.close()
    return calibration_of(steps, host_program(model, kv_cache_dtype), roofs, f"{len(steps)} steps measured here")


def host_program(model: str, kv_cache_dtype: str = "auto") -> "Program":
    """The Program that this machine's CPU runs of a model."""
    from roofline.backends.fit import split_on_host
    from roofline.bench.plan.plan import shape_of

    return split_on_host(*shape_of(model, "", on_host=True), kv_cache_dtype).parts[0].program
