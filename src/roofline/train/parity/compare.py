"""Compares two training runs step by step, against a declared margin, to decide whether they are the same run.

Both runs must have read the same samples. Then the effect of the data cancels in the difference of a step's losses, and
what remains is rounding that training has amplified.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonObject
from roofline.train.data import receipts
from roofline.train.parity import layers as parity_layers
from roofline.train.parity.findings import HandOver, Joint, LossDifference, Noise, Parity, RunPair, SampleAgreement
from roofline.train.parity.layers import Layers
from roofline.train.parity.recorded_run import RecordedRun
from roofline.train.parity.statistics import Series, change, jumps, mean, spike
from roofline.train.parity.verdict import FEWEST, decide, notes

MARGIN = 0.01  # nats: 1 % of perplexity
# Settings of where results are stored and shown, which do not change what is computed.
OUTPUT_SETTINGS = (
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
BANDS = 20  # parts of a run, for each of which the scatter of repeats is computed


def pair(a: RecordedRun, b: RecordedRun) -> RunPair:
    """The differences of two runs on their common steps. Raises ConfigError if there are none."""
    steps, mine, theirs = np.intersect1d(a.steps, b.steps, return_indices=True)
    if not len(steps):
        spans = " and ".join(f"{run.steps[0]} to {run.steps[-1]}" for run in (a, b))
        raise ConfigError(f"{a.folder} and {b.folder} have no step in common (they have {spans}): name two runs")
    one, two = a.loss[mine], b.loss[theirs]
    norms = a.norm[mine], b.norm[theirs]
    bits = np.array_equal(one, two, equal_nan=True) and np.array_equal(norms[0], norms[1], equal_nan=True)
    finite = np.isfinite(one) & np.isfinite(two)
    broken = np.flatnonzero(np.isfinite(one) != np.isfinite(two))
    positive = np.logical_and(*(np.isfinite(norm) & (norm > 0) for norm in norms))
    return RunPair(
        steps[finite],
        (two - one)[finite],
        np.log(norms[1][positive] / norms[0][positive]),
        bits,
        int(steps[broken[0]]) if len(broken) else None,
    )


def compare(
    a: RecordedRun,
    b: RecordedRun,
    repeats: Sequence[RecordedRun] = (),
    margin: float = MARGIN,
    handovers: Sequence[int] = (),
) -> Parity:
    """Compare B with A.

    repeats: further runs of A's setting. margin: the largest mean difference that counts as equal, in nats. handovers:
    steps after which a run changed hands, in addition to those in relay.json. Raises ConfigError.
    """
    if not margin > 0:
        raise ConfigError(f"--margin {margin:g}: it must be above 0")
    runs = pair(a, b)
    noise = _noise(a, repeats, runs) if repeats else None
    enough = len(runs.loss) >= FEWEST
    changed = change(runs.loss) if enough else None
    spiked = spike(runs.loss, max(margin, noise.largest if noise else 0.0)) if enough else None
    layers, obstacle = _layers(a, b, repeats)
    parity = Parity(
        verdict="",
        why="",
        a=str(a.folder),
        b=str(b.folder),
        steps=len(runs.steps),
        first=int(runs.steps[0]) if len(runs.steps) else 0,
        last=int(runs.steps[-1]) if len(runs.steps) else 0,
        margin=margin,
        samples=_samples(a, b),
        loss=_difference(runs, noise) if enough else None,
        norm=mean(runs.norm) if len(runs.norm) >= FEWEST else None,
        noise=noise,
        change=changed,
        change_at=int(runs.steps[changed.at - 1]) if changed is not None else None,
        spike=spiked,
        spike_at=int(runs.steps[spiked.at]) if spiked is not None else None,
        handovers=_handovers(runs, (a, b), handovers),
        layers=layers,
        joints=tuple(joint for run in (a, b) for joint in _joints(run)),
        settings=tuple(_settings(a, b)),
        notes=(),
    )
    verdict, why = decide(parity, runs, obstacle)
    parity = replace(parity, verdict=verdict, why=why)
    return replace(parity, notes=tuple(notes(parity, obstacle)))


def _settings(a: RecordedRun, b: RecordedRun) -> Iterator[tuple[str, object, object]]:
    """(key, A's, B's) of the settings that differ, if both runs have recorded theirs."""
    if not a.settings or not b.settings:
        return
    for key in dict.fromkeys((*a.settings, *b.settings)):
        one, two = a.settings.get(key), b.settings.get(key)
        if one != two and not key.startswith(OUTPUT_SETTINGS):
            yield key, one, two


def _samples(a: RecordedRun, b: RecordedRun) -> SampleAgreement | None:
    if a.order is None or b.order is None:
        return None
    comparison = receipts.compare(a.order, b.order)
    return SampleAgreement(comparison.steps, comparison.step, comparison.content, comparison.unproven)


def _difference(runs: RunPair, noise: Noise | None) -> LossDifference:
    loss, quarter = runs.loss, len(runs.loss) // 4
    size = np.abs(loss)
    return LossDifference(
        mean=mean(loss, noise.mean if noise else 0.0),
        sd=float(loss.std()),
        largest=float(size.max()),
        at=int(runs.steps[int(size.argmax())]),
        quarter=mean(loss[-quarter:], noise.quarter if noise else 0.0),
        early=float(size[:quarter].mean()),
        late=float(size[-quarter:].mean()),
    )


def _noise(a: RecordedRun, repeats: Sequence[RecordedRun], compared: RunPair) -> Noise:
    """How far A and its repeats differ. Raises ConfigError if a repeat read other samples or has no common step."""
    for run in repeats:
        samples = _samples(a, run)
        if samples is not None and samples.step is not None:
            raise ConfigError(
                f"{run.folder} is no repeat of {a.folder}: from step {samples.step} on it read other samples"
            )
    runs = [a, *repeats]
    pairs = [pair(one, two) for i, one in enumerate(runs) for two in runs[i + 1 :]]
    common = [np.isin(each.steps, compared.steps) for each in pairs]
    if not all(mask.any() for mask in common):
        raise ConfigError("a --repeat has no step that both runs have: let it run as long as they did")
    steps = [each.steps[mask] for each, mask in zip(pairs, common, strict=True)]
    loss = [each.loss[mask] for each, mask in zip(pairs, common, strict=True)]
    late = compared.steps[-max(1, len(compared.steps) // 4)]
    ends = [values[at >= late] for values, at in zip(loss, steps, strict=True)]
    everything, places = np.concatenate(loss), np.concatenate(steps)
    bands = []
    for part in np.array_split(compared.steps, min(BANDS, len(compared.steps))):
        inside = np.abs(everything[(places >= part[0]) & (places <= part[-1])])
        if len(inside):
            bands.append((int(part[0]), int(part[-1]), float(np.quantile(inside, 0.95))))
    return Noise(
        pairs=len(pairs),
        sd=float(np.sqrt(np.square(everything).mean())),
        quantile=float(np.quantile(np.abs(everything), 0.95)),
        largest=float(np.abs(everything).max()),
        mean=_spread(loss),
        quarter=_spread(ends),
        bands=tuple(bands),
    )


def _spread(series: Sequence[Series]) -> float:
    """The root mean square of the series' means."""
    means = [float(values.mean()) for values in series if len(values)]
    return math.sqrt(sum(value * value for value in means) / len(means)) if means else 0.0


