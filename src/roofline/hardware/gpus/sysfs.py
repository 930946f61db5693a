"""GPUs as the kernel's drivers show them in /sys and /proc, which needs no package and no permission to use them.

amdkfd's topology has AMD's architectures and memory (Documentation/ABI and include/uapi/linux/kfd_sysfs.h of Linux),
/sys/class/drm every vendor's cards, /proc/driver/nvidia the names of NVIDIA's.
"""

from pathlib import Path

from roofline.common.files import integer, text_of
from roofline.hardware.gpus.device import Device

_VENDORS = {"0x1002": "amd", "0x10de": "nvidia", "0x8086": "intel"}
_NODES = "sys/class/kfd/kfd/topology/nodes"
_VIDEO_HEAPS = (1, 2)  # KFD's heap types of a device's own memory, public and private


def sources(root: Path) -> list[list[Device]]:
    """The devices that each of the kernel's places below `root` lists."""
    return [_kfd(root), _drm(root), _nvidia(root)]


def kfd_nodes(root: Path) -> dict[int, Path]:
    """Folders of KFD's nodes that are GPUs, by node number."""
    folders = {integer(folder.name): folder for folder in (root / _NODES).glob("[0-9]*")}
    return {
        number: folder
        for number, folder in sorted((number, folder) for number, folder in folders.items() if number is not None)
        if properties(folder / "properties").get("simd_count")
    }


def kfd_address(facts: dict[str, int]) -> str:
    """PCI address of a node's properties: location_id has bus, device and function as PCI packs them."""
    place = facts.get("location_id", 0)
    return f"{facts.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"


def properties(file: Path) -> dict[str, int]:
    """A file of KFD: "name number" on each line. Empty where it may not be read, as in containers."""
    words = [line.split() for line in (text_of(file) or "").splitlines()]
    numbers = {pair[0]: integer(pair[1]) for pair in words if len(pair) == 2}
    return {name: number for name, number in numbers.items() if number is not None}


def torch_units(arch: str, compute_units: int | None) -> int | None:
    """Multiprocessors as torch counts them: on RDNA work group processors, two compute units each."""
    if compute_units is None:
        return None
    return compute_units if arch.startswith("gfx9") else compute_units // 2


def _kfd(root: Path) -> list[Device]:
    devices = []
    for folder in kfd_nodes(root).values():
        facts = properties(folder / "properties")
        arch = _architecture(facts.get("gfx_target_version", 0))
        per_unit = facts.get("simd_per_cu", 0)
        banks = [properties(file) for file in (folder / "mem_banks").glob("*/properties")]
        memory = sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _VIDEO_HEAPS)
        devices.append(
            Device(
                "amd",
                arch=arch,
                pci=kfd_address(facts),
                code=f"{facts['device_id']:04x}" if "device_id" in facts else "",
                units=torch_units(arch, facts["simd_count"] // per_unit if per_unit else None),
                memory=memory or None,
                unified=facts.get("cpu_cores_count", 0) > 0,
                sources=("kfd",),
            )
        )
    return devices


def _architecture(version: int) -> str:
    """90010 -> "gfx90a": major, minor and stepping, two decimal digits each; the last two become hexadecimal."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else ""


def _drm(root: Path) -> list[Device]:
    devices = []
    for folder in sorted((root / "sys/class/drm").glob("card*/device")):
        vendor = _VENDORS.get(text_of(folder / "vendor") or "")
        if vendor is None or "-" in folder.parent.name:  # card0-DP-1 is a plug of card0
            continue
        lines = (text_of(folder / "uevent") or "").splitlines()
        facts = dict(line.split("=", 1) for line in lines if "=" in line)
        devices.append(
            Device(
                vendor,
                name=text_of(folder / "product_name") or "",
                pci=facts.get("PCI_SLOT_NAME", "").lower(),
                code=(text_of(folder / "device") or "").removeprefix("0x").lower(),
                memory=integer(text_of(folder / "mem_info_vram_total")),
                shared=integer(text_of(folder / "mem_info_gtt_total")),
                sources=("drm",),
            )
        )
    return devices


def _nvidia(root: Path) -> list[Device]:
    devices = []
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        lines = [line.partition(":") for line in (text_of(folder / "information") or "").splitlines()]
        name = next((value.strip() for key, _, value in lines if key.strip() == "Model"), "")
        name = name if not name or name.startswith("NVIDIA") else f"NVIDIA {name}"
        devices.append(Device("nvidia", name=name, pci=folder.name.lower(), sources=("/proc/driver/nvidia",)))
    return devices
