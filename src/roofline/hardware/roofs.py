"""The measured limits of a chip, its roofs: the type, the files that keep measurements, what a share of one may be.

Backends measure them (`backends/cpu/roofs.py`).
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from roofline.common import env
from roofline.common.errors import ConfigError
from roofline.common.files import where_possible, write_atomically
from roofline.common.units import human_bytes

T = TypeVar("T")
TOLERANCE = 1.02  # a larger share of a roof is an error of the measurement
AGREEMENT = 0.05  # by which a roof that is measured again may differ from the one that is kept
MOST_SAMPLES = 6  # of one roof in a measurement
TRIES = 3  # other programs can only lower a measured roof, so measuring again may correct it
BUSY = 0.3  # cores of other programs beside a measurement, above which it is made again when there are fewer
VERSION = 2  # of the file's layout and of what the loops measure: older files are measured again
_unwritten: dict[Path, "Roofs"] = {}  # what this process measured and could not write


@dataclass(frozen=True)
class Roofs:
    """What `threads` threads of this chip reach together.

    Args:
        int8_ops, bf16_flops, f32_flops: operations a second of register-only loops, of a GPU its library's products; a
            multiply and an add are two. int8_ops is None for a GPU: no op of its Programs multiplies bytes.
        reads: (working set in bytes, bytes a second read from it), ascending by working set.
        threads, isa: what they were measured with; 0 and "" for a GPU.
        chip: the chip's name.
        measured: date and time, ISO 8601, UTC.
        correction: the factor by which the figures were raised because work reached more than was measured; 1: none.
        load: cores that other programs used meanwhile, the fewest of the measurements that the figures are the best of.
    """

    int8_ops: float | None
    bf16_flops: float
    f32_flops: float
    reads: tuple[tuple[int, float], ...]
    threads: int = 1
    isa: str = ""
    chip: str = ""
    measured: str = ""
    correction: float = 1.0
    load: float = 0.0

    def __post_init__(self) -> None:
        rates = [*(rate for _, rate in self.computes), *(rate for _, rate in self.reads)]
        if not self.reads or not all(math.isfinite(rate) and rate > 0 for rate in rates):
            raise ConfigError("measured roofs must all be positive numbers, with at least one read rate")
        sizes = [size for size, _ in self.reads]
        if sizes != sorted(set(sizes)) or sizes[0] <= 0:
            raise ConfigError("read roofs must be in ascending order of their working sets")

    @property
    def computes(self) -> list[tuple[str, float]]:
        """(arithmetic, operations a second) of what was measured: "int8", "bf16", "f32"."""
        measured = (("int8", self.int8_ops), ("bf16", self.bf16_flops), ("f32", self.f32_flops))
        return [(name, rate) for name, rate in measured if rate is not None]

    def read_bytes_per_s(self, working_set: float) -> float:
        """Bytes a second from a working set of that many bytes: linear in its logarithm, flat outside the measured."""
        if working_set <= self.reads[0][0]:
            return self.reads[0][1]
        for (low, low_rate), (high, high_rate) in zip(self.reads, self.reads[1:], strict=False):
            if working_set <= high:
                part = math.log(working_set / low) / math.log(high / low)
                return low_rate + part * (high_rate - low_rate)
        return self.reads[-1][1]


def highest(old: Roofs, new: Roofs) -> Roofs:
    """The higher figure of each roof, dated as the newer measurement."""
    rates = dict(old.reads)
    for size, rate in new.reads:
        rates[size] = max(rate, rates.get(size, 0.0))
    return replace(
        new,
        int8_ops=None if old.int8_ops is None or new.int8_ops is None else max(old.int8_ops, new.int8_ops),
        bf16_flops=max(old.bf16_flops, new.bf16_flops),
        f32_flops=max(old.f32_flops, new.f32_flops),
        reads=tuple(sorted(rates.items())),
        correction=max(old.correction, new.correction),
        load=min(old.load, new.load),
    )


def reachable(roofs: Roofs, share: Callable[[Roofs], float], measure: Callable[[], Roofs]) -> Roofs:
    """Roofs of which no share is above 1: what was measured while other programs kept the machine busy is too low.

    Args:
        share: the largest share of some roofs that work reached.
        measure: measures the roofs again; the higher figures count. Where work is still faster after that, it has
            reached more than any measurement, and the roofs are raised to it.
    """
    roofs, factor = confirmed(roofs, share, lambda before: highest(before, measure()))
    if factor <= 1:
        return roofs
    return replace(
        roofs,
        int8_ops=None if roofs.int8_ops is None else roofs.int8_ops * factor,
        bf16_flops=roofs.bf16_flops * factor,
        f32_flops=roofs.f32_flops * factor,
        reads=tuple((size, rate * factor) for size, rate in roofs.reads),
        correction=roofs.correction * factor,
    )


@dataclass(frozen=True)
class RoofCheck:
    """A kept roof beside a measurement of now. name: "int8", "reads of 4.0 MiB"; unit: "op" or "B"."""

    name: str
    unit: str
    kept: float
    now: float

    @property
    def agrees(self) -> bool:
        """Whether the two are within AGREEMENT of each other."""
        return abs(self.now / self.kept - 1) <= AGREEMENT


def compare(kept: Roofs, now: Roofs) -> list[RoofCheck]:
    """Each roof that both have, arithmetic first."""
    before, reads = dict(kept.computes), dict(kept.reads)
    checks = [RoofCheck(name, "op", before[name], rate) for name, rate in now.computes if name in before]
    return checks + [
        RoofCheck(f"reads of {human_bytes(size)}", "B", reads[size], rate) for size, rate in now.reads if size in reads
    ]


def recheck(kept: Roofs, measure: Callable[[], Roofs]) -> tuple[Roofs, list[RoofCheck]]:
    """The higher figure of each roof, and how the ones that were kept compare with the best of at most TRIES
    measurements of now."""
    now = measure()
    for _ in range(TRIES - 1):
        if all(check.agrees or check.now > check.kept for check in compare(kept, now)):
            break
        now = highest(now, measure())
    return highest(kept, now), compare(kept, now)


def correction_note(roofs: Roofs) -> str:
    """What is to be said beside shares of these roofs; empty where they are as they were measured."""
    if roofs.correction <= TOLERANCE:
        return ""
    by = f"{roofs.correction - 1:.0%}"
    return f"roofs raised by {by} to what was reached: the machine was busy when they were measured"


def load_note(load: float) -> str:
    """What is to be said beside roofs that were measured beside other programs (`Roofs.load`); empty where they had
    the machine to themselves."""
    if load <= BUSY:
        return ""
    return f"other programs used {load:.1f} cores while the roofs were measured: they may be too low"


def best_of(sample: Callable[[], float], least: float = 0.0) -> float:
    """The best of samples of a rate, taken until two of them agree on it, MOST_SAMPLES at most: a sample that
    other programs interrupted is too low, and none is too high. least: a rate that it is known to be above."""
    rates = sorted((sample(), sample()), reverse=True)
    while len(rates) < MOST_SAMPLES and (rates[1] < (1 - AGREEMENT) * rates[0] or rates[0] < least):
        rates = sorted((*rates, sample()), reverse=True)
    return max(rates[0], least)


def confirmed(roof: T, share: Callable[[T], float], again: Callable[[T], T]) -> tuple[T, float]:
    """A roof and the share of it that was reached, after measuring again while that is more than can be.

    again: the higher of a roof and of a new measurement. A share that is still above TOLERANCE is to be refused.
    """
    reached = share(roof)
    for _ in range(TRIES):
        if reached <= TOLERANCE:
            break
        roof = again(roof)
        reached = share(roof)
    return roof, reached


def path(fingerprint: str, threads: int, isa: str) -> Path:
    """Where the roofs of a machine (`Machine.fingerprint`) at that many threads and that ISA are kept."""
    return env.home() / "roofs" / f"{fingerprint}-{isa}-{threads}.json"


def load(fingerprint: str, threads: int, isa: str) -> Roofs | None:
    """The stored roofs, None when there are none (or an older version's)."""
    target = path(fingerprint, threads, isa)
    try:
        record = json.loads(target.read_text())
        if record.pop("version", None) == VERSION:
            record["reads"] = tuple((int(size), float(rate)) for size, rate in record["reads"])
            return Roofs(**record)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ConfigError):
        pass  # a damaged store costs a new measurement, nothing else
    return _unwritten.get(target)


def store(roofs: Roofs, fingerprint: str) -> Path:
    """Write `roofs` to their file, atomically; where that cannot be written, keep them in this process alone. Returns
    the file's path."""
    target = path(fingerprint, roofs.threads, roofs.isa)
    _unwritten[target] = roofs
    with where_possible("measured roofs are", target):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, json.dumps({"version": VERSION, **asdict(roofs)}, indent=1))
        del _unwritten[target]
    return target
