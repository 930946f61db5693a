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
CLASS = 1.12  # steps whose tokens differ by less than this factor are alike
SAMPLED = 64  # of the fleet's lengths, that the fitted runs take in turn


@dataclass(frozen=True)
class Service:
    """A replica of a fleet.

    running: float64 [knots], ascending: requests that it computes at the same time; decode_seconds: float64 [knots], of
    a step that decodes so many; tokens: float64 [sizes], ascending: of a step with prompt tokens, those that decode
    beside them included; seconds: float64 [sizes], of such a step, without what the cache of those that decode takes;
    most_running: requests at the same time at most; step_tokens: in a step; cache_tokens: that its cache holds.
    """

    running: np.ndarray
    decode_seconds: np.ndarray
    tokens: np.ndarray
    seconds: np.ndarray
    most_running: int
    step_tokens: int
    cache_tokens: int

    def decode_step(self, running: np.ndarray) -> np.ndarray:
        """Seconds of a step that decodes so many requests each, [n]."""
        return np.interp(running, self.running, self.decode_seconds)

    def prompt_step(self, running: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Seconds of a step with so many prompt tokens beside so many that decode, [n]."""
        decode = self.decode_step(np.maximum(running, 1))
        return np.interp(running + tokens, self.tokens, self.seconds) + decode - self.decode_seconds[0]


def fit_service(
    arrangement: Arrangement, calibration: Calibration, prompts: np.ndarray, answers: np.ndarray
) -> Service:
    """The service of one replica with requests of these lengths, from closed loops of the real scheduler."""
    longest = int(prompts.max() + answers.max())
    mean = float(prompts.mean() + answers.mean())
    fitting = int(arrangement.cache_tokens // mean)
    most = max(1, min(arrangement.limits.segments, fitting))
    knots = [each for each in KNOTS if each < most] + [most]
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
    timed = ~np.isnan(decode_seconds)
    running_knots, decodes = np.array(knots, np.float64)[timed], np.maximum.accumulate(np.array(decode_seconds)[timed])
    sizes, times = _prompt_steps(mixed, running_knots, decodes)
    return Service(
        running=running_knots,
        decode_seconds=decodes,
        tokens=sizes,
        seconds=times,
        most_running=most,
        step_tokens=arrangement.limits.tokens,
        cache_tokens=arrangement.cache_tokens,
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


def _prompt_steps(
    steps: Sequence[tuple[int, int, float]], running: np.ndarray, decode_seconds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and seconds of steps with prompt tokens, by classes of nearly as many tokens."""
    tokens, decodes, seconds = (np.array(column, np.float64) for column in zip(*steps, strict=True))
    seconds -= np.interp(np.maximum(decodes, 1), running, decode_seconds) - decode_seconds[0]
    total = tokens + decodes
    classes = np.rint(np.log(total) / np.log(CLASS)).astype(int)
    each = [classes == at for at in np.unique(classes)]
    means = np.array([(total[those].mean(), seconds[those].mean()) for those in each])  # [sizes, 2]
    return means[:, 0], np.maximum.accumulate(means[:, 1])
