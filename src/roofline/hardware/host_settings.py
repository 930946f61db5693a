"""How this host runs its chips: what may change from one day to the next while the machine stays the same.

All of it is read from /proc and /sys at each call, and of NVIDIA's GPUs from NVML where its package is installed. What
cannot be read is None, never a guess.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from roofline.common.files import entries, integer, text_of
from roofline.hardware.detect import bracketed, cpu_numbers
from roofline.hardware.gpus.inventory import import_or_none
from roofline.hardware.gpus.libraries import Library, answer_or_none, nvml_address, with_nvml

CPUS = "sys/devices/system/cpu"
NODES = "sys/devices/system/node"
# Facts that speeds depend on, in words; what else is recorded helps to understand a figure.
_DECISIVE = {
    "governor": "governor",
    "clock_limits_mhz": "clock limits in MHz",
    "boost": "boost",
    "smt": "SMT",
    "numa_nodes": "NUMA nodes",
    "nodes": "CPUs of NUMA nodes",
    "memory_nodes": "memory of NUMA nodes",
    "numa_balancing": "NUMA balancing",
    "huge_pages": "huge pages",
}
_DECISIVE_OF_GPUS = {"driver": "driver", "power_cap_watts": "power cap in W"}
_DRIVERS = {"nvidia": "proc/driver/nvidia/version", "amd": "sys/module/amdgpu/version"}


@dataclass(frozen=True, kw_only=True)
class GpuSettings:
    """How its driver runs a GPU. clock_mhz, memory_clock_mhz: at the moment; most_clock_mhz: what it may reach."""

    pci: str
    driver: str | None = None
    clock_mhz: int | None = None
    most_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    power_cap_watts: float | None = None


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """How the kernel runs a host.

    cpus: those that this process may use, "0-3,8"; nodes: the NUMA nodes that these are of; memory_nodes: those that it
    may have memory of; numa_nodes: of the host; smt: whether cores run several hardware threads; governor: of the
    clocks of these CPUs, several with commas; clock_range_mhz: that the chip can, clock_limits_mhz: that it is allowed;
    clock_mhz: of the first of these CPUs, at the moment; huge_pages: transparent ones (always, madvise, never);
    huge_pages_reserved: others, of the default size.
    """

    cpus: str | None = None
    nodes: str | None = None
    memory_nodes: str | None = None
    numa_nodes: int | None = None
    numa_balancing: bool | None = None
    smt: bool | None = None
    governor: str | None = None
    clock_driver: str | None = None
    clock_range_mhz: tuple[float, float] | None = None
    clock_limits_mhz: tuple[float, float] | None = None
    clock_mhz: float | None = None
    boost: bool | None = None
    huge_pages: str | None = None
    huge_pages_reserved: int | None = None
    gpus: tuple[GpuSettings, ...] = ()


def host_settings(root: Path = Path("/"), pynvml: Library | Literal["import"] = "import") -> HostSettings:
    """Those of this host. root: where /proc and /sys are looked for (tests give a made-up tree); pynvml: the module,
    None for none."""
    status = dict(line.partition(":")[::2] for line in (text_of(root / "proc/self/status") or "").splitlines())
    cpus, memory_nodes = (status.get(name, "").strip() or None for name in ("Cpus_allowed_list", "Mems_allowed_list"))
    policies = [root / CPUS / f"cpu{number}/cpufreq" for number in cpu_numbers(cpus or "")]
    balancing = text_of(root / "proc/sys/kernel/numa_balancing")
    return HostSettings(
        cpus=cpus,
        nodes=_nodes_of(root, cpus),
        memory_nodes=memory_nodes,
        numa_nodes=len(list((root / NODES).glob("node[0-9]*"))) or None,
        numa_balancing=None if balancing is None else balancing != "0",
        smt=_switch(root / CPUS / "smt/active"),
        governor=_common(policies, "scaling_governor"),
        clock_driver=_common(policies, "scaling_driver"),
        clock_range_mhz=_range(policies, "cpuinfo"),
        clock_limits_mhz=_range(policies, "scaling"),
        clock_mhz=_clock(root, policies),
        boost=_boost(root),
        huge_pages=bracketed(text_of(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        huge_pages_reserved=integer(text_of(root / "proc/sys/vm/nr_hugepages")),
        gpus=(*_of_amdgpu(root), *_of_nvml(root, import_or_none("pynvml") if pynvml == "import" else pynvml)),
    )


def gpu_driver(vendor: Literal["nvidia", "amd"], root: Path = Path("/")) -> str | None:
    """The version of NVIDIA's or AMD's kernel module, where its file can be read."""
    text = text_of(root / _DRIVERS[vendor])
    return " ".join(text.splitlines()[0].split()) if text else None


def in_words(settings: HostSettings) -> str:
    """What of it speeds depend on: "governor performance, SMT off"; "" where nothing is known."""
    return ", ".join(f"{name} {value}" for name, value in _decisive(settings).items())


def differences(new: Sequence[HostSettings], old: Sequence[HostSettings]) -> list[str]:
    """What speeds depend on and differs between the hosts of two measurements: "SMT off, was on". What is not known of
    one of them is no difference."""
    after, before = list(map(_decisive, dict.fromkeys(new))), list(map(_decisive, dict.fromkeys(old)))
    texts = [
        f"{name} {value}, was {other[name]}"
        for core in after
        for other in before
        for name, value in core.items()
        if other.get(name, value) != value
    ]
    return list(dict.fromkeys(texts))


def _decisive(settings: HostSettings) -> dict[str, str]:
    """The known facts that speeds depend on, by their names in words."""
    facts = {text: getattr(settings, name) for name, text in _DECISIVE.items()}
    for gpu in settings.gpus:
        facts |= {f"{text} of GPU {gpu.pci}": getattr(gpu, name) for name, text in _DECISIVE_OF_GPUS.items()}
    return {name: _in_words(value) for name, value in facts.items() if value is not None}


def _in_words(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " to ".join(map(_in_words, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _nodes_of(root: Path, cpus: str | None) -> str | None:
    """The NUMA nodes of CPUs, with commas."""
    allowed_cpus = set(cpu_numbers(cpus or ""))
    numbers = [
        int(folder.name.removeprefix("node"))
        for folder in (root / NODES).glob("node[0-9]*")
        if not allowed_cpus.isdisjoint(cpu_numbers(text_of(folder / "cpulist") or ""))
    ]
    return ",".join(map(str, sorted(numbers))) or None


def _switch(file: Path) -> bool | None:
    return {"0": False, "1": True}.get(text_of(file) or "")


def _boost(root: Path) -> bool | None:
    """Whether clocks may rise above the nominal one, as cpufreq or intel_pstate says."""
    off = _switch(root / CPUS / "intel_pstate/no_turbo")
    return _switch(root / CPUS / "cpufreq/boost") if off is None else not off


def _common(policies: Sequence[Path], name: str) -> str | None:
    """Read the CPUs' files of that name, each text once."""
    texts = {text for policy in policies if (text := text_of(policy / name))}
    return ", ".join(sorted(texts)) or None


