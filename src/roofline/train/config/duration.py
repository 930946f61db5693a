"""Durations as LLM Foundry writes them: 200ba (batches), 1ep (epochs), 512sp (samples), 2048tok, 0.1dur (of a run)."""

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from roofline.common.errors import ConfigError

_FORM = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:[eE][0-9]{1,2})?)(ba|ep|sp|tok|dur)")


@dataclass(frozen=True)
class DurationUnits:
    """The sizes that turn each unit of a duration into batches of this run."""

    samples: int  # of a global batch
    tokens: int | Fraction  # of a sample, without padding
    epoch: int  # samples of an epoch
    total: int | None = None  # batches of the run, once they are known


def parse(text: str) -> tuple[Fraction, str]:
    """The number and the unit of a duration. Raises ValueError."""
    match = _FORM.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is no duration such as 200ba, 1ep, 512sp, 1e9tok or 0.1dur")
    count, unit = Fraction(match[1]), match[2]  # with floats 0.07dur of 100 batches would be 8
    if unit == "dur" and count > 1:
        raise ValueError(f"{text!r} is a part of the run: it is from 0dur to 1dur")
    return count, unit


def batches(key: str, text: str, run: DurationUnits) -> int:
    """A duration in batches, rounded up, so a run of one epoch sees all of it. Raises ConfigError naming the key."""
    try:
        count, unit = parse(text)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    if unit == "dur" and run.total is None:
        raise ConfigError(f"{key}: {text!r} is a part of the run, and not its whole length")
    per_batch: dict[str, int | Fraction] = {
        "sp": run.samples,
        "ep": Fraction(run.samples, run.epoch),
        "tok": run.samples * run.tokens,
        "ba": 1,
    }
    return math.ceil(count * (run.total or 0) if unit == "dur" else count / per_batch[unit])
