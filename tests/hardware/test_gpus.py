"""GPUs of made-up hosts: what /sys, libraries and torch say, joined; selection by name; memory that is shared."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.hardware.gpus import inventory as gpus
from roofline.hardware.gpus import libraries as gpus_libraries
from roofline.hardware.gpus import sysfs as gpus_sysfs
from roofline.hardware.gpus.device import Device
from tests.hardware.trees import GIB, KFD, amd, card, chimera, cpu_node, nvidia, torch_device, torch_module, write


def test_a_host_without_gpus(tmp_path: Path) -> None:
    cpu_node(tmp_path)
    assert gpus.detect(tmp_path) == ()
    with pytest.raises(ConfigError, match="there are: none"):
        gpus.select((), "amd:0")


def test_two_vendors_in_one_host(tmp_path: Path) -> None:
    mi100, titan = gpus.detect(chimera(tmp_path))
    assert (mi100.id, mi100.arch, mi100.pci, mi100.units) == ("amd:0", "gfx908", "0000:65:00.0", 120)
    assert (mi100.memory, mi100.shared, mi100.usable) == (32 * GIB, 63 * GIB, 32 * GIB)  # the host's is no part of it
    assert mi100.product is not None
    assert mi100.product.name == "MI100"  # by its PCI number: nothing gave a name
    assert mi100.title == "amd:0 MI100"
    assert mi100.chip().name == "gfx908"
    assert (titan.id, titan.name, titan.arch) == ("nvidia:0", "NVIDIA TITAN X (Pascal)", "sm_61")
    with pytest.raises(UnsupportedError, match=r"nvidia:0 NVIDIA TITAN X.*no tensor cores"):
        titan.chip()


def test_nvidias_driver_alone_does_not_tell_an_architecture(tmp_path: Path) -> None:
    nvidia(tmp_path, 0x17, "NVIDIA GeForce RTX 4070")
    (found,) = gpus.detect(tmp_path)
    with pytest.raises(UnsupportedError, match="torch or NVML is needed"):
        found.chip()


def test_what_libraries_know_is_added(tmp_path: Path) -> None:
    torch = torch_module("amd", torch_device("AMD Instinct MI100", "gfx908:sramecc+:xnack-", 120, 31 * GIB, 0x65))
    mi100, titan = gpus.detect(chimera(tmp_path), torch=torch, pynvml=nvml())
    assert (mi100.name, mi100.torch, mi100.memory) == ("AMD Instinct MI100", 0, 31 * GIB)
    assert mi100.sources == ("kfd", "drm", "torch")
    assert (titan.arch, titan.memory, titan.torch, titan.pci) == ("sm_61", 12 * GIB, None, "0000:17:00.0")
    with pytest.raises(UnsupportedError, match=r"TITAN X \(Pascal\) \(sm_61\).*no tensor cores"):
        titan.chip()


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        ("amd:0", ["amd:0"]),
        ("NVIDIA:0", ["nvidia:0"]),
        ("MI100", ["amd:0"]),
        ("gfx908", ["amd:0"]),
        ("nvidia", ["nvidia:0"]),
        ("NVIDIA Titan X (pascal)", ["nvidia:0"]),
        ("nvidia:0, MI100, amd:0", ["nvidia:0", "amd:0"]),
    ],
)
def test_selection_by_name(tmp_path: Path, wanted: str, ids: list[str]) -> None:
    assert [device.id for device in gpus.select(gpus.detect(chimera(tmp_path)), wanted)] == ids


@pytest.mark.parametrize("wanted", ["amd:1", "MI300X", "", "amd:0,", "0", "MI100,0", "gfx908:0"])
def test_selection_of_what_is_not_there(tmp_path: Path, wanted: str) -> None:
    with pytest.raises(ConfigError, match=r"there are: amd:0 MI100 \(gfx908\), nvidia:0"):
        gpus.select(gpus.detect(chimera(tmp_path)), wanted)


def test_numbers_go_on_with_the_vendor() -> None:
    devices = [Device("amd", index) for index in range(8)]
    assert [device.index for device in gpus.select(devices, "amd:0,1,4,6")] == [0, 1, 4, 6]


@given(st.text(alphabet="amd:0123nvil ,M", max_size=12))
def test_any_text_selects_devices_or_is_refused(text: str) -> None:
    devices = (Device("amd", 0), Device("amd", 1), Device("nvidia", 0, name="NVIDIA L40S"))
    try:
        chosen = gpus.select(devices, text)
    except ConfigError:
        return
    assert chosen
    assert len(set(chosen)) == len(chosen)


def test_a_package_of_two_dies_is_two_devices(tmp_path: Path) -> None:
    cpu_node(tmp_path)
    for number in range(8):
        amd(tmp_path, number + 1, 0x20 + number, 90010, 0x740C, 104, 64 * GIB, name="AMD Instinct MI250X / MI250")
    devices = gpus.detect(tmp_path)
    assert [device.id for device in devices] == [f"amd:{number}" for number in range(8)]
    assert {device.arch for device in devices} == {"gfx90a"}
    assert all(device.product and (device.product.name, device.product.dies) == ("MI250", 2) for device in devices)


def test_partitions_of_a_chip_are_devices_of_one_address(tmp_path: Path) -> None:
    cpu_node(tmp_path)
    for number in range(8):
        amd(tmp_path, number + 1, 0x75, 90402, 0x74A1, 38, 24 * GIB)
    parts = [torch_device("AMD Instinct MI300X", "gfx942:sramecc+", 38, 24 * GIB, 0x75) for _ in range(8)]
    devices = gpus.detect(tmp_path, torch=torch_module("amd", *parts))
    assert [device.torch for device in devices] == list(range(8))
    assert len({device.id for device in devices}) == 8
    assert all(device.product is None for device in devices), "a part has not the whole's figures"


@pytest.mark.parametrize(
    ("version", "device", "units", "vram", "gtt", "name", "arch", "usable"),
    [
        # One pool on the package, which the driver counts as its own and as the host's.
        (90402, 0x74A0, 228, 128, 251, "AMD Instinct MI300A", "gfx942", 128),
        (110501, 0x1586, 40, 1, 96, "", "gfx1151", 97),
        (110501, 0x1586, 40, 96, 62, "", "gfx1151", 128),
        (110003, 0x15BF, 12, 1, 14, "", "gfx1103", 15),
        (100303, 0x163F, 8, 4, 8, "", "gfx1033", 12),  # the Steam Deck of 2023: 4 GiB set aside, the rest mapped
        (110000, 0x744C, 96, 24, 30, "AMD Radeon RX 7900 XTX", "gfx1100", 24),
    ],
)
def test_memory_that_can_be_used(
    tmp_path: Path, version: int, device: int, units: int, vram: int, gtt: int, name: str, arch: str, usable: int
) -> None:
    amd(tmp_path, 0, 0x03, version, device, units, vram * GIB, gtt * GIB, name)
    (found,) = gpus.detect(tmp_path)
    assert found.arch == arch
    assert (found.memory, found.usable) == (vram * GIB, usable * GIB)
    assert found.unified == (arch != "gfx1100")


def test_the_driver_or_torch_may_say_that_memory_is_unified(tmp_path: Path) -> None:
    amd(tmp_path, 0, 0x03, 90402, 0x74FF, 228, 128 * GIB, 60 * GIB, cpu_cores=24)
    assert gpus.detect(tmp_path)[0].unified
    spark = torch_device("NVIDIA GB10", "sm_121", 48, 120 * GIB, 1, integrated=1)
    (found,) = gpus.detect(tmp_path / "none", torch=torch_module("nvidia", spark))
    assert (found.unified, found.usable) == (True, 120 * GIB)
    assert found.chip().name == "sm_120"


def test_the_steam_deck_is_refused_with_the_reason(tmp_path: Path) -> None:
    amd(tmp_path, 0, 0x04, 100303, 0x163F, 8, 4 * GIB, 8 * GIB)
    with pytest.raises(UnsupportedError, match=r"Steam Deck \(gfx1033\).*RDNA 1 and 2.*cpu backend"):
        gpus.detect(tmp_path)[0].chip()


def test_intel_is_another_backends(tmp_path: Path) -> None:
    card(tmp_path, 0, 0x8086, 0x02, 0x56A0)
    (found,) = gpus.detect(tmp_path)
    assert found.title == "intel:0 device 56a0"
    with pytest.raises(UnsupportedError, match="NVIDIA and AMD only"):
        found.chip()


def test_containers_show_half(tmp_path: Path) -> None:
    """Nodes of KFD that may not be read, cards without a KFD, numbers that are none."""
    amd(tmp_path, 1, 0x65, 90008, 0x738C, 120, 32 * GIB, kfd=False)
    write(tmp_path, f"{KFD}/2/properties", "")
    write(tmp_path, f"{KFD}/3/properties", "simd_count many\n\nthree words here\n")
    write(tmp_path, f"{KFD}/4x/properties", "simd_count 4\n")
    (found,) = gpus.detect(tmp_path)
    assert (found.arch, found.memory, found.sources) == ("gfx908", 32 * GIB, ("drm",))  # by the product


def test_torch_of_a_wheel_for_another_vendor_sees_nothing(tmp_path: Path) -> None:
    mi100, titan = gpus.detect(chimera(tmp_path), torch=torch_module(None))
    assert (mi100.torch, titan.torch) == (None, None)
    seen = torch_device("NVIDIA TITAN X (Pascal)", "sm_61", 28, 12 * GIB, 0x17)
    mi100, titan = gpus.detect(tmp_path, torch=torch_module("nvidia", seen))
    assert (mi100.torch, titan.torch, titan.arch) == (None, 0, "sm_61")


def test_devices_that_an_environment_variable_hides(tmp_path: Path) -> None:
    for number in range(4):
        nvidia(tmp_path, 0x10 + number, "NVIDIA H200")
    seen = [torch_device("NVIDIA H200", "sm_90", 132, 140 * GIB, bus) for bus in (0x13, 0x11)]
    devices = gpus.detect(tmp_path, torch=torch_module("nvidia", *seen))
    assert [device.torch for device in devices] == [None, 1, None, 0]


def test_a_slice_has_its_own_memory_and_not_the_products_figures(tmp_path: Path) -> None:
    nvidia(tmp_path, 0x17, "NVIDIA TITAN X (Pascal)")
    slices = [torch_device("NVIDIA H200 MIG 1g.18gb", "sm_90", 16, 16 * GIB, 0x17) for _ in range(2)]
    devices = gpus.detect(tmp_path, torch=torch_module("nvidia", *slices), pynvml=nvml())
    assert [(device.torch, device.memory, device.usable) for device in devices[1:]] == [(1, 16 * GIB, 16 * GIB)]
    assert devices[0].memory == 12 * GIB  # the smaller of NVML's and torch's
    assert devices[1].product is None


def test_a_vendors_name_leaves_out_the_screens_device(tmp_path: Path) -> None:
    amd(tmp_path, 1, 0x03, 90010, 0x740F, 104, 64 * GIB)
    amd(tmp_path, 2, 0x0A, 100306, 0x164E, 2, 1 * GIB, 8 * GIB)
    devices = gpus.detect(tmp_path)
    assert [device.arch for device in devices] == ["gfx90a", "gfx1036"]
    assert gpus.select(devices, "amd") == devices[:1]
    assert gpus.select(devices, "amd:1") == gpus.select(devices[1:], "amd") == devices[1:]


def test_an_older_torch_says_no_address(tmp_path: Path) -> None:
    chimera(tmp_path)
    amd(tmp_path, 2, 0x70, 90010, 0x740F, 104, 64 * GIB)
    seen = [torch_device("AMD Instinct MI210", "gfx90a", 104, 63 * GIB), torch_device("MI100", "gfx908", 120, GIB)]
    mi100, mi210, _ = gpus.detect(tmp_path, torch=torch_module("amd", *seen))
    assert (mi100.torch, mi210.torch) == (1, 0)


class NvmlError(Exception):
    pass


def nvml(*, loaded: bool = True, lost: bool = False) -> Any:
    """NVML of a host with the TITAN X."""

    def init() -> None:
        if not loaded:
            raise NvmlError

    def memory(_: int) -> Any:
        if lost:
            raise NvmlError
        return SimpleNamespace(total=12 * GIB)

    def handle(_: int) -> int:
        return 7

    return SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetName=lambda _: b"NVIDIA TITAN X (Pascal)",
        nvmlDeviceGetCudaComputeCapability=lambda _: (6, 1),
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetPciInfo=lambda _: SimpleNamespace(busId=b"00000000:17:00.0"),
    )


class SmiError(Exception):
    pass


def smi(*, loaded: bool = True, name: str = "AMD Instinct MI300X", arch: str = "gfx942", units: Any = 304) -> Any:
    """amdsmi of a host with one device."""

    def init() -> None:
        if not loaded:
            raise SmiError

    def total(_: int, kind: str) -> int:
        if kind == "gtt":
            raise SmiError
        return 192 * GIB

    facts = {"market_name": name, "target_graphics_version": arch, "num_compute_units": units}
    return SimpleNamespace(
        AmdSmiException=SmiError,
        AmdSmiMemoryType=SimpleNamespace(VRAM="vram", GTT="gtt"),
        amdsmi_init=init,
        amdsmi_shut_down=lambda: None,
        amdsmi_get_processor_handles=lambda: [3],
        amdsmi_get_gpu_asic_info=lambda _: facts,
        amdsmi_get_gpu_device_bdf=lambda _: "0000:0C:00.0",
        amdsmi_get_gpu_memory_total=total,
    )


def test_nvml() -> None:
    (found,) = gpus_libraries.from_nvml(nvml())
    want = Device("nvidia", name="NVIDIA TITAN X (Pascal)", arch="sm_61", pci="0000:17:00.0", memory=12 * GIB)
    assert found == replace(want, sources=("nvml",))
    assert gpus_libraries.from_nvml(nvml(lost=True))[0].memory is None
    assert gpus_libraries.from_nvml(nvml(loaded=False)) == []


def test_amdsmi() -> None:
    (found,) = gpus_libraries.from_amdsmi(smi())
    want = Device("amd", name="AMD Instinct MI300X", arch="gfx942", pci="0000:0c:00.0", units=304, memory=192 * GIB)
    assert found == replace(want, sources=("amdsmi",))
    assert gpus_libraries.from_amdsmi(smi(loaded=False)) == []
    (found,) = gpus_libraries.from_amdsmi(smi(name="N/A", arch="gfxN/A", units="N/A"))
    assert (found.name, found.arch, found.units) == ("", "", None)
    assert gpus_libraries.from_amdsmi(smi(arch="gfx1100", units=96))[0].units == 48  # torch's way to count


def test_libraries_that_are_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """amdsmi without the driver's library fails with a KeyError."""
    write(tmp_path, "library_without_driver.py", "{}['libamd_smi.so']\n")
    write(tmp_path, "library_with_driver.py", "init = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert gpus.import_or_none("library_without_driver") is None
    assert gpus.import_or_none("no_such_library") is None
    assert gpus.import_or_none("library_with_driver") is not None


@pytest.mark.parametrize(
    ("facts", "address"),
    [
        ({"location_id": 0xF500}, "0000:f5:00.0"),
        ({"location_id": 0x050B, "domain": 1}, "0001:05:01.3"),
        ({"location_id": 3 << 28 | 0x7500}, "0000:75:00.0"),  # the fourth partition of a device
        ({}, "0000:00:00.0"),
    ],
)
def test_addresses_as_amdkfd_packs_them(facts: dict[str, int], address: str) -> None:
    assert gpus_sysfs.kfd_address(facts) == address
