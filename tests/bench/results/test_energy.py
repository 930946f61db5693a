"""Joules from counters: made-up trees of /sys and made-up libraries."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roofline.bench.results import energy
from roofline.bench.results.energy import Counter, Meter, energy_of, find_counter, find_meter, idle_watts

METER = Meter(Counter("rapl", [], []), idle=10)


def zone(folder: Path, name: str, joules: float, wrap: float = 1000) -> Path:
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{joules * 1e6:.0f}\n")
    (folder / "max_energy_range_uj").write_text(f"{wrap * 1e6:.0f}\n")
    return folder


def count(folder: Path, joules: float) -> None:
    (folder / "energy_uj").write_text(f"{joules * 1e6:.0f}\n")


@pytest.fixture
def packages(tmp_path: Path) -> list[Path]:
    """Two packages, the first with its memory and its cores, and the platform, which counts all of it again."""
    base = tmp_path / "sys/class/powercap"
    first = zone(base / "intel-rapl:0", "package-0", 100)
    memory = zone(first / "intel-rapl:0:0", "dram", 10)
    zone(first / "intel-rapl:0:1", "core", 50)
    second = zone(base / "intel-rapl:1", "package-1", 200)
    zone(base / "intel-rapl:2", "psys", 500)
    return [first, memory, second]


def found(root: Path) -> Counter:
    counter = find_counter(root, pynvml=None, amdsmi=None)
    assert counter is not None
    return counter


def test_packages_and_their_memory_are_added_up(packages: list[Path], tmp_path: Path) -> None:
    counter = found(tmp_path)
    assert counter.source == "rapl"
    assert counter.read() == 0, "the first reading is where counting begins"
    count(packages[0], 107)
    count(packages[1], 12)
    count(packages[2], 230)
    assert counter.read() == pytest.approx(7 + 2 + 30)
    assert counter.read() == pytest.approx(39)


def test_a_counter_that_begins_again_loses_nothing(packages: list[Path], tmp_path: Path) -> None:
    counter = found(tmp_path)
    counter.read()
    count(packages[0], 40)  # it was 100, and begins again at 1000
    assert counter.read() == pytest.approx(940)


def test_counters_that_may_not_be_read_are_none(packages: list[Path], tmp_path: Path) -> None:
    for folder in packages:
        (folder / "energy_uj").unlink()
    assert find_counter(tmp_path, pynvml=None, amdsmi=None) is None
    assert find_counter(tmp_path / "elsewhere", pynvml=None, amdsmi=None) is None


class NvmlError(Exception):
    pass


def nvml(energies: list[int | None]) -> Any:
    """NVML with a device for each energy in millijoules; None: one that is too old to count."""

    def energy(number: int) -> int:
        value = energies[number]
        if value is None:
            raise NvmlError
        return value

    return SimpleNamespace(
        NVMLError=NvmlError, nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: len(energies),
        nvmlDeviceGetHandleByIndex=lambda number: number, nvmlDeviceGetTotalEnergyConsumption=energy,
    )  # fmt: skip


def test_gpus_come_before_cpus(packages: list[Path], tmp_path: Path) -> None:
    energies: list[int | None] = [1_000_000, None, 5_000]
    counter = find_counter(tmp_path, pynvml=nvml(energies), amdsmi=None)
    assert counter is not None
    assert counter.source == "nvml"
    counter.read()
    energies[:] = [1_002_000, None, 9_500]
    assert counter.read() == pytest.approx(2 + 4.5)
    old = find_counter(tmp_path, pynvml=nvml([None]), amdsmi=None)
    assert old is not None
    assert old.source == "rapl", "a GPU that does not count leaves the CPU's counter"


class SmiError(Exception):
    pass


@pytest.mark.parametrize("key", ["energy_accumulator", "power"])
def test_amdsmi_counts_steps(tmp_path: Path, key: str) -> None:
    facts = {key: 1_000_000, "counter_resolution": 15.3}
    library: Any = SimpleNamespace(
        AmdSmiException=SmiError, amdsmi_init=lambda: None, amdsmi_shut_down=lambda: None,
        amdsmi_get_processor_handles=lambda: [0], amdsmi_get_energy_count=lambda handle: facts,
    )  # fmt: skip
    counter = find_counter(tmp_path, pynvml=None, amdsmi=library)
    assert counter is not None
    assert counter.source == "amdsmi"
    counter.read()
    facts[key] = 2_000_000
    assert counter.read() == pytest.approx(15.3)


def test_idle_power_is_subtracted() -> None:
    of_load = energy_of(METER, joules=500, seconds=20, tokens=100)
    assert (of_load.joules, of_load.idle_joules, of_load.joules_per_token) == (500, 200, 3)
    assert energy_of(METER, joules=100, seconds=20, tokens=100).joules_per_token == 0
    assert energy_of(METER, joules=300, seconds=20, tokens=0).joules_per_token == 0


def test_idle_watts(packages: list[Path], tmp_path: Path) -> None:
    counter = found(tmp_path)
    assert idle_watts(counter, 5.0, sleep=lambda seconds: count(packages[0], 100 + 6 * seconds)) == pytest.approx(6)


def test_a_part_that_answers_now_and_then_counts_only_between_two_answers(packages: list[Path], tmp_path: Path) -> None:
    counter = found(tmp_path)
    counter.read()
    (packages[0] / "energy_uj").unlink()
    count(packages[2], 205)
    assert counter.read() == pytest.approx(5)
    count(packages[0], 150)
    assert counter.read() == pytest.approx(5), "nobody knows what it counted in between"
    count(packages[0], 151)
    assert counter.read() == pytest.approx(6)


def test_power_is_of_the_idle_time_alone(packages: list[Path], tmp_path: Path) -> None:
    counter = found(tmp_path)
    counter.read()
    count(packages[0], 400)
    counter.read()
    assert idle_watts(counter, 5.0, sleep=lambda seconds: count(packages[0], 400 + 6 * seconds)) == pytest.approx(6)


def test_counters_of_known_devices_alone(packages: list[Path], tmp_path: Path) -> None:
    library = nvml([1000])
    sources = {
        of: None if (counter := find_counter(tmp_path, pynvml=library, amdsmi=None, of=of)) is None else counter.source
        for of in ("any", "cpu", "gpu")
    }
    assert sources == {"any": "nvml", "cpu": "rapl", "gpu": "nvml"}
    assert find_counter(tmp_path, pynvml=None, amdsmi=None, of="gpu") is None


def test_a_meter_knows_the_idle_power(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter((5.0, 20.0))
    counter = Counter("rapl", [lambda: next(counts)], [1000.0])
    monkeypatch.setattr(energy, "find_counter", lambda of: counter if of == "cpu" else None)
    meter = find_meter("cpu", seconds=0.01)
    assert meter is not None
    assert meter.counter is counter
    assert 0 < meter.idle <= 15 / 0.01
    assert find_meter("gpu", seconds=0.01) is None


def test_a_gpu_that_has_gone_is_not_read(tmp_path: Path) -> None:
    energies: list[int | None] = [1000, 2000]
    counter = find_counter(tmp_path, pynvml=nvml(energies), amdsmi=None)
    assert counter is not None
    counter.read()
    energies[:] = [3000]
    assert counter.read() == pytest.approx(2)
