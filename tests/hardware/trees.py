"""Made-up hosts: the files below /sys, /proc and /dev that GPU drivers make, and modules that answer as theirs do."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

KFD = "sys/class/kfd/kfd/topology/nodes"
GIB = 1 << 30


def write(root: Path, path: str, text: str) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def lines(**facts: int) -> str:
    return "".join(f"{name} {value}\n" for name, value in facts.items())


def cpu_node(root: Path, number: int = 0) -> None:
    write(root, f"{KFD}/{number}/properties", lines(cpu_cores_count=64, simd_count=0, gfx_target_version=0))


def amd(
    root: Path,
    number: int,
    bus: int,
    version: int,
    device: int,
    compute_units: int,
    vram: int,
    gtt: int = 0,
    name: str = "",
    cpu_cores: int = 0,
    kfd: bool = True,
) -> None:
    """One AMD GPU: KFD's node `number`, a card of drm."""
    if kfd:
        per_unit = 2 if version >= 100000 else 4
        facts = lines(
            cpu_cores_count=cpu_cores,
            simd_count=compute_units * per_unit,
            simd_per_cu=per_unit,
            gfx_target_version=version,
            vendor_id=0x1002,
            device_id=device,
            location_id=bus << 8,
            domain=0,
        )
        write(root, f"{KFD}/{number}/properties", facts)
        write(root, f"{KFD}/{number}/mem_banks/0/properties", lines(heap_type=1, size_in_bytes=vram))
    card(root, number, 0x1002, bus, device, vram=vram, gtt=gtt, name=name)


def card(
    root: Path, number: int, vendor: int, bus: int, device: int, vram: int = 0, gtt: int = 0, name: str = ""
) -> None:
    """A card of drm, with a plug that is none."""
    folder = f"sys/class/drm/card{number}/device"
    write(root, f"{folder}/vendor", f"{vendor:#06x}\n")
    write(root, f"{folder}/device", f"{device:#06x}\n")
    write(root, f"{folder}/uevent", f"DRIVER=x\nPCI_CLASS=38000\nPCI_SLOT_NAME=0000:{bus:02x}:00.0\n")
    write(root, f"sys/class/drm/card{number}-DP-1/device/vendor", f"{vendor:#06x}\n")
    if vram:
        write(root, f"{folder}/mem_info_vram_total", f"{vram}\n")
        write(root, f"{folder}/mem_info_gtt_total", f"{gtt}\n")
    if name:
        write(root, f"{folder}/product_name", f"{name}\n")


def nvidia(root: Path, bus: int, name: str) -> None:
    """What NVIDIA's own driver says without a card of drm."""
    text = f"Model: \t\t {name}\nIRQ:   \t\t 97\nGPU UUID: \t GPU-00000000\nBus Type: \t PCIe\n"
    write(root, f"proc/driver/nvidia/gpus/0000:{bus:02x}:00.0/information", text)


def chimera(root: Path) -> Path:
    """The workstation of 2023: an MI100 to compute with, a TITAN X for the screen, a Xeon."""
    cpu_node(root)
    amd(root, 1, 0x65, 90008, 0x738C, 120, 32 * GIB, 63 * GIB)
    nvidia(root, 0x17, "TITAN X (Pascal)")
    card(root, 0, 0x1A03, 0x03, 0x2000)  # the board's own screen
    return root


def torch_module(vendor: str | None, *devices: Any) -> Any:
    """torch as its wheels are: vendor "amd" (ROCm), "nvidia" (CUDA), None (CPU)."""
    cuda = SimpleNamespace(
        is_available=lambda: bool(devices),
        device_count=lambda: len(devices),
        get_device_properties=lambda number: devices[number],
    )
    version = SimpleNamespace(hip="6.4.43482" if vendor == "amd" else None, cuda="12.8" if vendor == "nvidia" else None)
    return SimpleNamespace(cuda=cuda, version=version)


def torch_device(name: str, arch: str, units: int, memory: int, bus: int | None = None, integrated: int = 0) -> Any:
    """arch: "gfx90a:sramecc+:xnack-" or "sm_61"."""
    major, minor = (int(arch[3:-1]), int(arch[-1])) if arch.startswith("sm_") else (9, 0)
    facts = SimpleNamespace(
        name=name, major=major, minor=minor, multi_processor_count=units, total_memory=memory, is_integrated=integrated
    )
    if arch.startswith("gfx"):
        facts.gcnArchName = arch
    if bus is not None:
        facts.pci_domain_id, facts.pci_bus_id, facts.pci_device_id = 0, bus, 0
    return facts
