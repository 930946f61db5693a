"""The findings of `parity` as a verdict, a sentence for it, and what else is worth saying."""

import math
from collections.abc import Iterator
from pathlib import Path

from roofline.train.parity.findings import HandOver, Pair, Parity
from roofline.train.parity.layers import Layers
from roofline.train.parity.statistics import Mean

FEWEST = 64  # steps
NORM_MARGIN = 0.05  # of the logarithm of gradient norms
ALARM = 0.01  # how often a drift, a jump or a step may be found by chance

Verdict = tuple[str, str]  # one of identical, equivalent, drifting, different, undecided; why


def decide(found: Parity, both: Pair, obstacle: str | None) -> Verdict:
    """(verdict, why): what cannot be the same run first, then what the losses say."""
    return (
        _other_samples(found)
        or _identical(found, both)
        or _other_numbers(found, both, obstacle)
        or _other_layers(found)
        or _too_short(found)
        or _other_losses(found)
        or _other_norms(found)
        or _equivalent(found)
        or _undecided(found)
    )


def notes(found: Parity, obstacle: str | None) -> Iterator[str]:
    """What did not decide, and is worth knowing."""
    loss, moved = found.loss, found.change
    if found.samples is None:
        yield "one of the runs has no order receipts: that they read the same samples is not shown"
    if obstacle is None and found.layers is None:
        yield "no probes of a common step: layers were not compared (`probes: true` records them)"
    if found.layers is not None and not found.layers.judged:
        yield (
            f"the first common probe is of step {found.layers.step}, when weights had grown apart: layers are not "
            "judged without --repeat"
        )
    if loss is not None and moved is None:
        yield "the differences are too strongly correlated for so few steps to look for drift and steps in them"
    if found.handovers and any(handover.jump is None for handover in found.handovers):
        yield "hand-overs with fewer than 20 steps on a side, or 40 between them, are not judged"
    if moved is not None and moved.p_trend <= ALARM and found.verdict in ("equivalent", "undecided"):
        yield f"the difference has a trend of {_signed(100 * moved.slope)} nats in 100 steps"
    for handover in found.handovers:
        if handover.jump is not None and handover.jump.p <= ALARM and abs(handover.jump.jump) <= found.margin:
            yield f"{_place(handover)} the difference jumps by {_signed(handover.jump.jump)} nats, within the margin"
    if loss is not None and found.noise is not None and loss.sd > 2 * found.noise.sd:
        yield f"B's losses scatter about A's with sd {loss.sd:.2g}, those of repeats of A with {found.noise.sd:.2g}"


def _other_samples(found: Parity) -> Verdict | None:
    if found.samples is None or found.samples.step is None:
        return None
    named = "`roofline data verify-order` names the first"
    return "different", f"from step {found.samples.step:,} on the runs read other samples ({named})"


def _identical(found: Parity, both: Pair) -> Verdict | None:
    if not both.bits:
        return None
    order = "" if found.samples is None else ", and they read the same samples in the same order"
    return "identical", f"all losses and gradient norms of the {found.steps:,} common steps are equal bit by bit{order}"


def _other_numbers(found: Parity, both: Pair, obstacle: str | None) -> Verdict | None:
    if obstacle is not None:
        return "different", obstacle
    if both.broken is not None:
        return "different", f"after step {both.broken:,} the loss of one of the runs is not finite"
    return None


def _other_layers(found: Parity) -> Verdict | None:
    if found.layers is not None:
        said = _layer(found.layers)
        if said is not None:
            return "different", f"at step {found.layers.step:,}, {said}"
    for joint in found.joints:
        said = _layer(joint.layers)
        if said is not None:
            return "different", f"where {_name(joint.run)} went on at step {joint.layers.step:,}, {said}"
    return None


def _layer(layers: Layers) -> str | None:
    """The first layer that rounding does not explain."""
    for name, each, what, way in (
        (layers.activation, layers.activations, "is the first tensor to differ", "before"),
        (layers.gradient, layers.gradients, "has the first gradient to differ, from the loss backward", "above"),
    ):
        if name is None:
            continue
        layer = next(layer for layer in each if layer.name == name)
        cause = "repeats" if layers.by_repeats else "rounding"
        if layer.difference > layer.limit or layer.change_limit is None:
            figures = f"by {layer.difference:.2g} of its size, where {cause} explains {layer.limit:.2g}"
        else:
            figures = (
                f"its length is {layer.change:+.2g} longer or shorter, where {cause} explains {layer.change_limit:.2g}"
            )
        return f"{name} {what}: {figures}; nothing {way} it does"
    return None


