"""How a model can lie on so many devices: how many share it, and how many copies that makes."""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from roofline.backends.capacity import Capacity
from roofline.backends.simulated.calibration import Calibration
from roofline.common.errors import CapacityError, ConfigError, UnsupportedError
from roofline.ops.batch import PAGE_TOKENS, BatchLimits

if TYPE_CHECKING:
    from roofline.backends.checkpoint import Tensors
    from roofline.backends.fit import ModelSplit
    from roofline.backends.simulated.executable import SimulatedExecutable
    from roofline.hardware.chips.products import Product, SheetRoofs
    from roofline.hardware.roofs import Roofs
    from roofline.models.config import ModelConfig

MESH = ("gfx942", "gfx950")  # architectures whose eight devices of a host are joined in pairs, each by one of 7 links
MESH_LINKS = 7
DIES = "gfx90a"  # architecture whose packages have two devices, joined by 4 links, and to other packages by single ones
DIE_LINKS, DIE_LINK = 4, 50e9  # bytes a second one way of one of these links (AMD CDNA 2 white paper)
IN_HOST = 8  # devices of a host, as servers with GPUs have them; a package of two is two
NETWORK = 50e9  # bytes a second that a device receives from those of other hosts: a port of 400 Gbit/s for each
PAGES_SIMULATED = 1 << 17  # of a cache at most: two million tokens, of which a scheduler keeps lists


@dataclass(frozen=True)
class Place:
    """Where a plan puts a model. product: None is this machine; count: devices in all; memory: bytes of each; in_host:
    devices of a host; network: bytes a second that a device receives from devices of other hosts."""

    name: str
    product: "Product | None"
    count: int
    memory: int
    roofs: "Roofs | SheetRoofs"
    in_host: int = IN_HOST
    network: float = NETWORK

    @property
    def is_host(self) -> bool:
        """Whether a CPU computes there."""
        return self.product is None or self.product.host


@dataclass(frozen=True)
class Arrangement:
    """One way to use the devices of a place.

    devices: that share a copy of the model; replicas: copies; pages: of the cache of each copy; limits: of a step;
    max_context: of a request; link_bytes_per_s: that a device receives from those it shares the model with, None where
    no table says.
    """

    place: Place
    split: "ModelSplit"
    devices: int
    replicas: int
    pages: int
    limits: BatchLimits
    max_context: int
    link_bytes_per_s: float | None

    @property
    def name(self) -> str:
        """Such as "TP 8 x 1"; of layers that are shared one after the other "PP 8 x 1"."""
        return f"{'PP' if len(self.split.parts) > 1 else 'TP'} {self.devices} x {self.replicas}"

    @property
    def crosses_hosts(self) -> bool:
        """Whether devices of several hosts share a copy of the model."""
        return self.devices > self.place.in_host

    @property
    def cache_tokens(self) -> int:
        """Tokens that the cache of a copy holds."""
        return self.pages * PAGE_TOKENS

    @property
    def state_slots(self) -> int:
        """Slots of recurrent state that lie beside the cache of a copy, for sequences and snapshots; 0: of a model
        without such state."""
        return self.split.fullest(self.place.memory).slots(self.pages)

    @property
    def weights(self) -> int:
        """Bytes of weights on the fullest device."""
        return max(part.needs.weights for part in self.split.parts)

    @property
    def workspace(self) -> int:
        """Bytes on that device beside weights and cache, of the largest step."""
        return self.split.fullest(self.place.memory).needs.workspace

    @cached_property
    def arithmetic(self) -> tuple[str, float]:
        """The arithmetic that most of a token takes, and a device's roof of it (`arithmetic_roof`)."""
        from roofline.program.passes.price import arithmetic_roof

        return arithmetic_roof(self.split.parts[0].program, self.place.roofs)

    @property
    def weight_bits(self) -> float:
        """Of a weight on average, as it lies in memory."""
        recipes = [recipe for part in self.split.parts for recipe in part.program.weights.values()]
        return 8 * sum(recipe.resident_bytes for recipe in recipes) / sum(prod(recipe.shape) for recipe in recipes)

    @property
    def counted(self) -> int:
        """How many times what a simulated step reads and computes is done by all devices together: it is of one of
        those that share a layer, and of all those that share layers one after the other."""
        return self.replicas * self.devices // len(self.split.parts)

    def executable(self, calibration: Calibration, name: str) -> "SimulatedExecutable":
        """One copy, simulated. name: of the model."""
        from roofline.backends.simulated.backend import simulate

        pages = min(self.pages, PAGES_SIMULATED)
        capacity = Capacity(self.limits, min(self.max_context, pages * PAGE_TOKENS), pages)
        label = f"{name} {self.place.name} {self.name}"
        return simulate(self.split, capacity, self.place.roofs, calibration, self.link_bytes_per_s, label)


