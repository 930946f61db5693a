"""`Device`: one GPU of a host, with its product, its usable memory and its architecture."""

from dataclasses import dataclass

from roofline.common.errors import UnsupportedError
from roofline.hardware.chips import chips, products


@dataclass(frozen=True)
class Device:
    """One device as its driver lists it: a card, one die of an MI250, one partition of an MI300X.

    vendor: "amd", "nvidia" or "intel"; index: among that vendor's, by PCI address; name: as the driver has it; arch:
    architecture ("gfx90a", "sm_90"), "" where nothing says it; pci: address "0000:c1:00.0"; code: its PCI device number
    "740f"; both "" where not known; units: multiprocessors as torch counts them.

    memory: bytes of its own that the driver reports; shared: bytes of the host's memory that it may map; unified: it is
    on one chip with the CPU and uses the CPU's memory; torch: its number in torch.cuda, None where torch does not see
    it; sources: what reported it.
    """

    vendor: str
    index: int = 0
    name: str = ""
    arch: str = ""
    pci: str = ""
    code: str = ""
    units: int | None = None
    memory: int | None = None
    shared: int | None = None
    unified: bool = False
    torch: int | None = None
    sources: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """What it is selected by: "amd:0"."""
        return f"{self.vendor}:{self.index}"

    @property
    def product(self) -> products.Product | None:
        """The product it is, None where the table has none or the device is only a part of one."""
        return products.find(self.name, self.units, self.code)

    @property
    def usable(self) -> int | None:
        """Bytes that weights and cache may take: with unified memory what it may map of the host's too.

        Firmware sets a small part of an APU's memory aside as video memory; the driver maps the rest on demand (GTT). A
        product whose package holds all its memory (MI300A) has no more than that, though the driver counts it twice.
        """
        if not self.unified or self.memory is None:
            return self.memory
        product, total = self.product, self.memory + (self.shared or 0)
        return min(total, int(product.memory.value)) if product and product.memory else total

    def chip(self) -> chips.Chip:
        """The row of the table to use. Raises UnsupportedError naming the device and why it cannot be used."""
        if not self.arch:
            where = "torch or NVML" if self.vendor == "nvidia" else "its driver"
            reason = chips.refused(self.vendor) or f"{where} is needed to tell its architecture"
            raise UnsupportedError(self.title, reason, ("the cpu backend",))
        try:
            return chips.resolve(self.arch)
        except UnsupportedError as error:
            raise UnsupportedError(f"{self.title} ({self.arch})", error.reason, error.alternatives) from error

    @property
    def title(self) -> str:
        """Id and name, for messages."""
        product = self.product
        name = self.name or (product.name if product else f"device {self.code or 'of unknown number'}")
        return f"{self.id} {name}"
