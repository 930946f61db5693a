"""What data sheets promise of accelerators in 16-bit products, by the name that torch gives a device.

A device that is not in the table of products, or only a part of one, has no peak: no figure is better than another
chip's.
"""

from dataclasses import dataclass

from roofline.hardware.chips import products

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


def peak(name: str, units: int, precision: str = "bf16") -> Peak | None:
    """The peak of a device, None where it is not known.

    Args:
        name: as torch.cuda.get_device_name has it; units: its multi_processor_count.
        precision: of the products: "bf16" and "fp16" have figures, "fp32" has none.
    """
    product = products.find(name, units)
    if product is None or precision not in SIXTEEN_BITS:
        return None
    figure = product.bf16 if precision == "bf16" else product.fp16
    if figure is None:
        return None
    package = product.name if product.dies > 1 else ""
    return Peak(figure.value / product.dies, figure.source, package, product.dies)
