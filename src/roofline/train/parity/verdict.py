"""Turns the findings about two runs into a verdict, the reason for it, and notes."""

import math
from collections.abc import Iterator
from pathlib import Path

from roofline.train.parity.findings import HandOver, LossDifference, Parity, RunPair
from roofline.train.parity.layers import Layers
from roofline.train.parity.statistics import Mean

FEWEST = 64  # common steps that a verdict needs
NORM_MARGIN = 0.05  # of the logarithm of gradient norms
ALARM = 0.01  # the probability with which chance may look like a drift, a jump or a step

Verdict = tuple[str, str]  # identical, equivalent, drifting, different or undecided; and the reason


def decide(parity: Parity, pair: RunPair, obstacle: str | None) -> Verdict:
    """The verdict: first what rules out the same run, then what the losses show."""
    if parity.samples is not None and parity.samples.step is not None:
        if parity.samples.content:
            rows = "the sample numbers agree, but not what their rows held"
            return "different", f"from step {parity.samples.step:,} on the runs read another data set ({rows})"
        hint = "`roofline data verify-order` names the first"
        return "different", f"from step {parity.samples.step:,} on the runs read other samples ({hint})"
    if pair.bits:
        proven = parity.samples is not None and not parity.samples.unproven
        order = ", and they read the same samples in the same order" if proven else ""
        steps = f"the {parity.steps:,} common steps"
        return "identical", f"all losses and gradient norms of {steps} are equal bit by bit{order}"
    if obstacle is not None:
        return "different", obstacle
    if pair.broken is not None:
        return "different", f"after step {pair.broken:,} the loss of one of the runs is not finite"
    if parity.layers is not None and (text := _layer(parity.layers)) is not None:
        return "different", f"at step {parity.layers.step:,}, {text}"
    for joint in parity.joints:
        if (text := _layer(joint.layers)) is not None:
            return "different", f"where {_name(joint.run)} went on at step {joint.layers.step:,}, {text}"
    if parity.loss is None:
        return "undecided", f"{parity.steps} common steps are too few to tell: {FEWEST} are needed"
    verdict = _other_losses(parity, parity.loss)
    if verdict is None and parity.norm is not None and parity.norm.outside(NORM_MARGIN):
        by = f"{math.expm1(parity.norm.mean):+.1%}"
        return "different", f"B's gradient norms differ from A's by {by} on average, more than {NORM_MARGIN:.0%}"
    return verdict or _equivalent_or_undecided(parity, parity.loss)


def notes(parity: Parity, obstacle: str | None) -> Iterator[str]:
    """What did not decide but is worth knowing."""
    loss, changed = parity.loss, parity.change
    if parity.samples is None:
        yield "one of the runs has no order receipts: that they read the same samples is not shown"
    elif parity.samples.unproven:
        yield (
            f"the receipts of {parity.samples.unproven:,} steps bind the numbers of the samples, not what their rows "
            "held: that both runs read the same data set is not shown"
        )
    if obstacle is None and parity.layers is None:
        yield "no probes of a common step: layers were not compared (`probes: true` records them)"
    if parity.layers is not None and not parity.layers.judged:
        yield (
            f"the first common probe is of step {parity.layers.step}, when weights had grown apart: layers are not "
            "judged without --repeat"
        )
    if loss is not None and changed is None:
        yield "the differences are too strongly correlated for so few steps to look for drift and steps in them"
    if parity.handovers and any(handover.jump is None for handover in parity.handovers):
        yield "hand-overs with fewer than 20 steps on a side, or 40 between them, are not judged"
    if changed is not None and changed.p_trend <= ALARM and parity.verdict in ("equivalent", "undecided"):
        yield f"the difference has a trend of {_signed(100 * changed.slope)} nats in 100 steps"
    for handover in parity.handovers:
        if handover.jump is not None and handover.jump.p <= ALARM and abs(handover.jump.jump) <= parity.margin:
            yield f"{_place(handover)} the difference jumps by {_signed(handover.jump.jump)} nats, within the margin"
    if loss is not None and parity.noise is not None and loss.sd > 2 * parity.noise.sd:
        yield f"B's losses scatter about A's with sd {loss.sd:.2g}, those of repeats of A with {parity.noise.sd:.2g}"


def _layer(layers: Layers) -> str | None:
    """A sentence about the first layer whose difference rounding does not explain, if there is one."""
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


def _other_losses(parity: Parity, loss: LossDifference) -> Verdict | None:
    """The verdict if the losses leap, jump, drift, step or differ by more than the margin."""
    changed, margin, spike = parity.change, parity.margin, parity.spike
    if spike is not None:
        scatter = f"scatter by {spike.scatter:.1g}" if spike.scatter else "are equal"
        return "different", (
            f"at step {parity.spike_at:,} alone the difference leaps by {_signed(spike.size)} nats, more than the "
            f"margin of {margin:g}, where the steps around it {scatter}"
        )
    for handover in parity.handovers:
        jump = handover.jump
        if jump is not None and jump.p <= ALARM and abs(jump.jump) > margin:
            by = f"{_signed(jump.jump)} nats (p = {jump.p:.1g})"
            return "different", f"{_place(handover)} the difference jumps by {by}, more than the margin of {margin:g}"
    if changed is not None:
        steps = changed.p_step <= ALARM and abs(changed.after - changed.before) > margin
        drifts = changed.p_trend <= ALARM and abs(loss.quarter.mean) > margin
        if drifts and not (steps and changed.stepped):
            return "drifting", (
                f"the difference goes on growing, {_signed(100 * changed.slope)} nats in 100 steps (p = "
                f"{changed.p_trend:.1g}): over the last quarter it is {_interval(loss.quarter)}, beyond the margin of "
                f"{margin:g}"
            )
        if steps:
            return "different", (
                f"after step {parity.change_at:,} the difference goes from {_signed(changed.before)} to "
                f"{_signed(changed.after)} nats on average, by more than the margin of {margin:g} "
                f"(p = {changed.p_step:.1g})"
            )
    if loss.mean.outside(margin):
        return "different", f"B's loss less A's is {_interval(loss.mean)}, outside the margin of {margin:g}"
    return None


def _equivalent_or_undecided(parity: Parity, loss: LossDifference) -> Verdict:
    for which, part in (("", loss.mean), ("over the last quarter ", loss.quarter)):
        if not part.inside(parity.margin):
            return "undecided", (
                f"{which}B's loss less A's is {_interval(part)}, and the margin is {parity.margin:g}: too few steps, "
                "or too noisy, to tell them apart; let both run longer"
            )
    changed, steady = parity.change, ""
    if changed is not None:
        alike = changed.p_trend > ALARM and changed.p_step > ALARM
        steady = "; no drift, no step" if alike else "; what it drifts stays inside"
    judged = sum(handover.jump is not None for handover in parity.handovers)
    if judged:
        steady += f", no jump at {'the hand-over' if judged == 1 else f'the {judged} hand-overs'}"
    return "equivalent", (
        f"over {parity.steps:,} common steps B's loss less A's is {_interval(loss.mean)}, inside the margin of "
        f"{parity.margin:g}, and so is its last quarter{steady}"
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
