"""Accelerators as products: by the names drivers give them, with the figures of their data sheets (products.toml)."""

import re
from dataclasses import dataclass
from functools import cache

from roofline.hardware.chips.chips import read_table

SIXTEEN_BITS = ("bf16", "fp16")


@dataclass(frozen=True)
class Figure:
    """value: in the unit of its field in Product; source: where it is from."""

    value: float
    source: str


@dataclass(frozen=True)
class Product:
    """One product. Figures are of the whole package; None where no source gives one for sure.

    name: what it is called for short; match: regular expression of the whole name that drivers give a device; codes:
    PCI device numbers that no other product has, but for one of other units; chip: its architecture; units:
    multiprocessors of one device as torch counts them (on RDNA, work group processors); dies: devices in one package;
    unified: it shares its memory with a CPU.

    bf16, fp16, fp8: dense FLOP/s with fp32 accumulation; memory: bytes; bandwidth, link: bytes a second, `link` over
    all links to other devices in both directions; watts.
    """

    name: str
    match: str
    chip: str
    units: int
    dies: int = 1
    unified: bool = False
    codes: tuple[str, ...] = ()
    bf16: Figure | None = None
    fp16: Figure | None = None
    fp8: Figure | None = None
    memory: Figure | None = None
    bandwidth: Figure | None = None
    watts: Figure | None = None
    link: Figure | None = None


@cache
def products() -> tuple[Product, ...]:
    """All of them, in the order of the file."""
    table = read_table("products.toml")
    sources = table["sources"]
    scales = {"bf16": 1e12, "fp16": 1e12, "fp8": 1e12, "memory": 1 << 30, "bandwidth": 1e9, "link": 1e9, "watts": 1}
    rows = []
    for row in table["product"]:
        figures = {key: Figure(row[key][0] * scales[key], sources[row[key][1]]) for key in scales if key in row}
        if "bf16" in figures:
            figures.setdefault("fp16", figures["bf16"])
        rows.append(Product(**{**row, **figures, "codes": tuple(row.get("codes", ()))}))
    return tuple(rows)


def find(name: str, units: int | None = None, code: str = "") -> Product | None:
    """The product a device is, None where it is not known.

    name: as drivers and torch have it. units: multiprocessors as torch counts them; a device with fewer is a part of
    the product and does not reach its figures; without them, a name of several products is none. code: the PCI device
    number, for a name that no product has.
    """
    matching = [product for product in products() if re.fullmatch(product.match, name.strip(), re.IGNORECASE)]
    if not matching and code:
        matching = [product for product in products() if code in product.codes]
    if units is not None:
        matching = [product for product in matching if product.units == units]
    return matching[0] if len(matching) == 1 else None


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
    """The peak of a device; None where the table has none: for a part of a product, or one that it does not list.

    name, units: as torch.cuda.get_device_name and multi_processor_count have them; precision: of the products: "bf16"
    and "fp16" have figures, "fp32" has none.
    """
    product = find(name, units)
    if product is None or precision not in SIXTEEN_BITS:
        return None
    figure = product.bf16 if precision == "bf16" else product.fp16
    if figure is None:
        return None
    package = product.name if product.dies > 1 else ""
    return Peak(figure.value / product.dies, figure.source, package, product.dies)