def _handovers(pair_: RunPair, runs: Sequence[RecordedRun], more: Sequence[int]) -> tuple[HandOver, ...]:
    steps = pair_.steps
    names = {step: name for run in runs for step, name in run.handovers}
    for step in more:
        if not len(steps) or not steps[0] <= step < steps[-1]:
            raise ConfigError(f"--handover {step} is not between the first and the last step that both runs have")
        names.setdefault(step, "")
    inside = [step for step in sorted(names) if len(steps) and steps[0] <= step < steps[-1]]
    places = [int(np.searchsorted(steps, step, side="right")) for step in inside]
    jump_at = {jump.at: jump for jump in jumps(pair_.loss, places)} if len(pair_.loss) >= FEWEST else {}
    return tuple(HandOver(step, names[step], jump_at.get(at)) for step, at in zip(inside, places, strict=True))


def _layers(a: RecordedRun, b: RecordedRun, repeats: Sequence[RecordedRun]) -> tuple[Layers | None, str | None]:
    """The layers at the first step with probes of both runs, or the reason why they cannot be compared.

    Weights should be equal at the first probe of either run: it starts there, or from the other's checkpoint.
    """
    common = sorted({line["step"] for line in a.probes} & {line["step"] for line in b.probes})
    if not common:
        return None, None
    step = common[0]
    mine, theirs = _probes_at(a, step)[0], _probes_at(b, step)[0]
    obstacle = parity_layers.obstacle(mine, theirs)
    if obstacle is not None:
        return None, obstacle
    noise = [line for run in repeats for line in _probes_at(run, step)[:1] if not parity_layers.obstacle(mine, line)]
    begins = step in (a.probes[0]["step"], b.probes[0]["step"])
    return parity_layers.compare(mine, theirs, noise, begins), None


def _probes_at(run: RecordedRun, step: int) -> list[JsonObject]:
    return [line for line in run.probes if line["step"] == step]


def _joints(run: RecordedRun) -> list[Joint]:
    """The steps at which one process ended and another continued, which have both probed the same weights."""
    joints = []
    for step in sorted({line["step"] for line in run.probes}):
        lines = _probes_at(run, step)
        if len(lines) > 1 and parity_layers.obstacle(lines[0], lines[-1]) is None:
            joints.append(Joint(str(run.folder), parity_layers.compare(lines[0], lines[-1])))
    return joints
