"""Learning rate schedules, as factors of the optimizer's rate."""

import math
from collections.abc import Callable
from fractions import Fraction

from roofline.common import log
from roofline.common.errors import ConfigError
from roofline.train.config.duration import DurationUnits, position
from roofline.train.config.schema import SchedulerSection

_log = log.get("train")


def schedule(section: SchedulerSection, run: DurationUnits) -> Callable[[int], float]:
    """A function from a batch's number, counted from 0, to its factor. As in Composer, warmup begins at 0.

    After the warmup: constant_with_warmup stays 1. cosine_with_warmup (Loshchilov and Hutter 2017) and
    linear_decay_with_warmup fall from 1 to alpha_f at t_max. inv_sqrt_with_warmup falls with sqrt(t_scale / step)
    (Vaswani et al. 2017) towards alpha_f_decay, which it nears for ever, or down to alpha_f, and over the last
    t_cooldown before t_max linearly to alpha_f_cooldown. warmup_stable_decay stays 1, then falls over the last t_decay
    to alpha_f by cosine, linearly or by 1 - sqrt (Hägele et al. 2024). A run may end inside its warmup, as short trials
    of a file do, which is logged. Raises ConfigError on durations that do not fit.
    """
    warmup = position("scheduler.t_warmup", section.t_warmup, run)
    end = position("scheduler.t_max", section.t_max, run)
    decay = position("scheduler.t_decay", section.t_decay, run)
    scale = position("scheduler.t_scale", section.t_scale, run) or Fraction(1)
    cooldown = position("scheduler.t_cooldown", section.t_cooldown, run)
    if warmup > end == position("scheduler.t_max", "1dur", run):
        _log.warning("the run of %g batches ends inside its warmup of %g: lower scheduler.t_warmup", end, warmup)
    elif warmup > end or (warmup == end and section.name != "constant_with_warmup"):
        raise ConfigError(f"scheduler.t_warmup: {float(warmup):g} batches of warmup leave nothing of {float(end):g}")
    last = section.alpha_f

    def fall(form: str, share: Fraction) -> float:
        part = min(1.0, float(share))
        shape = {"cosine": (1 + math.cos(math.pi * part)) / 2, "linear": 1 - part, "1-sqrt": 1 - math.sqrt(part)}
        return last + (1 - last) * shape[form]

    def factor(step: int) -> float:
        if step < warmup:
            return float(step / warmup)
        match section.name:
            case "cosine_with_warmup":
                return fall("cosine", (step - warmup) / (end - warmup))
            case "linear_decay_with_warmup":
                return fall("linear", (step - warmup) / (end - warmup))
            case "inv_sqrt_with_warmup":
                start = max(warmup, end - cooldown)
                root = math.sqrt(scale / (min(Fraction(step), start) - warmup + scale))
                rate = max(last, section.alpha_f_decay + root * (1 - section.alpha_f_decay))
                cooled = min(1.0, float((step - start) / cooldown)) if cooldown and step > start else 0.0
                return rate + cooled * (section.alpha_f_cooldown - rate)
            case "warmup_stable_decay":
                start = max(warmup, end - decay)
                return 1.0 if step < start else fall(section.decay, (step - start) / max(Fraction(1), end - start))
        return 1.0

    return factor
