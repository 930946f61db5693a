"""How hosts are run: governors, clocks, SMT, NUMA and GPUs of made-up trees; what differs between two of them."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from roofline.hardware.host_settings import (
    GpuSettings,
    HostSettings,
    differences,
    gpu_driver,
    host_settings,
    in_words,
)
from tests.hardware import trees

CPU, NODE = "sys/devices/system/cpu", "sys/devices/system/node"


def clocks(root: Path, cpu: int, governor: str, least: int, most: int, now: int) -> None:
    folder = f"{CPU}/cpu{cpu}/cpufreq"
    texts = {"scaling_governor": governor, "scaling_driver": "amd-pstate-epp", "scaling_cur_freq": str(now)}
    texts |= {"cpuinfo_min_freq": "400000", "cpuinfo_max_freq": "5100000"}
    texts |= {"scaling_min_freq": str(least), "scaling_max_freq": str(most)}
    for name, text in texts.items():
        trees.write(root, f"{folder}/{name}", f"{text}\n")


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """Two nodes of four CPUs; this process may use CPUs 1 to 2 and 6, and memory of the second node."""
    trees.write(tmp_path, "proc/self/status", "Name:\tx\nCpus_allowed_list:\t1-2,6\nMems_allowed_list:\t1\n")
    trees.write(tmp_path, f"{NODE}/node0/cpulist", "0-3\n")
    trees.write(tmp_path, f"{NODE}/node1/cpulist", "4-7\n")
    trees.write(tmp_path, f"{CPU}/smt/active", "1\n")
    trees.write(tmp_path, f"{CPU}/cpufreq/boost", "0\n")
    clocks(tmp_path, 1, "performance", 800000, 3000000, 2950123)
    clocks(tmp_path, 2, "powersave", 400000, 2500000, 400000)
    clocks(tmp_path, 6, "performance", 800000, 3000000, 800000)
    clocks(tmp_path, 7, "ondemand", 100000, 9000000, 100000)  # which this process may not use
    trees.write(tmp_path, "proc/sys/kernel/numa_balancing", "1\n")
    trees.write(tmp_path, "proc/sys/vm/nr_hugepages", "128\n")
    trees.write(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    return tmp_path


def test_a_host_is_described_by_the_cpus_that_may_be_used(server: Path) -> None:
    assert host_settings(server, pynvml=None) == HostSettings(
        cpus="1-2,6",
        nodes="0,1",
        memory_nodes="1",
        numa_nodes=2,
        numa_balancing=True,
        smt=True,
        governor="performance, powersave",
        clock_driver="amd-pstate-epp",
        clock_range_mhz=(400.0, 5100.0),
        clock_limits_mhz=(400.0, 3000.0),
        clock_mhz=2950.123,
        boost=False,
        huge_pages="madvise",
        huge_pages_reserved=128,
    )


def test_what_cannot_be_read_is_absent(tmp_path: Path) -> None:
    assert host_settings(tmp_path, pynvml=None) == HostSettings()
    assert in_words(HostSettings()) == ""
    assert gpu_driver("amd", tmp_path) is None


def test_other_sources_of_clocks_and_boost(server: Path) -> None:
    (server / CPU / "cpu1/cpufreq/scaling_cur_freq").unlink()
    assert host_settings(server, pynvml=None).clock_mhz is None
    trees.write(server, "proc/cpuinfo", "processor\t: 0\ncpu MHz\t\t: 2695.948\n\nprocessor\t: 1\ncpu MHz\t\t: 9.0\n")
    assert host_settings(server, pynvml=None).clock_mhz == 2695.948
    trees.write(server, f"{CPU}/intel_pstate/no_turbo", "0\n")
    assert host_settings(server, pynvml=None).boost is True
    trees.write(server, f"{CPU}/smt/active", "0\n")
    assert host_settings(server, pynvml=None).smt is False


def amd_card(root: Path, number: int, bus: int, driver: str = "amdgpu") -> None:
    folder = f"sys/class/drm/card{number}/device"
    trees.write(root, f"{folder}/uevent", f"DRIVER={driver}\nPCI_SLOT_NAME=0000:{bus:02X}:00.0\n")
    trees.write(root, f"{folder}/pp_dpm_sclk", "0: 500Mhz\n1: 1200Mhz *\n2: 1700Mhz\n")
    trees.write(root, f"{folder}/pp_dpm_mclk", "0: 1600Mhz *\n")
    trees.write(root, f"{folder}/hwmon/hwmon3/power1_cap", "300000000\n")


def test_amds_gpus_are_read_from_their_driver(tmp_path: Path) -> None:
    amd_card(tmp_path, 0, 0xC1)
    amd_card(tmp_path, 1, 0x03, driver="ast")
    trees.write(tmp_path, "sys/class/drm/card0-DP-1/device/uevent", "DRIVER=amdgpu\nPCI_SLOT_NAME=0000:c1:00.0\n")
    trees.write(tmp_path, "sys/module/amdgpu/version", "6.12\t 12\nmore\n")
    assert host_settings(tmp_path, pynvml=None).gpus == (
        GpuSettings(
            pci="0000:c1:00.0",
            driver="6.12 12",
            clock_mhz=1200,
            most_clock_mhz=1700,
            memory_clock_mhz=1600,
            power_cap_watts=300.0,
        ),
    )
    for name in ("pp_dpm_sclk", "pp_dpm_mclk", "hwmon/hwmon3/power1_cap"):
        (tmp_path / "sys/class/drm/card0/device" / name).unlink()
    (tmp_path / "sys/module/amdgpu/version").unlink()
    assert host_settings(tmp_path, pynvml=None).gpus == (GpuSettings(pci="0000:c1:00.0"),)


def nvml(**answers: Any) -> Any:
    """NVML with one device. answers: of its functions, None for one that the device does not have."""

    class NVMLError(Exception):
        pass

    def ask(name: str) -> Any:
        def answer(_: object, kind: int = 0) -> Any:
            value = answers.get(name)
            if value is None:
                raise NVMLError
            return value[kind] if isinstance(value, dict) else value

        return answer

    names = ("nvmlDeviceGetClockInfo", "nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetPowerManagementLimit")
    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetPciInfo=lambda _: SimpleNamespace(busId="00000000:17:00.0"),
        **{name: ask(name) for name in names},
    )


def test_nvidias_gpus_are_read_from_nvml(tmp_path: Path) -> None:
    trees.write(tmp_path, "proc/driver/nvidia/version", "NVRM version:  550.54.15  x\nGCC\n")
    library = nvml(
        nvmlDeviceGetClockInfo={1: 1755, 2: 2619},
        nvmlDeviceGetMaxClockInfo={1: 1980},
        nvmlDeviceGetPowerManagementLimit=650000,
    )
    assert host_settings(tmp_path, pynvml=library).gpus == (
        GpuSettings(
            pci="0000:17:00.0",
            driver="NVRM version: 550.54.15 x",
            clock_mhz=1755,
            most_clock_mhz=1980,
            memory_clock_mhz=2619,
            power_cap_watts=650.0,
        ),
    )
    assert host_settings(tmp_path / "none", pynvml=nvml()).gpus == (GpuSettings(pci="0000:17:00.0"),)


def test_differences_are_of_what_speeds_depend_on(server: Path) -> None:
    gpu = GpuSettings(pci="0000:17:00.0", driver="550", clock_mhz=1755, power_cap_watts=650.0)
    new = replace(host_settings(server, pynvml=None), gpus=(gpu,))
    assert differences([new, new], [new]) == []
    assert differences([new], []) == []
    assert differences([new], [HostSettings()]) == [], "what is not known is no difference"
    calm = replace(new, clock_mhz=1.0, cpus="1-3", huge_pages_reserved=0, gpus=(replace(gpu, clock_mhz=100),))
    assert differences([new], [calm]) == [], "clocks of the moment, and numbers of CPUs"
    old = replace(
        new,
        smt=False,
        governor="performance",
        clock_limits_mhz=(400.0, 3500.0),
        gpus=(replace(gpu, power_cap_watts=700.0),),
    )
    assert differences([new], [old, old, new]) == [
        "governor performance, powersave, was performance",
        "clock limits in MHz 400 to 3000, was 400 to 3500",
        "SMT on, was off",
        "power cap in W of GPU 0000:17:00.0 650, was 700",
    ]
    assert in_words(replace(HostSettings(), smt=False, numa_nodes=2)) == "SMT off, NUMA nodes 2"


def test_settings_are_read_from_records_as_they_were_written(server: Path) -> None:
    amd_card(server, 0, 0xC1)
    settings = host_settings(server, pynvml=None)
    assert len(settings.gpus) == 1
    assert msgspec.json.decode(msgspec.json.encode(settings), type=HostSettings) == settings
    assert msgspec.json.decode(b"{}", type=HostSettings) == HostSettings(), "of a later or an earlier version"