def _range(policies: Sequence[Path], kind: str) -> tuple[float, float] | None:
    """The lowest and the highest clock of the CPUs' files in kHz, in MHz."""
    least, most = (
        [number for policy in policies if (number := integer(text_of(policy / f"{kind}_{end}_freq"))) is not None]
        for end in ("min", "max")
    )
    return (min(least) / 1000, max(most) / 1000) if least and most else None


def _clock(root: Path, policies: Sequence[Path]) -> float | None:
    """The clock of the first CPU: as cpufreq says, else as /proc/cpuinfo does."""
    kilohertz = integer(text_of(policies[0] / "scaling_cur_freq")) if policies else None
    if kilohertz is not None:
        return kilohertz / 1000
    match = re.search(r"^cpu MHz\s*:\s*([0-9.]+)$", text_of(root / "proc/cpuinfo") or "", re.MULTILINE)
    return float(match[1]) if match else None


def _of_amdgpu(root: Path) -> list[GpuSettings]:
    """AMD's GPUs, as their driver shows them in /sys."""
    driver = gpu_driver("amd", root)
    gpus = []
    for folder in sorted((root / "sys/class/drm").glob("card[0-9]*/device")):
        uevent = (text_of(folder / "uevent") or "").splitlines()
        facts = dict(line.split("=", 1) for line in uevent if "=" in line)
        if facts.get("DRIVER") != "amdgpu" or "-" in folder.parent.name:  # card0-DP-1 is a plug of card0
            continue
        caps = [integer(text_of(monitor / "power1_cap")) for monitor in entries(folder / "hwmon")]
        microwatts = next((cap for cap in caps if cap is not None), None)
        clock, most = _dpm(folder / "pp_dpm_sclk")
        gpus.append(
            GpuSettings(
                pci=facts.get("PCI_SLOT_NAME", "").lower(),
                driver=driver,
                clock_mhz=clock,
                most_clock_mhz=most,
                memory_clock_mhz=_dpm(folder / "pp_dpm_mclk")[0],
                power_cap_watts=None if microwatts is None else microwatts / 1e6,
            )
        )
    return gpus


def _dpm(file: Path) -> tuple[int | None, int | None]:
    """(now, the highest) of amdgpu's levels of a clock in MHz: "1: 1700Mhz *" is the level that it has."""
    levels = re.findall(r"^\w+:\s*([0-9]+)Mhz\s*(\*?)", text_of(file) or "", re.MULTILINE)
    now = next((int(clock) for clock, star in levels if star), None)
    return now, max((int(clock) for clock, _ in levels), default=None)


def _of_nvml(root: Path, pynvml: Library) -> list[GpuSettings]:
    """NVIDIA's GPUs, as NVML has them."""
    if pynvml is None:
        return []
    driver, error = gpu_driver("nvidia", root), pynvml.NVMLError

    def settings(handle: object) -> GpuSettings:
        def clock(of: str, kind: int) -> int | None:
            return answer_or_none(error, getattr(pynvml, of), handle, kind)

        milliwatts = answer_or_none(error, pynvml.nvmlDeviceGetPowerManagementLimit, handle)
        return GpuSettings(
            pci=nvml_address(pynvml, handle),
            driver=driver,
            clock_mhz=clock("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
            most_clock_mhz=clock("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM),
            memory_clock_mhz=clock("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM),
            power_cap_watts=None if milliwatts is None else milliwatts / 1000,
        )

    return with_nvml(pynvml, lambda handles: [settings(handle) for handle in handles])
