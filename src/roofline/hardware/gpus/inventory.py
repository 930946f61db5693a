"""The GPUs of a host, of all vendors, under stable ids: what drivers, libraries and torch report, merged into one list.

Nothing here imports torch: it is handed in. Nothing starts a GPU: /sys and /proc are read, and amdsmi and NVML where
their packages are installed.
"""

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from roofline.common.errors import ConfigError
from roofline.hardware.chips import chips
from roofline.hardware.gpus import libraries, sysfs
from roofline.hardware.gpus.device import Device
from roofline.hardware.gpus.libraries import Library

VENDORS = ("amd", "nvidia", "intel")
# Those that LLVM's AMDGPU backend lists as a part of a chip with a CPU, whose memory they use.
_INTEGRATED = {
    *("gfx902", "gfx909", "gfx90c", "gfx1033", "gfx1035", "gfx1036", "gfx1103", "gfx1150", "gfx1151", "gfx1152"),
}


def detect(
    root: Path = Path("/"), torch: Library = None, amdsmi: Library = None, pynvml: Library = None
) -> tuple[Device, ...]:
    """All GPUs, by vendor and PCI address.

    root: where /sys and /proc are looked for (tests give a made-up tree); torch, amdsmi, pynvml: see
    `import_or_none`.
    """
    lists = sysfs.sources(root)
    if amdsmi is not None:
        lists.append(libraries.from_amdsmi(amdsmi))
    if pynvml is not None:
        lists.append(libraries.from_nvml(pynvml))
    if torch is not None:
        lists.append(libraries.from_torch(torch))
    return merge_sources(lists)


def import_or_none(library: str) -> Library:
    """The module "amdsmi" or "pynvml", None where it cannot be imported: both need a driver's shared library."""
    try:
        return importlib.import_module(library)
    except Exception:  # amdsmi raises a KeyError where the library is not there
        return None


def merge_sources(sources: Iterable[Sequence[Device]]) -> tuple[Device, ...]:
    """One list of several: devices of one PCI address (the nth at that address with the nth) are one device.

    Earlier sources win but for the name, which a library knows better than /sys, and the memory, of which the smallest
    figure counts: torch may have a slice of a device. A device without an address takes the place of the first that its
    source has not matched yet and whose architecture agrees.
    """
    joined: list[Device] = []
    for devices in sources:
        matched: set[int] = set()  # places in `joined` of this source's devices
        for device in sorted(devices, key=lambda device: not device.pci):
            place = next((i for i, old in enumerate(joined) if i not in matched and _may_be_same(old, device)), None)
            if place is None:
                place = len(joined)
                joined.append(device)
            else:
                joined[place] = _joined(joined[place], device)
            matched.add(place)
    ordered = sorted(joined, key=lambda device: (VENDORS.index(device.vendor), not device.pci, device.pci))
    counts = dict.fromkeys(VENDORS, 0)
    numbered = []
    for device in ordered:
        numbered.append(replace(_completed(device), index=counts[device.vendor]))
        counts[device.vendor] += 1
    return tuple(numbered)


def _may_be_same(one: Device, other: Device) -> bool:
    if one.vendor != other.vendor:
        return False
    if one.pci and other.pci:
        return one.pci == other.pci
    return not one.arch or not other.arch or one.arch == other.arch


def _joined(first: Device, second: Device) -> Device:
    return Device(
        vendor=first.vendor,
        name=second.name or first.name,
        arch=first.arch or second.arch,
        pci=first.pci or second.pci,
        code=first.code or second.code,
        units=first.units if first.units is not None else second.units,
        memory=min((size for size in (first.memory, second.memory) if size is not None), default=None),
        shared=first.shared if first.shared is not None else second.shared,
        unified=first.unified or second.unified,
        torch=first.torch if first.torch is not None else second.torch,
        sources=(*first.sources, *second.sources),
    )


def _completed(device: Device) -> Device:
    """The device with what its product implies: its architecture, and whether it shares the CPU's memory."""
    product = device.product
    arch = device.arch or (product.chip if product else "")
    unified = device.unified or arch in _INTEGRATED or bool(product and product.unified)
    return replace(device, arch=arch, unified=unified)


def select(devices: Sequence[Device], text: str) -> tuple[Device, ...]:
    """The devices that `text` lists: ids ("amd:0", "nvidia:1"), vendors, products ("MI100") or architectures.

    Several with commas, in that order, each once; a bare number goes on with the vendor of the id before it
    ("amd:0,1,4,6"). A vendor's name leaves out what no kernel is compiled for, such as the part of a CPU that drives
    the screen, where it has other devices. Raises ConfigError, with all there are, where a part names none.
    """
    chosen: list[Device] = []
    vendor = ""
    for part in (piece.strip().lower() for piece in text.split(",")):
        if part.isdigit() and vendor:
            part = f"{vendor}:{part}"
        matching = [device for device in devices if part and part in _names(device)]
        if part in VENDORS:
            matching = [device for device in matching if chips.refused(device.arch) is None] or matching
        if not matching:
            there = ", ".join(f"{device.title} ({device.arch or 'architecture not known'})" for device in devices)
            raise ConfigError(f"no GPU of this host is {part or text!r}; there are: {there or 'none'}")
        vendor = part.partition(":")[0] if ":" in part else ""
        chosen += [device for device in matching if device not in chosen]
    return tuple(chosen)


def _names(device: Device) -> set[str]:
    product = device.product
    return {device.id, device.vendor, device.name.lower(), device.arch, product.name.lower() if product else ""}
