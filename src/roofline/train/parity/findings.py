"""What `parity` finds between two runs, as plain data."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roofline.common.json_types import JsonObject
from roofline.train.parity.layers import Layers
from roofline.train.parity.statistics import Change, Jump, Mean, Series


@dataclass(frozen=True)
class Difference:
    """B's loss less A's, nats.

    largest, at: the greatest without its sign, and after which step; quarter: of the last quarter of the steps; early,
    late: the mean difference without its sign in the first and the last quarter.
    """

    mean: Mean
    sd: float
    largest: float
    at: int
    quarter: Mean
    early: float
    late: float


@dataclass(frozen=True)
class Noise:
    """What repeats of A's setting differ by, among each other and from A: over `pairs` pairs, nats.

    quantile: that 95 % of the single differences stay within. mean: the root mean square of the pairs' mean
    differences. bands: (first step, last step, quantile there).
    """

    pairs: int
    sd: float
    quantile: float
    mean: float
    quarter: float
    bands: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True)
class Samples:
    """What the order receipts say: over `steps`, from `step` on (None: nowhere) the samples are others."""

    steps: int
    step: int | None


@dataclass(frozen=True)
class HandOver:
    """After `step` steps `name` took over; the jump of the difference there, None where its legs are too short."""

    step: int
    name: str
    jump: Jump | None


@dataclass(frozen=True)
class Joint:
    """What a run's own probes before and after one step say: `run` is A's or B's folder."""

    run: str
    layers: Layers


@dataclass(frozen=True)
class Parity:
    """All findings. None: not to be had from what the runs left.

    a, b: folders. why: the figures that decided, in a sentence. steps, first, last: those that both have. margin: nats.
    norm: of the logarithm of B's gradient norms over A's. change_at: the step of training behind which `change` stands.
    layers: at the first step of which both runs have a probe. joints: where a run was stopped and went on. settings:
    (key, A's, B's) of those that differ, but for names and places.
    """

    verdict: str
    why: str
    a: str
    b: str
    steps: int
    first: int
    last: int
    margin: float
    samples: Samples | None
    loss: Difference | None
    norm: Mean | None
    noise: Noise | None
    change: Change | None
    change_at: int | None
    handovers: tuple[HandOver, ...]
    layers: Layers | None
    joints: tuple[Joint, ...]
    settings: tuple[tuple[str, Any, Any], ...]
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return self.verdict in ("identical", "equivalent")

    def plain(self) -> JsonObject:
        """For JSON, which has no infinities."""
        return {**_finite(asdict(self)), "equal": self.equal}


@dataclass(frozen=True)
class Pair:
    """Two runs on the steps both have.

    steps, loss: where both losses are finite: B's less A's, nats. norm: the logarithms of gradient norms, B's less A's,
    where both are finite. bits: all are equal to the last bit. broken: a step at which one loss alone is no number.
    """

    steps: NDArray[np.int64]
    loss: Series
    norm: Series
    bits: bool
    broken: int | None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
