"""Learning rate schedules, as factors of the optimizer's rate."""

import math
from collections.abc import Callable

from roofline.common import log
from roofline.common.errors import ConfigError
from roofline.train.config.duration import DurationUnits, batches
from roofline.train.config.schema import SchedulerSection

_log = log.get("train")


def schedule(section: SchedulerSection, run: DurationUnits) -> Callable[[int], float]:
    """A function from a batch's number, counted from 0, to its factor. As in Composer, warmup begins at 0.

    After the warmup: constant_with_warmup stays 1. cosine_with_warmup (Loshchilov and Hutter 2017) and
    linear_decay_with_warmup fall from 1 to alpha_f at t_max. inv_sqrt_with_warmup is sqrt(t_scale / step), at least
    alpha_f (Vaswani et al. 2017). warmup_stable_decay stays 1, then falls over the last t_decay to alpha_f by cosine,
    linearly or by 1 - sqrt (Hägele et al. 2024). A run may end inside its warmup, as short trials of a file do, which
    is logged. Raises ConfigError on durations that do not fit.
    """
    warmup = batches("scheduler.t_warmup", section.t_warmup, run)
    end = batches("scheduler.t_max", section.t_max, run)
    decay = batches("scheduler.t_decay", section.t_decay, run)
    scale = max(1, batches("scheduler.t_scale", section.t_scale, run))
    if run.total is not None and warmup > run.total == end:
        _log.warning("the run of %d batches ends inside its warmup of %d: lower scheduler.t_warmup", end, warmup)
    elif warmup > end or (warmup == end and section.name != "constant_with_warmup"):
        raise ConfigError(f"scheduler.t_warmup: {warmup} batches of warmup leave nothing of {end}")
    last = section.alpha_f

    def fall(form: str, part: float) -> float:
        part = min(1.0, part)
        shape = {"cosine": (1 + math.cos(math.pi * part)) / 2, "linear": 1 - part, "1-sqrt": 1 - math.sqrt(part)}
        return last + (1 - last) * shape[form]

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        match section.name:
            case "cosine_with_warmup":
                return fall("cosine", (step - warmup) / (end - warmup))
            case "linear_decay_with_warmup":
                return fall("linear", (step - warmup) / (end - warmup))
            case "inv_sqrt_with_warmup":
                return max(last, math.sqrt(scale / (step - warmup + scale)))
            case "warmup_stable_decay":
                start = max(warmup, end - decay)
                return 1.0 if step < start else fall(section.decay, (step - start) / max(1, end - start))
        return 1.0

    return factor
