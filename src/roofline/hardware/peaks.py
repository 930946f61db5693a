"""What data sheets promise of accelerators in 16-bit products, by the name that torch gives a device.

A device that is not in the table, or only a part of a chip, has no peak: no figure is better than another chip's.
"""

import re
from dataclasses import dataclass

SIXTEEN_BITS = ("bf16", "fp16")


@dataclass(frozen=True)
class Peak:
    """Dense FLOP/s of one device as torch lists it, in bf16 or fp16.

    source: where the figure is from. devices: how many make a package, which data sheets and some publications count
    as one; package: the package's name.
    """

    flops: float
    source: str
    package: str = ""
    devices: int = 1


@dataclass(frozen=True)
class _Chip:
    """pattern: of the whole device name; units: multiprocessors of the whole chip, fewer are a slice of it."""

    pattern: str
    units: int
    peak: Peak


_NVIDIA, _AMD = "NVIDIA {} data sheet, dense", "AMD Instinct {} data sheet, dense"
_CHIPS = (
    _Chip(r"NVIDIA A100[- ](SXM4|PCIE|PCIe|\d+GB).*", 108, Peak(312e12, _NVIDIA.format("A100"))),
    _Chip(r"NVIDIA H100 80GB HBM3", 132, Peak(989e12, _NVIDIA.format("H100 SXM"))),
    _Chip(r"NVIDIA H100 PCIe", 114, Peak(756e12, _NVIDIA.format("H100 PCIe"))),
    _Chip(r"NVIDIA H100 NVL", 132, Peak(835e12, _NVIDIA.format("H100 NVL"))),
    _Chip(r"NVIDIA H200", 132, Peak(989e12, _NVIDIA.format("H200 SXM"))),
    _Chip(r"NVIDIA B200", 148, Peak(2250e12, _NVIDIA.format("B200"))),
    # Two dies (GCDs) in a package, each a device to torch. MI250 and MI250X can go by one name: their units differ.
    _Chip(r"AMD Instinct MI250(X ?/ ?MI250)?", 104, Peak(181.05e12, _AMD.format("MI250"), "MI250", 2)),
    _Chip(r"AMD Instinct MI250X( ?/ ?MI250)?", 110, Peak(191.5e12, _AMD.format("MI250X"), "MI250X", 2)),
    _Chip(r"AMD Instinct MI300X.*", 304, Peak(1307.4e12, _AMD.format("MI300X"))),
    _Chip(r"AMD Instinct MI325X.*", 304, Peak(1307.4e12, _AMD.format("MI325X"))),
    _Chip(r"AMD Instinct MI355X.*", 256, Peak(2500e12, _AMD.format("MI355X"))),
)


def peak(name: str, units: int, precision: str = "bf16") -> Peak | None:
    """The peak of a device, None where it is not known.

    Args:
        name: as torch.cuda.get_device_name has it; units: its multi_processor_count.
        precision: of the products: "bf16" and "fp16" have figures, "fp32" has none.
    """
    if precision not in SIXTEEN_BITS:
        return None
    found = (chip.peak for chip in _CHIPS if chip.units == units and re.fullmatch(chip.pattern, name))
    return next(found, None)
