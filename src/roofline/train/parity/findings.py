"""The findings of `roofline parity` about two runs, as plain data."""

import math
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from roofline.common.json_types import JsonObject
from roofline.train.parity.layers import Layers
from roofline.train.parity.statistics import Change, Jump, Mean, Series, Spike


@dataclass(frozen=True)
class LossDifference:
    """B's loss minus A's, in nats.

    largest, at: the greatest absolute difference and its step. quarter: the mean over the last quarter of the steps.
    early, late: the mean absolute difference in the first and in the last quarter.
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
    """How far A and its repeats differ from each other, over all pairs of them, in nats.

    quantile, largest: 95 % and all of the single absolute differences are at most that. mean, quarter: the root mean
    square of the pairs' mean differences, over all steps and over the last quarter. bands: (first step, last step,
    quantile in between).
    """

    pairs: int
    sd: float
    quantile: float
    largest: float
    mean: float
    quarter: float
    bands: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True)
class SampleAgreement:
    """What the order receipts show: over `steps` steps, the samples differ from `step` on (None: nowhere).

    content: the numbers of the samples agree there, but not what their rows held. unproven: steps of which a run has
    not recorded what the rows held.
    """

    steps: int
    step: int | None
    content: bool
    unproven: int


@dataclass(frozen=True)
class HandOver:
    """After `step` steps `name` took over. jump: of the difference there; None if a leg is too short to judge it."""

    step: int
    name: str
    jump: Jump | None


@dataclass(frozen=True)
class Joint:
    """A point where a run was stopped and resumed, with probes of both sides. run: the folder of A or B."""

    run: str
    layers: Layers


@dataclass(frozen=True)
class Parity:
    """All findings; None stands for what the runs have not recorded.

    a, b: folders. why: a sentence with the figures that decided. steps, first, last: the common steps. margin: nats.
    norm: the logarithm of B's gradient norms over A's. change_at: the last step before `change`. spike, spike_at: a
    single step whose difference is far from those around it, and its number. layers: at the first
    step with probes of both runs. joints: where a run was stopped and resumed. settings: (key, A's, B's) of those that
    differ, except names and places.
    """

    verdict: str
    why: str
    a: str
    b: str
    steps: int
    first: int
    last: int
    margin: float
    samples: SampleAgreement | None
    loss: LossDifference | None
    norm: Mean | None
    noise: Noise | None
    change: Change | None
    change_at: int | None
    spike: Spike | None
    spike_at: int | None
    handovers: tuple[HandOver, ...]
    layers: Layers | None
    joints: tuple[Joint, ...]
    settings: tuple[tuple[str, object, object], ...]
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return self.verdict in ("identical", "equivalent")

    def plain(self) -> JsonObject:
        """The findings for JSON, which has no infinities."""
        return {**{key: _finite(value) for key, value in asdict(self).items()}, "equal": self.equal}


@dataclass(frozen=True)
class RunPair:
    """Two runs on their common steps.

    steps, loss: B's loss minus A's, in nats, where both are finite. norm: the difference of the logarithms of their
    gradient norms, where both are finite. bits: all are bit-equal. broken: a step where only one loss is finite.
    """

    steps: NDArray[np.int64]
    loss: Series
    norm: Series
    bits: bool
    broken: int | None


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
