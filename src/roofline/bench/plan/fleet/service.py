"""A replica as a fleet sees it: how long its steps take by how much they hold, fitted to runs of the real scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roofline.backends.simulated.calibration import Calibration
from roofline.bench.plan.arrangements import Arrangement
from roofline.bench.plan.closed_loop import ClosedLoop, Lengths
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.ops.batch import Batch

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SAMPLED = 64  # of the fleet's lengths, that the fitted runs take in turn


@dataclass(frozen=True)
class Service:
    """A replica of a fleet.

    running: float64 [knots], ascending: requests that it computes at the same time; decode_seconds: float64 [knots], of
    a step that decodes so many; step, token, decode: seconds of a step with prompt tokens: of the step itself, of each
    of these tokens, of each request that decodes beside them; most_running: requests at the same time at most;
    step_tokens: in a step; prefixes: beginnings of prompts that its cache keeps beside these requests.
    """

    running: np.ndarray
    decode_seconds: np.ndarray
    step: float
    token: float
    decode: float
    most_running: int
    step_tokens: int
    prefixes: int

    def decode_step(self, running: np.ndarray) -> np.ndarray:
        """Seconds of a step that decodes so many requests each, [n]."""
        return np.interp(running, self.running, self.decode_seconds)

    def prompt_step(self, running: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Seconds of a step with so many prompt tokens beside so many that decode, [n]."""
        floor = self.decode_step(running)
        return np.maximum(floor, self.step + self.token * tokens + self.decode * running)


def fit_service(
    arrangement: Arrangement, calibration: Calibration, prompts: np.ndarray, answers: np.ndarray, prefix_tokens: int
) -> Service:
    """The service of one replica with requests of these lengths, from closed loops of the real scheduler."""
    longest = int(prompts.max() + answers.max())
    mean = float(prompts.mean() + answers.mean())
    fitting = int(arrangement.cache_tokens // mean)
    most = max(1, min(arrangement.limits.segments, fitting))
    knots = [each for each in KNOTS if each < most] + [most]
    room = arrangement.cache_tokens - most * mean
    prefixes = int(min(32, max(1, room // prefix_tokens))) if prefix_tokens else 0
    at = np.linspace(0, len(prompts) - 1, SAMPLED).astype(int)
    lengths = [Lengths(int(p), int(a)) for p, a in zip(prompts[at], answers[at], strict=True)]
    assert longest <= arrangement.max_context, "arrangements have room for the longest request"
    decode_seconds, mixed = [], []
    for running in knots:
        steps = _steps(arrangement, calibration, lengths, running)
        plain = [seconds for tokens, decodes, seconds in steps if not tokens and decodes == running]
        plain = plain or [seconds for tokens, _, seconds in steps if not tokens]
        decode_seconds.append(float(np.mean(plain)) if plain else float("nan"))
        mixed += [step for step in steps if step[0]]
    step, token, decode = _prompt_terms(mixed)
    timed = ~np.isnan(decode_seconds)
    return Service(
        np.array(knots, np.float64)[timed],
        np.maximum.accumulate(np.array(decode_seconds)[timed]),
        step,
        token,
        decode,
        most,
        arrangement.limits.tokens,
        prefixes,
    )


def _steps(
    arrangement: Arrangement, calibration: Calibration, lengths: Sequence[Lengths], running: int
) -> list[tuple[int, int, float]]:
    """Prompt tokens, requests that decode, and seconds of each step of a closed loop."""
    executable = arrangement.executable(calibration, "fleet")
    steps: list[tuple[int, int, float]] = []

    def watch(batch: Batch, seconds: float) -> None:
        segments, tokens = batch.segments, batch.tokens
        decodes = segments if segments == tokens else int((np.diff(batch.seg_start[: segments + 1]) == 1).sum())
        steps.append((tokens - decodes, decodes, seconds))

    executable.watch = watch
    engine = LocalEngine(executable, EngineConfig(prefix_cache=False, overlap=False, measure=False))
    ClosedLoop(engine, lengths, running, max(1, 64 // running)).run()
    engine.close()
    return steps


def _prompt_terms(steps: Sequence[tuple[int, int, float]]) -> tuple[float, float, float]:
    """Seconds of a step with prompt tokens: its own, of each prompt token, of each decode; by least squares over
    relative errors."""
    table = np.array([(1.0, tokens, decodes) for tokens, decodes, _ in steps])  # [steps, 3]
    seconds = np.array([each for _, _, each in steps])
    solution = np.linalg.lstsq(table / seconds[:, None], np.ones(len(steps)), rcond=None)[0]
    step, token, decode = (max(0.0, float(value)) for value in solution)
    return step, token, decode
