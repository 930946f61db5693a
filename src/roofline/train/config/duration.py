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
    end: str | None = None  # max_duration, by which parts of a run are counted; None: total batches

    @property
    def per_batch(self) -> dict[str, int | Fraction]:
        """How much of each unit a batch has."""
        return {
            "sp": self.samples,
            "ep": Fraction(self.samples, self.epoch),
            "tok": self.samples * self.tokens,
            "ba": 1,
        }


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
    count, unit = _parsed(key, text, run)
    return math.ceil(count * (run.total or 0) if unit == "dur" else count / run.per_batch[unit])


def position(key: str, text: str, run: DurationUnits) -> Fraction:
    """A point of a schedule, in batches, as Composer's schedules compute it. Raises ConfigError naming the key.

    A part of the run is cut to whole units of max_duration, batches where that counts epochs; samples and tokens lie
    between batches. An epoch that is no whole number of batches, as Composer's always is, is taken as it is.
    """
    count, unit = _parsed(key, text, run)
    epoch = 1 / Fraction(run.per_batch["ep"])
    if unit == "ep":
        return Fraction(int(float(count) * int(epoch))) if epoch.denominator == 1 else count * epoch
    if unit != "dur":
        return Fraction(int(count)) / run.per_batch[unit]
    length, unit = _parsed(key, run.end, run) if run.end is not None else (Fraction(run.total or 0), "ba")
    # In floats, in the order of there: 0.29 of 100 batches are 28, of 10 epochs of 10 batches 29.
    if unit == "ep" and epoch.denominator == 1:
        return Fraction(int(float(count) * int(epoch) * float(length)))
    if unit == "ep":
        length, unit = Fraction(run.total or 0), "ba"
    return Fraction(int(float(count) * float(length))) / run.per_batch[unit]


def _parsed(key: str, text: str, run: DurationUnits) -> tuple[Fraction, str]:
    try:
        count, unit = parse(text)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    if unit == "dur" and run.total is None:
        raise ConfigError(f"{key}: {text!r} is a part of the run, and not its whole length")
    return count, unit
