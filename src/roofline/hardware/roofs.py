"""The measured limits of a chip, its roofs: the type, and the files that keep measurements between runs.

Backends measure them (`backends/cpu/roofs.py`).
"""

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from roofline.common import env
from roofline.common.errors import ConfigError
from roofline.common.files import write_atomically

VERSION = 1  # of the file's layout and of what the loops measure: older files are measured again


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
    """

    int8_ops: float | None
    bf16_flops: float
    f32_flops: float
    reads: tuple[tuple[int, float], ...]
    threads: int = 1
    isa: str = ""
    chip: str = ""
    measured: str = ""

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
    )


def path(fingerprint: str, threads: int, isa: str) -> Path:
    """Where the roofs of a machine (`Machine.fingerprint`) at that many threads and that ISA are kept."""
    return env.home() / "roofs" / f"{fingerprint}-{isa}-{threads}.json"


def load(fingerprint: str, threads: int, isa: str) -> Roofs | None:
    """The stored roofs, None when there are none (or an older version's)."""
    try:
        record = json.loads(path(fingerprint, threads, isa).read_text())
        if record.pop("version", None) != VERSION:
            return None
        record["reads"] = tuple((int(size), float(rate)) for size, rate in record["reads"])
        return Roofs(**record)
    except (OSError, ValueError, TypeError, KeyError, ConfigError):
        return None  # a damaged store costs a new measurement, nothing else


def store(roofs: Roofs, fingerprint: str) -> Path:
    """Write `roofs` to their file, atomically. Returns its path."""
    target = path(fingerprint, roofs.threads, roofs.isa)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, json.dumps({"version": VERSION, **asdict(roofs)}, indent=1))
    return target
