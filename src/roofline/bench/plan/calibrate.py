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

# Requests at once, prompt, answer: long prompts for arithmetic, one and several answers for reads and rows.
WORKLOADS = ((1, 512, 48), (8, 128, 48))
REPEATS = 2


@dataclass(frozen=True)
class TimedStep:
    """A real step: its size (`StepCost.work`), and its seconds, the engine's own work included."""

    work: tuple[float, ...]
    seconds: float


def timed_steps(
    executable: "Executable", workloads: Sequence[tuple[int, int, int]] = WORKLOADS, repeats: int = REPEATS
) -> list[TimedStep]:
    """Runs workloads through an engine on an executable that does not queue, and times every step."""
    watched = Watched(executable)
    engine = LocalEngine(watched, EngineConfig(prefix_cache=False, overlap=False))  # type: ignore[arg-type]
    vocab = min(30000, executable.vocab_size)
    steps = []
    for _ in range(repeats):
        for requests, prompt, answer in workloads:
            for seed in range(requests):
                params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, seed=0)
                engine.submit(token_ids(prompt, seed, vocab), params)
            while engine.has_work:
                watched.works.clear()
                started = time.perf_counter()
                engine.step()
                seconds = time.perf_counter() - started
                steps += [TimedStep(work, seconds) for work in watched.works]
    return steps


def calibration_of(steps: Sequence[TimedStep], program: "Program", roofs: "RoofRates", source: str) -> Calibration:
    """The calibration of steps of a Program at these roofs. Steps that took more than twice the median of their size
    are left out: another program had the machine then."""
    from roofline.program.passes.price import price

    weights = price(program).weight_bytes
    prices = StepPrices(PriceTable.of(program), None, weights)
    kept = _undisturbed(steps)
    bounds = prices.bounds([step.work for step in kept], roofs, weights)
    rows = [(float(reads), float(compute), step.work[2]) for step, (reads, compute) in zip(kept, bounds, strict=True)]
    return fitted(rows, [step.seconds for step in kept], source)


def _undisturbed(steps: Sequence[TimedStep]) -> list[TimedStep]:
    sizes: dict[tuple[float, ...], list[float]] = {}
    for step in steps:
        sizes.setdefault(step.work[1:3], []).append(step.seconds)
    medians = {size: sorted(seconds)[len(seconds) // 2] for size, seconds in sizes.items()}
    return [step for step in steps if step.seconds <= 2 * medians[step.work[1:3]]]


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

    return split_on_host(*shape_of(model, ""), kv_cache_dtype).parts[0].program
