"""Joules of a run, from counters: NVML's and amdsmi's of GPUs, RAPL's of CPUs. Where there is no counter there is no
figure: nothing is estimated from data sheets or from samples of power.

    meter = find_meter("cpu", seconds=5.0)  # while nothing of ours runs
    if meter is not None:
        start = meter.counter.read()
        ... the run, `meter.counter.read()` at least every few minutes, for a counter that overflows ...
        energy = energy_of(meter, meter.counter.read() - start, seconds, tokens)
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from roofline.bench.results.point import Energy
from roofline.common.files import entries, integer, text_of
from roofline.hardware.gpus.inventory import import_or_none
from roofline.hardware.gpus.libraries import Library, answer_or_none, with_amdsmi, with_nvml

Devices = Literal["cpu", "gpu", "any"]
MICRO, MILLI = 1e-6, 1e-3


@dataclass
class Counter:
    """Joules since some moment, of all devices of one kind. `read` adds up what each part has counted since it was last
    read, so that a part that begins again at 0 once between two reads loses nothing.

    parts: each returns its count in joules, None where it cannot be read; wraps: where each begins again at 0, in
    joules, infinity where it does not.
    """

    source: Literal["nvml", "amdsmi", "rapl"]
    parts: list[Callable[[], float | None]]
    wraps: list[float]
    _last: list[float | None] = field(default_factory=list)
    _total: float = 0.0

    def read(self) -> float:
        """Joules since the first call, which returns 0."""
        now = [part() for part in self.parts]
        for before, after, wrap in zip(self._last, now, self.wraps, strict=False):
            if before is not None and after is not None:
                self._total += after - before if after >= before else after - before + wrap
        self._last = now
        return self._total


def find_counter(
    root: Path = Path("/"),
    pynvml: Library | Literal["import"] = "import",
    amdsmi: Library | Literal["import"] = "import",
    of: Devices = "any",
) -> Counter | None:
    """The counter of this machine's GPUs where they have one, else of its CPUs, None where neither can be read.

    root: where /sys is looked for; pynvml, amdsmi: modules, None for none; of: the only devices whose counter is meant,
    where these are known.
    """
    counter = None
    if of != "cpu":
        nvml = import_or_none("pynvml") if pynvml == "import" else pynvml
        smi = import_or_none("amdsmi") if amdsmi == "import" else amdsmi
        counter = _nvml(nvml) or _amdsmi(smi)
    return _rapl(root) if counter is None and of != "gpu" else counter


def _nvml(pynvml: Library) -> Counter | None:
    """Millijoules since the driver was loaded, which Volta and later count."""
    if pynvml is None:
        return None
    error = pynvml.NVMLError

    def energies(handles: list[object]) -> list[float | None]:
        return [answer_or_none(error, pynvml.nvmlDeviceGetTotalEnergyConsumption, handle) for handle in handles]

    def part(number: int) -> Callable[[], float | None]:
        def read() -> float | None:
            counts = with_nvml(pynvml, energies)
            count = counts[number] if number < len(counts) else None
            return None if count is None else count * MILLI

        return read

    counts = with_nvml(pynvml, energies)
    numbers = [number for number, count in enumerate(counts) if count is not None]
    return Counter("nvml", [part(number) for number in numbers], [float("inf")] * len(numbers)) if numbers else None


def _amdsmi(amdsmi: Library) -> Counter | None:
    """A count of steps of so many microjoules; it has 64 bits."""
    if amdsmi is None:
        return None

    def energies(handles: list[object]) -> list[float | None]:
        out: list[float | None] = []
        for handle in handles:
            facts = answer_or_none(amdsmi.AmdSmiException, amdsmi.amdsmi_get_energy_count, handle) or {}
            steps, each = facts.get("energy_accumulator", facts.get("power")), facts.get("counter_resolution")
            out.append(None if steps is None or each is None else float(steps) * float(each) * MICRO)
        return out

    def part(number: int) -> Callable[[], float | None]:
        def read() -> float | None:
            counts = with_amdsmi(amdsmi, energies)
            return counts[number] if number < len(counts) else None

        return read

    numbers = [number for number, count in enumerate(with_amdsmi(amdsmi, energies)) if count is not None]
    return Counter("amdsmi", [part(number) for number in numbers], [float("inf")] * len(numbers)) if numbers else None


def _rapl(root: Path) -> Counter | None:
    """Packages and their memory, in microjoules. Linux lets root alone read them unless it is told otherwise."""
    zones = []
    for package in entries(root / "sys/class/powercap"):
        if (text_of(package / "name") or "").startswith("package"):
            memories = [zone for zone in entries(package) if text_of(zone / "name") == "dram"]
            zones += [package, *memories]

    def part(zone: Path) -> Callable[[], float | None]:
        def read() -> float | None:
            count = integer(text_of(zone / "energy_uj"))
            return None if count is None else count * MICRO

        return read

    readable = [zone for zone in zones if part(zone)() is not None]
    wraps = [(integer(text_of(zone / "max_energy_range_uj")) or 0) * MICRO for zone in readable]
    return Counter("rapl", [part(zone) for zone in readable], wraps) if readable else None


def idle_watts(counter: Counter, seconds: float, sleep: Callable[[float], None] = time.sleep) -> float:
    """Power while nothing of ours runs, over so many seconds."""
    start, before = time.monotonic(), counter.read()
    sleep(seconds)
    return (counter.read() - before) / max(time.monotonic() - start, seconds)


@dataclass(frozen=True)
class Meter:
    """A counter, and the power that it showed while nothing of ours ran."""

    counter: Counter
    idle: float


def find_meter(of: Devices, seconds: float) -> Meter | None:
    """The counter of devices, with their idle power of the next so many seconds; None where they have none."""
    counter = find_counter(of=of)
    return None if counter is None else Meter(counter, idle_watts(counter, seconds))


def energy_of(meter: Meter, joules: float, seconds: float, tokens: int) -> Energy:
    """What a load of so many seconds took whose answers had so many tokens."""
    idle_joules = meter.idle * seconds
    each = max(0.0, joules - idle_joules) / tokens if tokens else 0.0
    return Energy(
        source=meter.counter.source, joules=joules, seconds=seconds, idle_joules=idle_joules, joules_per_token=each
    )
