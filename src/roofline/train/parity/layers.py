"""Finds the first layer in which two runs differ by more than rounding, from the sketches of their probes.

Rounding makes each layer's result differ a little, and differences grow slowly from layer to layer. A layer is named if
its difference exceeds what its precision can cause (`_limits`), or if the length of its activation changes by more than
rounding, which has no direction, can cause.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roofline.common.json_types import JsonMapping

UNIT = {"fp32": 2.0**-24, "amp_fp16": 2.0**-11, "amp_bf16": 2.0**-8}  # relative rounding error
FINEST = {"activations": 1e-5, "gradients": 1e-4}  # of float32 sums in another order or on another chip
# Rounding of the first layer in units, at most; gradients of a trained model are small differences of large numbers.
FIRST = {"activations": 4.0, "gradients": 32.0}
ADDED = 0.25  # units that a later layer adds
GROWTH = 2.0  # a layer may double the difference of its input; includes the error of a sketch
SPREAD = 3.0  # standard deviations that rounding may change a length by
OVER_REPEATS = 4.0  # a difference is real if it exceeds the greatest one among repeats so many times


@dataclass(frozen=True)
class Layer:
    """One tensor of two runs.

    difference: the norm of B's minus A's, relative to A's. change: of the norm, relative. limit, change_limit: what
    rounding explains; None: not judged. beyond: a limit is exceeded.
    """

    name: str
    difference: float
    limit: float
    change: float
    change_limit: float | None
    beyond: bool


@dataclass(frozen=True)
class Layers:
    """A comparison of the probes of one step.

    judged: weights should be equal, or repeats show how far they may have diverged; otherwise no layer is named.
    activation, gradient: the first that differs in the forward and in the backward pass; None: none, or not judged.
    """

    step: int
    judged: bool
    by_repeats: bool
    activations: tuple[Layer, ...]
    gradients: tuple[Layer, ...]
    activation: str | None
    gradient: str | None


def compare(a: JsonMapping, b: JsonMapping, repeats: Sequence[JsonMapping] = (), same_weights: bool = True) -> Layers:
    """Compare two lines of probes.jsonl for which `obstacle` returns None.

    repeats: lines of that step from repeats of a's run. same_weights: both runs should have the same weights.
    """
    forward, by_repeats = _layers(a, b, repeats, "activations")
    backward, _ = _layers(a, b, repeats, "gradients")
    judged = same_weights or by_repeats
    first = [next((layer.name for layer in layers if layer.beyond and judged), None) for layers in (forward, backward)]
    return Layers(
        step=int(a["step"]),
        judged=judged,
        by_repeats=by_repeats,
        activations=forward,
        gradients=backward,
        activation=first[0],
        gradient=first[1],
    )


def obstacle(a: JsonMapping, b: JsonMapping) -> str | None:
    """Why two lines cannot be compared; None if they can."""
    if (a["rows"], a["tokens"]) != (b["rows"], b["tokens"]):
        return "their probes are of other rows: the data or its order is another"
    for kind in ("activations", "gradients"):
        shapes = [[(part["name"], part["size"]) for part in line[kind]] for line in (a, b)]
        if shapes[0] != shapes[1]:
            return f"their models have other shapes: the probes' {kind} differ in number or size"
    return None


def _layers(
    a: JsonMapping, b: JsonMapping, repeats: Sequence[JsonMapping], kind: str
) -> tuple[tuple[Layer, ...], bool]:
    """The layers in the order in which they are computed, and whether the limits are from repeats.

    Repeats that are bit-equal do not show what another order of additions does, so they give no limits.
    """
    turn = -1 if kind == "gradients" else 1
    mine, theirs = a[kind][::turn], b[kind][::turn]
    differences = [_difference(x, y) for x, y in zip(mine, theirs, strict=True)]
    noise = [[_difference(x, y) for x, y in zip(mine, line[kind][::turn], strict=True)] for line in repeats]
    by_repeats = any(value > 0 for values in noise for value in values)
    unit = max(UNIT[line["precision"]] for line in (a, b))
    limits = _limits(differences, unit, kind)
    lengths: list[float | None] = [None] * len(mine)
    if by_repeats:
        limits = _limits_of_repeats(noise, kind, limits if a["precision"] != b["precision"] else None)
    elif kind == "activations":
        parts = zip(mine, differences, limits, strict=True)
        lengths = [_length_limit(part["size"], a["tokens"], min(pair), unit) for part, *pair in parts]
    rows = zip(mine, theirs, differences, limits, lengths, strict=True)
    return tuple(_layer(*row) for row in rows), by_repeats


def _layer(x: JsonMapping, y: JsonMapping, difference: float, limit: float, length: float | None) -> Layer:
    change = _ratio(_size(y) - _size(x), _size(x))
    # Written as "not inside" so that nan is beyond.
    beyond = not difference <= limit or (length is not None and not abs(change) <= length)
    return Layer(name=x["name"], difference=difference, limit=limit, change=change, change_limit=length, beyond=beyond)


def _limits_of_repeats(noise: Sequence[Sequence[float]], kind: str, rounding: Sequence[float] | None) -> list[float]:
    """Limits from repeats. rounding: limits for a coarser precision, which repeats do not show."""
    limits = [max(FINEST[kind], OVER_REPEATS * max(values)) for values in zip(*noise, strict=True)]
    return limits if rounding is None else [max(pair) for pair in zip(limits, rounding, strict=True)]


def _limits(differences: Sequence[float], unit: float, kind: str) -> list[float]:
    """What rounding explains of each difference, given those before it.

    The first tensor and the first layer may differ by all of their precision's rounding; each later layer may double
    the greatest difference before it and add a little.
    """
    limits: list[float] = []
    for place in range(len(differences)):
        before = max(differences[:place], default=0.0)
        fresh = FIRST[kind] if place < 2 else ADDED
        limits.append(GROWTH * before + max(FINEST[kind], fresh * unit))
    return limits


def _length_limit(size: int, tokens: int, difference: float, unit: float) -> float:
    """What rounding may change a length by: n independent errors of random direction add up to 1/sqrt(n) of their own.

    n is at most the number of tokens, and at most the width, as the error of a weight is the same for all tokens.
    """
    independent = max(1.0, min(tokens, size / max(1, tokens)))
    return max(1e-6, unit / 8) + SPREAD * difference / math.sqrt(independent)


def _size(part: JsonMapping) -> float:
    return float(part["rms"] if "rms" in part else part["norm"])


def _difference(x: JsonMapping, y: JsonMapping) -> float:
    """The estimate of ||x - y|| / ||x|| from sketches."""
    difference = np.array(x["sketch"], float) - np.array(y["sketch"], float)
    return _ratio(float(np.linalg.norm(difference)), _size(x))


def _ratio(value: float, base: float) -> float:
    if base == 0:
        return 0.0 if value == 0 else math.inf
    return value / base
