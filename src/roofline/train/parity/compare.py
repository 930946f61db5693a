"""Whether two training runs are the same run: their differences step by step, against a declared margin.

The runs are to have read the same samples, so that the losses of a step can be subtracted: what is common to them, the
data, cancels, and rounding that training has amplified is left.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonObject
from roofline.train.data import receipts
from roofline.train.parity import layers as parity_layers
from roofline.train.parity.findings import Difference, HandOver, Joint, Noise, Pair, Parity, Samples
from roofline.train.parity.layers import Layers
from roofline.train.parity.recorded_run import Recorded
from roofline.train.parity.statistics import Series, change, jumps, mean
from roofline.train.parity.verdict import FEWEST, decide, notes

MARGIN = 0.01  # nats: 1 % of perplexity
# Settings that say where things are kept and shown, not what is computed.
ELSEWHERE = (
    "run_",
    "save_",
    "load_",
    "autoresume",
    "console_",
    "log_to_",
    "progress_",
    "loggers",
    "probes",
    "callbacks",
)
BANDS = 20  # parts of a run for which repeats tell their scatter


def pair(a: Recorded, b: Recorded) -> Pair:
    """Raises ConfigError where they have no step in common."""
    steps, mine, theirs = np.intersect1d(a.steps, b.steps, return_indices=True)
    if not len(steps):
        spans = " and ".join(f"{run.steps[0]} to {run.steps[-1]}" for run in (a, b))
        raise ConfigError(f"{a.folder} and {b.folder} have no step in common (they have {spans}): name two runs")
    one, two = a.loss[mine], b.loss[theirs]
    norms = a.norm[mine], b.norm[theirs]
    bits = np.array_equal(one, two, equal_nan=True) and np.array_equal(norms[0], norms[1], equal_nan=True)
    fine = np.isfinite(one) & np.isfinite(two)
    broken = np.flatnonzero(np.isfinite(one) != np.isfinite(two))
    good = [np.isfinite(norm) & (norm > 0) for norm in norms]
    both = good[0] & good[1]
    return Pair(
        steps[fine],
        (two - one)[fine],
        np.log(norms[1][both] / norms[0][both]),
        bits,
        int(steps[broken[0]]) if len(broken) else None,
    )


def compare(
    a: Recorded,
    b: Recorded,
    repeats: Sequence[Recorded] = (),
    margin: float = MARGIN,
    handovers: Sequence[int] = (),
) -> Parity:
    """B against A. repeats: further runs of A's setting. margin: nats that a mean difference may have.

    handovers: steps done when a run changed hands, beside those that relay.json names. Raises ConfigError.
    """
    if not margin > 0:
        raise ConfigError(f"--margin {margin:g}: it must be above 0")
    both = pair(a, b)
    noise = _noise(a, repeats, both) if repeats else None
    enough = len(both.loss) >= FEWEST
    moved = change(both.loss) if enough else None
    layers, obstacle = _layers(a, b, repeats)
    found = Parity(
        verdict="",
        why="",
        a=str(a.folder),
        b=str(b.folder),
        steps=len(both.steps),
        first=int(both.steps[0]) if len(both.steps) else 0,
        last=int(both.steps[-1]) if len(both.steps) else 0,
        margin=margin,
        samples=_samples(a, b),
        loss=_difference(both, noise) if enough else None,
        norm=mean(both.norm) if len(both.norm) >= FEWEST else None,
        noise=noise,
        change=moved,
        change_at=int(both.steps[moved.at - 1]) if moved is not None else None,
        handovers=_handovers(both, (a, b), handovers),
        layers=layers,
        joints=tuple(joint for run in (a, b) for joint in _joints(run)),
        settings=tuple(_settings(a, b)),
        notes=(),
    )
    verdict, why = decide(found, both, obstacle)
    found = replace(found, verdict=verdict, why=why)
    return replace(found, notes=tuple(notes(found, obstacle)))


def _settings(a: Recorded, b: Recorded) -> Iterator[tuple[str, Any, Any]]:
    """Only where both have left theirs."""
    if not a.settings or not b.settings:
        return
    for key in dict.fromkeys((*a.settings, *b.settings)):
        one, two = a.settings.get(key), b.settings.get(key)
        if one != two and not key.startswith(ELSEWHERE):
            yield key, one, two


def _samples(a: Recorded, b: Recorded) -> Samples | None:
    if a.order is None or b.order is None:
        return None
    found = receipts.compare(a.order, b.order)
    return Samples(found.steps, found.step)


def _difference(both: Pair, noise: Noise | None) -> Difference:
    loss, quarter = both.loss, len(both.loss) // 4
    size = np.abs(loss)
    return Difference(
        mean(loss, noise.mean if noise else 0.0),
        float(loss.std()),
        float(size.max()),
        int(both.steps[int(size.argmax())]),
        mean(loss[-quarter:], noise.quarter if noise else 0.0),
        float(size[:quarter].mean()),
        float(size[-quarter:].mean()),
    )


def _noise(a: Recorded, repeats: Sequence[Recorded], both: Pair) -> Noise:
    """Raises ConfigError for a repeat that read other samples, or has no step that A and B have."""
    for run in repeats:
        samples = _samples(a, run)
        if samples is not None and samples.step is not None:
            raise ConfigError(
                f"{run.folder} is no repeat of {a.folder}: from step {samples.step} on it read other samples"
            )
    runs = [a, *repeats]
    pairs = [pair(one, two) for i, one in enumerate(runs) for two in runs[i + 1 :]]
    kept = [np.isin(each.steps, both.steps) for each in pairs]
    if not all(keep.any() for keep in kept):
        raise ConfigError("a --repeat has no step that both runs have: let it run as long as they did")
    steps = [each.steps[keep] for each, keep in zip(pairs, kept, strict=True)]
    loss = [each.loss[keep] for each, keep in zip(pairs, kept, strict=True)]
    late = both.steps[-max(1, len(both.steps) // 4) :][0]
    ends = [values[at >= late] for values, at in zip(loss, steps, strict=True)]
    everything, places = np.concatenate(loss), np.concatenate(steps)
    bands = []
    for part in np.array_split(both.steps, min(BANDS, len(both.steps))):
        inside = np.abs(everything[(places >= part[0]) & (places <= part[-1])])
        if len(inside):
            bands.append((int(part[0]), int(part[-1]), float(np.quantile(inside, 0.95))))
    return Noise(
        len(pairs),
        float(np.sqrt(np.square(everything).mean())),
        float(np.quantile(np.abs(everything), 0.95)),
        _spread(loss),
        _spread(ends),
        tuple(bands),
    )


def _spread(series: Sequence[Series]) -> float:
    """The root mean square of their means: the mean of a pair is 0 but for chance, whichever run comes first."""
    means = [float(values.mean()) for values in series if len(values)]
    return math.sqrt(sum(value * value for value in means) / len(means)) if means else 0.0


def _handovers(both: Pair, runs: Sequence[Recorded], given: Sequence[int]) -> tuple[HandOver, ...]:
    named = {step: name for run in runs for step, name in run.handovers}
    for step in given:
        if not len(both.steps) or not both.steps[0] <= step < both.steps[-1]:
            raise ConfigError(f"--handover {step} is not between the first and the last step that both runs have")
        named.setdefault(step, "")
    inside = [step for step in sorted(named) if len(both.steps) and both.steps[0] <= step < both.steps[-1]]
    places = [int(np.searchsorted(both.steps, step, side="right")) for step in inside]
    found = {jump.at: jump for jump in jumps(both.loss, places)} if len(both.loss) >= FEWEST else {}
    return tuple(HandOver(step, named[step], found.get(at)) for step, at in zip(inside, places, strict=True))


def _layers(a: Recorded, b: Recorded, repeats: Sequence[Recorded]) -> tuple[Layers | None, str | None]:
    """At the first step of which both have a probe; the other: why they cannot be compared.

    The weights are taken to be the same where one of the runs begins: there it starts afresh, or from the other's
    checkpoint.
    """
    common = sorted({line["step"] for line in a.probes} & {line["step"] for line in b.probes})
    if not common:
        return None, None
    step = common[0]
    mine, theirs = _at(a, step)[0], _at(b, step)[0]
    obstacle = parity_layers.obstacle(mine, theirs)
    if obstacle is not None:
        return None, obstacle
    others = [line for run in repeats for line in _at(run, step)[:1] if not parity_layers.obstacle(mine, line)]
    begins = step in (a.probes[0]["step"], b.probes[0]["step"])
    return parity_layers.compare(mine, theirs, others, begins), None


def _at(run: Recorded, step: int) -> list[JsonObject]:
    return [line for line in run.probes if line["step"] == step]


def _joints(run: Recorded) -> list[Joint]:
    """Where a run's process ended at a checkpoint and another went on from it, both probed the same weights."""
    found = []
    for step in sorted({line["step"] for line in run.probes}):
        lines = _at(run, step)
        if len(lines) > 1 and parity_layers.obstacle(lines[0], lines[-1]) is None:
            found.append(Joint(str(run.folder), parity_layers.compare(lines[0], lines[-1])))
    return found
