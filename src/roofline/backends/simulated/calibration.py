"""What real steps take beyond their least time at the roofs: assumed, or fitted to steps that were measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roofline.common.errors import ConfigError

FASTER = 75  # percentile of a class's shares that is its share: other programs only ever lower them
CLASS = 1.25  # steps whose tokens differ by less than this factor have one share


@dataclass(frozen=True)
class Calibration:
    """How near to the roofs steps come.

    reads: share of the read roof that ops reach which reads bound, as most of a decode step is; arithmetic: share of
    the roof of arithmetic where that bounds, as in the prefill of a long prompt; step_seconds: of each step whatever is
    in it; row_seconds: of each row of logits; link_seconds: of each exchange among devices that share layers, beside
    its bytes; shares: (tokens of a step, share of its limit), ascending, which take the place of all the others where
    there are any; source: where the figures are from, in words.
    """

    reads: float = 1.0
    arithmetic: float = 1.0
    step_seconds: float = 0.0
    row_seconds: float = 0.0
    link_seconds: float = 0.0
    shares: tuple[tuple[float, float], ...] = ()
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

    def seconds(self, reads: float, arithmetic: float, rows: int, tokens: int) -> float:
        """The time of a step. reads, arithmetic: the least time of the ops that each of them bounds."""
        if self.shares:
            return (reads + arithmetic) / self.share_at(tokens)
        return reads / self.reads + arithmetic / self.arithmetic + self.step_seconds + self.row_seconds * rows

    def share_at(self, tokens: int) -> float:
        """The share of its limit that a step of so many tokens reaches, by `shares`."""
        sizes, values = zip(*self.shares, strict=True)
        return float(np.interp(math.log(max(tokens, 1)), np.log(sizes), values))


def fitted(steps: Sequence[tuple[float, int]], seconds: Sequence[float], source: str) -> Calibration:
    """The calibration of measured steps, as shares of their limit by their tokens.

    Args:
        steps: the least seconds at the roofs and the tokens of each.
        seconds: that each took.

    Steps of nearly as many tokens make a class, whose share is that of its faster ones. Raises ConfigError where there
    are no steps.
    """
    if not steps:
        raise ConfigError("a calibration needs measured steps: let some be measured")
    classes: dict[int, list[tuple[int, float]]] = {}
    for (limit, tokens), duration in zip(steps, seconds, strict=True):
        classes.setdefault(round(math.log(tokens) / math.log(CLASS)), []).append((tokens, limit / duration))
    shares = []
    for at in sorted(classes):
        sizes, values = zip(*classes[at], strict=True)
        shares.append((float(np.exp(np.mean(np.log(sizes)))), float(np.percentile(values, FASTER))))
    return Calibration(shares=tuple(shares), source=source)
