"""Which layer of two runs differs first: from the sketches of their probes, against what rounding explains.

Rounding makes each layer's result differ a little, and what differs grows slowly from layer to layer. A layer is named
where the difference exceeds what its precision can round off (`_limits`), or where the length of the activation changes
more than rounding, which has no direction, could make it change.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roofline.common.json_types import JsonMapping

UNIT = {"fp32": 2.0**-24, "amp_fp16": 2.0**-11, "amp_bf16": 2.0**-8}  # half the distance of neighbours, relative
FINEST = {"activations": 1e-5, "gradients": 1e-4}  # sums in float32 of another order, or of another chip
# Units that the first layer rounds off at most; gradients of a model that has learnt are small differences.
FIRST = {"activations": 4.0, "gradients": 32.0}
ADDED = 0.25  # units that another layer adds where none before it differs
GROWTH = 2.0  # a layer may double what it is given; the error of a sketch is in it
SPREAD = 3.0  # standard deviations of a length under rounding
OVER_REPEATS = 4.0  # a difference is another one when it exceeds the greatest among repeats so many times


@dataclass(frozen=True)
class Layer:
    """The difference of one tensor in B, relative to its size in A; its length's change, relative; the limits of both.

    beyond: one of them is exceeded. change_limit None: lengths are not judged.
    """

    name: str
    difference: float
    limit: float
    change: float
    change_limit: float | None
    beyond: bool


@dataclass(frozen=True)
class Layers:
    """What the probes of one step say.

    judged: the weights were to be the same, or repeats say how far they may have grown apart; else nothing is named.
    activation, gradient: the first that differs going forward, going backward; None: none, or not judged.
    """

    step: int
    judged: bool
    by_repeats: bool
    activations: tuple[Layer, ...]
    gradients: tuple[Layer, ...]
    activation: str | None
    gradient: str | None


def compare(a: JsonMapping, b: JsonMapping, repeats: Sequence[JsonMapping] = (), same_weights: bool = True) -> Layers:
    """Two lines of probes.jsonl between which `obstacle` finds none.

    repeats: lines of runs with a's setting at that step.
    """
    forward, known = _layers(a, b, repeats, "activations")
    backward, _ = _layers(a, b, repeats, "gradients")
    judged = same_weights or known
    named = [next((layer.name for layer in each if layer.beyond and judged), None) for each in (forward, backward)]
    return Layers(int(a["step"]), judged, known, forward, backward, named[0], named[1])


def obstacle(a: JsonMapping, b: JsonMapping) -> str | None:
    """Why two lines cannot be compared."""
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
    """In the order in which they are computed; and whether the repeats' differences are the limit.

    Repeats that are equal to the last bit say nothing about another order of additions.
    """
    turn = -1 if kind == "gradients" else 1
    mine, theirs = a[kind][::turn], b[kind][::turn]
    differences = [_difference(x, y) for x, y in zip(mine, theirs, strict=True)]
    noise = [[_difference(x, y) for x, y in zip(mine, line[kind][::turn], strict=True)] for line in repeats]
    known = any(value > 0 for each in noise for value in each)
    unit = max(UNIT[line["precision"]] for line in (a, b))
    limits = _limits(differences, unit, kind)
    lengths: list[float | None] = [None] * len(mine)
    if known:
        limits = _widened(noise, kind, limits if a["precision"] != b["precision"] else None)
    elif kind == "activations":
        parts = zip(mine, differences, limits, strict=True)
        lengths = [_length_limit(part["size"], a["tokens"], min(pair), unit) for part, *pair in parts]
    rows = zip(mine, theirs, differences, limits, lengths, strict=True)
    return tuple(_layer(*row) for row in rows), known


def _layer(x: JsonMapping, y: JsonMapping, difference: float, limit: float, length: float | None) -> Layer:
    change = _ratio(_size(y), _size(x)) - 1
    # "not inside", so that what is not a number is beyond
    beyond = not difference <= limit or (length is not None and not abs(change) <= length)
    return Layer(x["name"], difference, limit, change, length, beyond)


def _widened(noise: Sequence[Sequence[float]], kind: str, rounding: Sequence[float] | None) -> list[float]:
    """Limits from repeats; rounding: of a coarser precision than theirs, which they do not show."""
    limits = [max(FINEST[kind], OVER_REPEATS * max(each)) for each in zip(*noise, strict=True)]
    return limits if rounding is None else [max(pair) for pair in zip(limits, rounding, strict=True)]


def _limits(differences: Sequence[float], unit: float, kind: str) -> list[float]:
    """What rounding explains, for each difference given those before it.

    The first tensor and the first layer may have all that their precision rounds off; each later layer may double the
    greatest difference before it, or add a little where there is none.
    """
    limits: list[float] = []
    for place in range(len(differences)):
        before = max(differences[:place], default=0.0)
        fresh = FIRST[kind] if place < 2 else ADDED
        limits.append(GROWTH * before + max(FINEST[kind], fresh * unit))
    return limits


def _length_limit(size: int, tokens: int, difference: float, unit: float) -> float:
    """Errors without a direction change a length by 1/sqrt(n) of their own.

    n: as many as are independent: at most those of the tokens, and of the width, for an error of a weight is the same
    for all tokens.
    """
    independent = max(1.0, min(tokens, size / max(1, tokens)))
    return max(1e-6, unit / 8) + SPREAD * difference / math.sqrt(independent)


def _size(part: JsonMapping) -> float:
    return float(part["rms"] if "rms" in part else part["norm"])


def _difference(x: JsonMapping, y: JsonMapping) -> float:
    """||x - y|| / ||x||, estimated from sketches."""
    apart = np.array(x["sketch"], float) - np.array(y["sketch"], float)
    return _ratio(float(np.linalg.norm(apart)), _size(x))


def _ratio(value: float, base: float) -> float:
    if base == 0:
        return 0.0 if value == 0 else math.inf
    return value / base