def _too_short(found: Parity) -> Verdict | None:
    if found.loss is not None:
        return None
    return "undecided", f"{found.steps} common steps are too few to tell: {FEWEST} are needed"


def _other_losses(found: Parity) -> Verdict | None:
    loss, moved, margin = found.loss, found.change, found.margin
    assert loss is not None
    beyond = [h for h in found.handovers if h.jump is not None and h.jump.p <= ALARM and abs(h.jump.jump) > margin]
    if beyond and beyond[0].jump is not None:
        by = f"{_signed(beyond[0].jump.jump)} nats (p = {beyond[0].jump.p:.1g})"
        return "different", f"{_place(beyond[0])} the difference jumps by {by}, more than the margin of {margin:g}"
    stepped = moved is not None and moved.p_step <= ALARM and abs(moved.after - moved.before) > margin
    drifts = moved is not None and moved.p_trend <= ALARM and abs(loss.quarter.mean) > margin
    if moved is not None and drifts and not (stepped and moved.stepped):
        return "drifting", (
            f"the difference goes on growing, {_signed(100 * moved.slope)} nats in 100 steps (p = "
            f"{moved.p_trend:.1g}): over the last quarter it is {_interval(loss.quarter)}, beyond the margin of "
            f"{margin:g}"
        )
    if moved is not None and stepped:
        return "different", (
            f"after step {found.change_at:,} the difference goes from {_signed(moved.before)} to "
            f"{_signed(moved.after)} nats on average, by more than the margin of {margin:g} (p = {moved.p_step:.1g})"
        )
    if loss.mean.outside(margin):
        return "different", f"B's loss less A's is {_interval(loss.mean)}, outside the margin of {margin:g}"
    return None


def _other_norms(found: Parity) -> Verdict | None:
    if found.norm is None or not found.norm.outside(NORM_MARGIN):
        return None
    by = f"{math.expm1(found.norm.mean):+.1%}"
    return "different", f"B's gradient norms differ from A's by {by} on average, more than {NORM_MARGIN:.0%}"


def _equivalent(found: Parity) -> Verdict | None:
    loss = found.loss
    assert loss is not None
    if not (loss.mean.inside(found.margin) and loss.quarter.inside(found.margin)):
        return None
    moved, steady = found.change, ""
    if moved is not None:
        alike = moved.p_trend > ALARM and moved.p_step > ALARM
        steady = "; no drift, no step" if alike else "; what it drifts stays inside"
    judged = sum(handover.jump is not None for handover in found.handovers)
    if judged:
        steady += f", no jump at {'the hand-over' if judged == 1 else f'the {judged} hand-overs'}"
    return "equivalent", (
        f"over {found.steps:,} common steps B's loss less A's is {_interval(loss.mean)}, inside the margin of "
        f"{found.margin:g}, and so is its last quarter{steady}"
    )


def _undecided(found: Parity) -> Verdict:
    loss = found.loss
    assert loss is not None
    which, part = ("", loss.mean) if not loss.mean.inside(found.margin) else ("over the last quarter ", loss.quarter)
    return "undecided", (
        f"{which}B's loss less A's is {_interval(part)}, and the margin is {found.margin:g}: too few steps, or too "
        "noisy, to tell them apart; let both run longer"
    )


def _interval(part: Mean) -> str:
    return f"{_signed(part.mean)} nats on average ({_signed(part.low)} to {_signed(part.high)} at 90 %)"


def _signed(value: float) -> str:
    return f"{value:+.2g}" if abs(value) < 0.1 else f"{value:+.3f}"


def _place(handover: HandOver) -> str:
    to = f" to {handover.name}" if handover.name else ""
    return f"at the hand-over{to} after step {handover.step:,}"


def _name(folder: str) -> str:
    return Path(folder).name or folder
