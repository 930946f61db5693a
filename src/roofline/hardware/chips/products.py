"""What is sold, by the names drivers give it, and what its makers say it reaches: products.toml, read."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources


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
    table = tomllib.loads(resources.files("roofline.hardware.chips").joinpath("products.toml").read_text("utf-8"))
    sources = table["sources"]
    scales = {"bf16": 1e12, "fp16": 1e12, "fp8": 1e12, "memory": 1 << 30, "bandwidth": 1e9, "link": 1e9, "watts": 1}
    found = []
    for row in table["product"]:
        figures = {key: Figure(row[key][0] * scales[key], sources[row[key][1]]) for key in scales if key in row}
        if "bf16" in figures:
            figures.setdefault("fp16", figures["bf16"])
        found.append(Product(**{**row, **figures, "codes": tuple(row.get("codes", ()))}))
    return tuple(found)


def find(name: str, units: int | None = None, code: str = "") -> Product | None:
    """The product a device is, None where it is not known.

    name: as drivers and torch have it. units: multiprocessors as torch counts them; a device with fewer is a part of
    the product, which has not its figures; without them, what could be several products is none. code: the PCI device
    number, for a name that no product has.
    """
    matching = [product for product in products() if re.fullmatch(product.match, name.strip(), re.IGNORECASE)]
    if not matching and code:
        matching = [product for product in products() if code in product.codes]
    if units is not None:
        matching = [product for product in matching if product.units == units]
    return matching[0] if len(matching) == 1 else None
