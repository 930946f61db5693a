"""The GPUs of a host, of whatever vendors, under names that stay: what drivers, libraries and torch know, joined.

Nothing here imports torch: it is handed in. Nothing starts a GPU: /sys and /proc are read, and amdsmi and NVML where
their packages are installed.
"""

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from roofline.common.errors import ConfigError
from roofline.hardware.chips import chips
from roofline.hardware.gpus import libraries as gpus_libraries
from roofline.hardware.gpus import sysfs as gpus_sysfs
from roofline.hardware.gpus.device import Device

VENDORS = ("amd", "nvidia", "intel")
# Those that LLVM's AMDGPU backend lists as a part of a chip with a CPU, whose memory they use.
_INTEGRATED = {
    *("gfx902", "gfx909", "gfx90c", "gfx1033", "gfx1035", "gfx1036", "gfx1103", "gfx1150", "gfx1151", "gfx1152"),
}


def detect(root: Path = Path("/"), torch: Any = None, amdsmi: Any = None, pynvml: Any = None) -> tuple[Device, ...]:
    """All GPUs, by vendor and PCI address.

    root: where /sys and /proc are looked for (tests give a made-up tree); torch, amdsmi, pynvml: the modules, None
    where they are not to be asked (see `import_or_none`).
    """
    found = gpus_sysfs.sources(root)
    if amdsmi is not None:
        found.append(gpus_libraries.from_amdsmi(amdsmi))
    if pynvml is not None:
        found.append(gpus_libraries.from_nvml(pynvml))
    if torch is not None:
        found.append(gpus_libraries.from_torch(torch))
    return merge_sources(found)


def import_or_none(library: str) -> Any | None:
    """The module "amdsmi" or "pynvml", None where it cannot be imported: both need a driver's shared library."""
    try:
        return importlib.import_module(library)
    except Exception:  # amdsmi raises a KeyError where the library is not there
        return None


def merge_sources(sources: Iterable[Sequence[Device]]) -> tuple[Device, ...]:
    """One list of several: devices of one PCI address (the nth at that address with the nth) are one device.

    Earlier sources win but for the name, which a library knows better than /sys, and the memory, of which the smallest
    figure counts: torch may have a slice of a device. A device without an address takes the place of the first that its
    source has not told of yet and whose architecture agrees.
    """
    joined: list[Device] = []
    for devices in sources:
        told: set[int] = set()
        for device in sorted(devices, key=lambda found: not found.pci):
            place = next((i for i, known in enumerate(joined) if i not in told and _same(known, device)), None)
            if place is None:
                place = len(joined)
                joined.append(device)
            else:
                joined[place] = _joined(joined[place], device)
            told.add(place)
    ordered = sorted(joined, key=lambda found: (VENDORS.index(found.vendor), not found.pci, found.pci))
    counts = dict.fromkeys(VENDORS, 0)
    numbered = []
    for device in ordered:
        numbered.append(replace(_completed(device), index=counts[device.vendor]))
        counts[device.vendor] += 1
    return tuple(numbered)


def _same(known: Device, device: Device) -> bool:
    if known.vendor != device.vendor:
        return False
    if known.pci and device.pci:
        return known.pci == device.pci
    return not known.arch or not device.arch or known.arch == device.arch


def _joined(known: Device, more: Device) -> Device:
    return Device(
        vendor=known.vendor,
        name=more.name or known.name,
        arch=known.arch or more.arch,
        pci=known.pci or more.pci,
        code=known.code or more.code,
        units=known.units if known.units is not None else more.units,
        memory=min((told for told in (known.memory, more.memory) if told is not None), default=None),
        shared=known.shared if known.shared is not None else more.shared,
        unified=known.unified or more.unified,
        torch=known.torch if known.torch is not None else more.torch,
        sources=(*known.sources, *more.sources),
    )


def _completed(device: Device) -> Device:
    """With what follows from what it was sold as."""
    product = device.product
    arch = device.arch or (product.chip if product else "")
    unified = device.unified or arch in _INTEGRATED or bool(product and product.unified)
    return replace(device, arch=arch, unified=unified)


def select(devices: Sequence[Device], wanted: str) -> tuple[Device, ...]:
    """The devices that a text names: ids ("amd:0", "nvidia:1"), vendors, products ("MI100") or architectures.

    Several with commas, in that order, each once; a bare number goes on with the vendor of the id before it
    ("amd:0,1,4,6"). A vendor's name leaves out what no kernel is compiled for, such as the part of a CPU that drives
    the screen, where it has other devices. Raises ConfigError, with all there are, where a part names none.
    """
    chosen: list[Device] = []
    vendor = ""
    for part in (piece.strip().lower() for piece in wanted.split(",")):
        if part.isdigit() and vendor:
            part = f"{vendor}:{part}"
        found = [device for device in devices if part and part in _names(device)]
        if part in VENDORS:
            found = [device for device in found if chips.refused(device.arch) is None] or found
        if not found:
            there = ", ".join(f"{device.title} ({device.arch or 'architecture not known'})" for device in devices)
            raise ConfigError(f"no GPU of this host is {part or wanted!r}; there are: {there or 'none'}")
        vendor = part.partition(":")[0] if ":" in part else ""
        chosen += [device for device in found if device not in chosen]
    return tuple(chosen)


def _names(device: Device) -> set[str]:
    product = device.product
    return {device.id, device.vendor, device.name.lower(), device.arch, product.name.lower() if product else ""}
