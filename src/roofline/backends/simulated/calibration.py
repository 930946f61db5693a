"""What real steps take beyond their least time at the roofs: assumed, or fitted to steps that were measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from roofline.common.errors import ConfigError

TERMS = 4  # of a step's time: reads, arithmetic, the step itself, its rows


@dataclass(frozen=True)
class Calibration:
    """How near to the roofs steps come.

    reads: share of the read roof that ops reach which reads bound, as most of a decode step is; arithmetic: share of
    the roof of arithmetic where that bounds, as in the prefill of a long prompt; step_seconds: of each step whatever is
    in it; row_seconds: of each row of logits; link_seconds: of each exchange among devices that share layers, beside
    its bytes; source: where the figures are from, in words.
    """

    reads: float = 1.0
    arithmetic: float = 1.0
    step_seconds: float = 0.0
    row_seconds: float = 0.0
    link_seconds: float = 0.0
    source: str = "the roofs themselves"

    def __post_init__(self) -> None:
        for name in ("reads", "arithmetic"):
            share = getattr(self, name)
            if not share > 0:
                raise ConfigError(f"{name}={share:g}: a share of a roof is above 0; give one such as 0.65")
        for name in ("step_seconds", "row_seconds", "link_seconds"):
            seconds = getattr(self, name)
            if not 0 <= seconds < float("inf"):
                raise ConfigError(f"{name}={seconds:g}: give seconds of at least 0")

    def seconds(self, reads: float, arithmetic: float, rows: float) -> float:
        """The time of a step. reads, arithmetic: the least time of the ops that each of them bounds."""
        return reads / self.reads + arithmetic / self.arithmetic + self.step_seconds + self.row_seconds * rows


def fitted(steps: Sequence[tuple[float, float, float]], seconds: Sequence[float], source: str) -> Calibration:
    """The calibration that is nearest to measured steps, by least squares over relative errors.

    Args:
        steps: of each step, the least seconds of the ops that reads bound, of those that arithmetic bounds, its rows.
        seconds: that each took.

    A share that the steps say nothing of, because no op of theirs is bound so, is that of the other one. Raises
    ConfigError where the steps are fewer than the terms.
    """
    if len(steps) < TERMS:
        raise ConfigError(f"a calibration needs at least {TERMS} measured steps, not {len(steps)}: measure more")
    times = np.array(seconds, np.float64)
    table = np.array([(reads, arithmetic, 1.0, rows) for reads, arithmetic, rows in steps])  # [steps, TERMS]
    factors = _nonnegative(table / times[:, None], np.ones(len(times)))
    reads, arithmetic = (1 / factor if factor > 0 else None for factor in factors[:2])
    if reads is None and arithmetic is None:
        raise ConfigError("the measured steps do not depend on what they read or compute: measure larger ones")
    return Calibration(
        reads=reads or arithmetic or 1.0,
        arithmetic=arithmetic or reads or 1.0,
        step_seconds=float(factors[2]),
        row_seconds=float(factors[3]),
        source=source,
    )


def _nonnegative(table: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The least-squares solution of table @ x = values without negative x. There are few columns, so that the best of
    all choices of columns which may be above 0 is looked for."""
    columns = table.shape[1]
    best, least = np.zeros(columns), float(values @ values)
    scale = np.abs(table).max(axis=0)
    used = [i for i in range(columns) if scale[i] > 0]
    for count in range(1, len(used) + 1):
        for chosen in combinations(used, count):
            part = table[:, chosen] / scale[list(chosen)]
            solution = np.linalg.lstsq(part, values, rcond=None)[0]
            error = float(((part @ solution - values) ** 2).sum())
            if (solution >= 0).all() and error < least - 1e-15:
                best, least = np.zeros(columns), error
                best[list(chosen)] = solution / scale[list(chosen)]
    return best
