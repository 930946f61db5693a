"""Chips as products: by the names drivers give them, with the figures of their data sheets (products.toml)."""

import math
import re
from dataclasses import dataclass, replace
from functools import cache

from roofline.common.errors import ConfigError
from roofline.common.names import did_you_mean
from roofline.hardware.chips.chips import read_table

SIXTEEN_BITS = ("bf16", "fp16")
HOSTS = ("x86-64", "aarch64", "apple")  # architectures that the cpu backend computes on


@dataclass(frozen=True)
class ProductFigure:
    """value: in the unit of its field in Product; source: where it is from."""

    value: float
    source: str


@dataclass(frozen=True)
class Product:
    """One product. Figures are of the whole package; None where no source gives one for sure.

    name: what it is called for short; also: what people call it besides; match: regular expression of the whole name
    that drivers give a device; codes: PCI device numbers that no other product has, but for one of other units; chip:
    its architecture; units: multiprocessors of one device as torch counts them (on RDNA, work group processors), of a
    CPU cores; dies: devices in one package; unified: it shares its memory with a CPU, or is one.

    bf16, fp16, fp8, fp4: dense FLOP/s with fp32 accumulation; int8: dense operations a second; memory: bytes;
    bandwidth, link: bytes a second, `link` over all links to other devices in both directions; watts.
    """

    name: str
    match: str
    chip: str
    units: int
    dies: int = 1
    unified: bool = False
    codes: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    bf16: ProductFigure | None = None
    fp16: ProductFigure | None = None
    fp8: ProductFigure | None = None
    int8: ProductFigure | None = None
    fp4: ProductFigure | None = None
    memory: ProductFigure | None = None
    bandwidth: ProductFigure | None = None
    watts: ProductFigure | None = None
    link: ProductFigure | None = None

    @property
    def host(self) -> bool:
        """Whether the cpu backend computes on it: a CPU, or a chip of Apple's."""
        return self.chip in HOSTS

    def with_memory(self, gigabytes: float) -> "Product":
        """The product with so much memory, in GB (2^30 bytes) of the whole package."""
        return replace(self, memory=ProductFigure(gigabytes * (1 << 30), "as asked for"))


@cache
def products() -> tuple[Product, ...]:
    """All of them, in the order of the file."""
    table = read_table("products.toml")
    sources = table["sources"]
    scales = dict.fromkeys(("bf16", "fp16", "fp8", "int8", "fp4"), 1e12)
    scales |= {"memory": 1 << 30, "bandwidth": 1e9, "link": 1e9, "watts": 1}
    rows = []
    for row in table["product"]:
        figures = {key: ProductFigure(row[key][0] * scales[key], sources[row[key][1]]) for key in scales if key in row}
        if "bf16" in figures:
            figures.setdefault("fp16", figures["bf16"])
        lists = {key: tuple(row.get(key, ())) for key in ("codes", "also")}
        rows.append(Product(**{**row, **figures, **lists}))
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


def titled(name: str) -> Product:
    """The product that a person names: by one of its names in the table, or as drivers have it, whatever the case and
    the blanks; with or without its maker's. Never another one instead.

    Raises ConfigError for a name of several products, listing them, and for one of none, with the nearest.
    """
    key = _key(name)
    exact = [
        product
        for product in products()
        if key in map(_key, (product.name, *product.also)) or re.fullmatch(product.match, name.strip(), re.IGNORECASE)
    ]
    if len(exact) == 1:
        return exact[0]
    several = exact or [product for product in products() if key and _key(product.name).startswith(key)]
    if len(several) > 1:
        raise ConfigError(f"{name!r} is several products: say which of {', '.join(p.name for p in several)}")
    names = {product.name.lower(): product.name for product in products()}
    near = did_you_mean(name.lower(), names)
    for lower, spelled in names.items():
        near = near.replace(repr(lower), repr(spelled))
    raise ConfigError(f"there is no chip {name!r} in the table of products{near} (known: {', '.join(names.values())})")


def _key(name: str) -> str:
    """A name without its maker's, blanks and signs, in lower case."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "".join(word for word in words if word not in _MAKERS)


_MAKERS = ("nvidia", "amd", "instinct", "geforce", "radeon", "intel", "apple", "aws")


@dataclass(frozen=True)
class SheetRoofs:
    """What one device of a product reaches by its data sheet, in the words of `hardware.roofs.Roofs`.

    The table has no rates for arithmetic outside matrix instructions, and none of matrix instructions for some: these
    are infinite, and what is computed so takes no time beside its reads. f16_flops, f8_flops, f4_flops, int8_ops: None
    where the table has no rate of its own for these: the chip widens such numbers and multiplies wider ones.
    without_bf16: whether the chip has no products of bf16, so that bf16_flops is the rate of those of f16.
    """

    bf16_flops: float
    bytes_per_s: float
    sources: tuple[str, ...]
    f32_flops: float = math.inf
    int8_ops: float | None = None
    f16_flops: float | None = None
    f8_flops: float | None = None
    f4_flops: float | None = None
    without_bf16: bool = False

    def read_bytes_per_s(self, working_set: float) -> float:
        """The bandwidth of its memory, whatever is read from it."""
        return self.bytes_per_s


def sheet_roofs(product: Product) -> SheetRoofs | None:
    """Return the roofs of one device by its data sheet, one die where a package has several; None where the table has
    no bandwidth."""
    if product.bandwidth is None:
        return None
    rate = product.bf16 or product.fp16  # some have no bf16
    flops = math.inf if rate is None else rate.value / product.dies
    figures = (product.bandwidth, rate)
    sources = dict.fromkeys(figure.source for figure in figures if figure is not None)
    narrow = (product.fp16, product.fp8, product.fp4, product.int8)
    f16, f8, f4, int8 = (None if each is None else each.value / product.dies for each in narrow)
    return SheetRoofs(
        bf16_flops=flops,
        bytes_per_s=product.bandwidth.value / product.dies,
        sources=tuple(sources),
        int8_ops=math.inf if product.host else int8,
        f16_flops=f16,
        f8_flops=f8,
        f4_flops=f4,
        without_bf16=product.bf16 is None and product.fp16 is not None,
    )


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