def arrangements(
    model: "Tensors",
    config: "ModelConfig",
    place: Place,
    longest: int,
    step: tuple[int, int],
    kv_cache_dtype: str = "auto",
) -> list[Arrangement]:
    """All ways to divide the devices that leave room for a request, the fewest devices a copy first.

    Args:
        longest: tokens of the longest request.
        step: tokens and sequences of the largest step.

    Raises CapacityError, with the bytes, where the model fits in none; ConfigError for a request that is longer than
    the model's positions.
    """
    if longest > config.max_position:
        cause = f"a request of {longest:,} tokens is longer than the {config.max_position:,} positions of the model"
        raise ConfigError(f"{cause}: shorten prompt or answer")
    limits = BatchLimits(max(step), step[1], step[1], step[1] * -(-config.max_position // PAGE_TOKENS))
    fitting, failed = [], None
    for devices in _divisors(place.count):
        try:
            split = _split(model, config, place, devices, step, kv_cache_dtype)
        except (CapacityError, UnsupportedError) as error:
            failed = failed or error
            continue
        fullest = split.fullest(place.memory)
        pages = fullest.pages(place.memory)
        if pages * PAGE_TOKENS < longest:
            needed = fullest.needs.total(longest)
            remedy = "Take more devices, a smaller format (--dtype), or a chip with more memory."
            what = f"the model on {devices} x {place.name}, of the fullest device,"
            failed = CapacityError(what, needed, place.memory, "bytes", remedy)
            continue
        context = min(config.max_position, pages * PAGE_TOKENS)
        link = link_between(place.product, devices)
        if devices > place.in_host:
            link = min(link or place.network, place.network)
        replicas = place.count // devices
        fitting.append(
            Arrangement(
                place=place,
                split=split,
                devices=devices,
                replicas=replicas,
                pages=pages,
                limits=limits,
                max_context=context,
                link_bytes_per_s=link,
            )
        )
    if not fitting:
        assert failed is not None, "at least one was tried"
        raise failed
    return fitting


def _divisors(count: int) -> list[int]:
    """Devices that may share a copy: those that leave none idle, as many at most as a model is divided among."""
    from roofline.backends.fit import MOST_DEVICES

    return [devices for devices in range(1, min(count, MOST_DEVICES) + 1) if count % devices == 0]


def _split(
    model: "Tensors",
    config: "ModelConfig",
    place: Place,
    devices: int,
    step: tuple[int, int],
    kv_cache_dtype: str,
) -> "ModelSplit":
    from roofline.backends.fit import split_on_host, split_on_product

    if place.product is None:
        return split_on_host(model, config, kv_cache_dtype, step)
    return split_on_product(model, config, place.product, devices, kv_cache_dtype, step)


def link_between(product: "Product | None", devices: int) -> float | None:
    """Bytes a second that a device receives from devices of its host that it shares a copy with, by the data sheet."""
    if devices == 1 or product is None:
        return None
    if product.chip == DIES and product.dies > 1:
        return DIE_LINK * (DIE_LINKS if devices == product.dies else 1)
    if product.link is None:
        return None
    one_way = product.link.value / 2
    return one_way * min(devices - 1, MESH_LINKS) / MESH_LINKS if product.chip in MESH else one_way


def place_of(chip: str, count: int, memory: float | None, in_host: int = IN_HOST, network: float = NETWORK) -> Place:
    """The place that options name. chip: a product, "": this machine; memory: GB of a package, None: as the table says.

    Raises ConfigError for a product that is not known, or of which something is lacking.
    """
    from roofline.backends.fit import memory_of
    from roofline.backends.simulated.backend import THIS_MACHINE, roofs_of
    from roofline.hardware.chips.products import titled
    from roofline.hardware.detect import detect

    if not chip:
        machine = detect()
        if machine.memory_available is None:
            raise ConfigError("nothing says how much memory this machine has: name a chip (--chip)")
        return Place(
            name=machine.chip,
            product=None,
            count=1,
            memory=machine.memory_available,
            roofs=roofs_of(THIS_MACHINE),
        )
    product = titled(chip)
    if memory is not None:
        product = product.with_memory(memory)
    return Place(
        name=product.name,
        product=product,
        count=count,
        memory=memory_of(product),
        roofs=roofs_of(product.name),
        in_host=in_host,
        network=network,
    )
