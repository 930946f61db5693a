"""Lengths of training as LLM Foundry writes them: 200ba (batches), 1ep (epochs), 512sp (samples), 2048tok, 0.1dur."""

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from roofline.common.errors import ConfigError

_FORM = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:[eE][0-9]{1,2})?)(ba|ep|sp|tok|dur)")


@dataclass(frozen=True)
class Batches:
    """What the units are in batches of this run."""

    samples: int  # of a global batch
    tokens: int  # of a sample
    epoch: int  # samples of an epoch
    whole: int | None = None  # batches of the run, once they are known


def batches(key: str, text: str, run: Batches) -> int:
    """A duration in whole batches, rounded up: a run of one epoch sees all of it. Raises ConfigError naming the key."""
    match = _FORM.fullmatch(text.strip())
    if not match:
        raise ConfigError(f"{key}: {text!r} is no duration such as 200ba, 1ep, 512sp, 1e9tok or 0.1dur")
    count, unit = Fraction(match[1]), match[2]  # as a float 0.07dur of 100 batches would be 8
    if unit == "dur" and (run.whole is None or count > 1):
        raise ConfigError(f"{key}: {text!r} is a part of the run: it is from 0dur to 1dur, and not its whole length")
    samples = {"sp": count, "ep": count * run.epoch, "tok": count / run.tokens}
    if unit == "dur":
        return math.ceil(count * (run.whole or 0))
    return math.ceil(count if unit == "ba" else samples[unit] / run.samples)
