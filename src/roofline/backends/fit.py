"""Will it fit: what a model leaves room for on devices of a product, or in this machine, and how fast it is at most.

All of it is read from the Program that a load would compile there, and from tables; no weights are read.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from roofline.backends.capacity import default_slots, device_slots, pages_within
from roofline.backends.options import LoadOptions
from roofline.common.errors import CapacityError, ConfigError, UnsupportedError
from roofline.ops import formats
from roofline.ops.batch import PAGE_TOKENS, BatchLimits
from roofline.program.ir import Program, Share
from roofline.program.target import STAND_INS

if TYPE_CHECKING:
    from roofline.backends.checkpoint import Tensors
    from roofline.backends.gpu.memory.requirements import Needs
    from roofline.hardware.chips.products import Product, SheetRoofs
    from roofline.hardware.roofs import Roofs
    from roofline.models.config import ModelConfig
    from roofline.program.rates import StepRate

MOST_DEVICES = 64
BATCHES = (1, 8, 64)  # sequences that rates are told of, beside as many as fit
MOST_SEQUENCES = 256  # of a step, where the options of loading do not say another number


@dataclass(frozen=True)
class Fit:
    """What fits on `devices` that share a model: its matrices, or, with `stages` above 1, its layers, one stage after
    the other. Bytes are of the one that has the least room for the cache; rates with stages are of all of them in turn.

    place: the product's name, or the chip of this machine; memory: of a device, as sold, or free now; workspace:
    what the largest step needs beside weights and cache, on a GPU with what driver and libraries are left
    (`RESERVED`), with the fewest slots of recurrent state; slots, slot_bytes: those that a load takes beside a cache of
    `cache_tokens`; token_bytes: of the cache; kv_format: its format; cache_tokens: for which there is room, 0 where
    not even one page fits; context: that was asked for; sequences: of this context that fit; longest: context that
    the cache and the model allow; roofs: None where nothing says them; limit: why no more devices can share the
    model, where it does not fit and they cannot; dies: devices in a package of the product; lacking: ops of the
    model that have no kernel there; arithmetic, operations: what most of a token is computed in, and its roof,
    operations a second of a device; held_in: formats of matrices -> those that they have in memory there.
    """

    place: str
    devices: int
    memory: int
    weights: int
    workspace: int
    token_bytes: int
    kv_format: str
    cache_tokens: int
    context: int
    sequences: int
    longest: int
    roofs: "Roofs | SheetRoofs | None"
    rates: "tuple[StepRate, ...]" = ()
    limit: str = ""
    dies: int = 1
    stages: int = 1
    lacking: tuple[str, ...] = ()
    arithmetic: str = ""
    operations: float = math.inf
    held_in: dict[str, str] = field(default_factory=dict)
    slots: int = 0
    slot_bytes: int = 0

    @property
    def fits(self) -> bool:
        """Whether weights, workspace and at least one page of the cache do."""
        return self.cache_tokens > 0


def on_product(
    model: "Tensors",
    config: "ModelConfig",
    product: "Product",
    context: int,
    count: int | None = None,
    kv_cache_dtype: str = "auto",
) -> Fit:
    """The fit on devices of a product.

    Args:
        count: of devices, a die of an MI250 being one; None: the least power of two that the model fits on, or the most
            that can share it.

    Raises ConfigError for a product whose memory the table does not know, CapacityError where `count` devices cannot
    share the model, UnsupportedError for a cache that the chip does not have.
    """
    from roofline.backends.gpu.runtime.lower import without_kernel
    from roofline.hardware.chips.products import sheet_roofs

    memory = memory_of(product)
    split = split_on_product(model, config, product, count, kv_cache_dtype)
    fit = _fit(product.name, memory, split, context, config.max_position)
    parts = () if product.host else split.parts
    lacking = dict.fromkeys(op for part in parts for op in without_kernel(part.program))
    return _rated(replace(fit, dies=product.dies, lacking=tuple(lacking)), split, sheet_roofs(product))


def memory_of(product: "Product") -> int:
    """Bytes of one device, as sold. Raises ConfigError for a product whose memory the table does not know."""
    if product.memory is None:
        cause = f"the table of products does not know how much memory {product.name} has"
        raise ConfigError(f"{cause}: name it with --memory")
    return int(product.memory.value) // product.dies


def split_on_product(
    model: "Tensors",
    config: "ModelConfig",
    product: "Product",
    count: int | None = None,
    kv_cache_dtype: str = "auto",
    step: tuple[int, int] | None = None,
) -> "ModelSplit":
    """What each device of a product has, as `on_product` divides the model. step: tokens and sequences of the largest
    step; None: those of a load that nobody gives others. A load leaves RESERVED of a GPU's memory to driver
    and libraries, and so do the needs here. Of a CPU, whose figures are of a socket, `count` is 1."""
    if product.host:
        if (count or 1) > 1:
            raise UnsupportedError(f"{count} sockets of {product.name}", "a model is divided among GPUs", ("one",))
        return split_on_host(model, config, kv_cache_dtype, step)
    from roofline.backends.gpu.backend import RESERVED, STEP, scratch_bytes
    from roofline.backends.gpu.program import compile_for_gpu
    from roofline.hardware.chips.chips import chips

    reserved = int(RESERVED * memory_of(product))
    options, chip = LoadOptions(backend="gpu", kv_cache_dtype=kv_cache_dtype), chips().get(product.chip)
    if kv_cache_dtype == "fp8" and chip is None:
        raise UnsupportedError(f"an fp8 KV cache on {product.name}", "no kernels are compiled for it", ("auto",))
    limits = _limits(*(step or STEP))

    def part_of(share: Share) -> DevicePart:
        program = compile_for_gpu(model, config, options, chip, share)
        scratch = scratch_bytes(program, limits) + reserved
        return _part(program, limits, scratch, device_slots(limits.segments) if program.state_groups else 0)

    return _least(part_of, memory_of(product), count)


def on_this_machine(model: "Tensors", config: "ModelConfig", context: int, kv_cache_dtype: str = "auto") -> Fit:
    """The fit in this machine's free memory, computed by its CPU, at its roofs where they have been measured.

    Raises ConfigError where nothing says how much memory there is.
    """
    from roofline.backends.cpu.roofs import stored_roofs
    from roofline.hardware.detect import detect

    machine = detect()
    if machine.memory_available is None:
        raise ConfigError("nothing says how much memory this machine has: name a chip (--chip)")
    split = split_on_host(model, config, kv_cache_dtype)
    fit = _fit(machine.chip, machine.memory_available, split, context, config.max_position)
    return _rated(fit, split, stored_roofs())


def split_on_host(
    model: "Tensors", config: "ModelConfig", kv_cache_dtype: str = "auto", step: tuple[int, int] | None = None
) -> "ModelSplit":
    """What a model takes that a CPU computes: one part. step: as of `split_on_product`."""
    from roofline.backends.capacity import HOST_STEP, host_kv_dtype, host_token_bytes
    from roofline.models import registry
    from roofline.program.compile import compile_program
    from roofline.program.target import CPU, with_cache

    target = with_cache(CPU, host_kv_dtype(kv_cache_dtype))
    program = compile_program(registry.get(config.family), config, model.tensors, target)
    token = sum(
        group.layers * host_token_bytes(group.format, group.kv_heads, group.head_dim, group.value_dim)
        for group in program.kv_groups.values()
    )
    part = _part(program, _limits(*(step or HOST_STEP)), 0)
    return ModelSplit(1, (replace(part, needs=replace(part.needs, token=token)),))


def _limits(tokens: int, sequences: int) -> BatchLimits:
    return BatchLimits(tokens=tokens, segments=sequences, rows=sequences, pages=sequences)


def _part(program: Program, limits: BatchLimits, scratch: int, fixed_slots: int = 0) -> "DevicePart":
    """A device that computes a Program in steps of these limits; scratch: bytes that it needs besides."""
    from roofline.backends.gpu.memory.requirements import needs_of

    part = DevicePart(program, needs_of(program, limits, extra=scratch), limits.segments, fixed_slots)
    return replace(part, needs=replace(part.needs, workspace=part.needs.workspace + part.state_bytes))


@dataclass(frozen=True)
class DevicePart:
    """What one device has: its Program, its needs, with the fewest slots of recurrent state in the workspace; running:
    sequences of the largest step; fixed_slots: of recurrent state, where pages do not change them; 0: they do."""

    program: Program
    needs: "Needs"
    running: int
    fixed_slots: int = 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot of recurrent state; 0: the model has none."""
        return sum(group.slot_bytes for group in self.program.state_groups.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of the fewest slots."""
        return self.slots(0) * self.slot_bytes

    def slots(self, pages: int) -> int:
        """Slots of recurrent state that a load takes beside so many pages."""
        page = self.needs.token * PAGE_TOKENS
        if self.fixed_slots:
            return self.fixed_slots
        return default_slots(pages * page, self.slot_bytes, self.running) if self.slot_bytes else 0

    def pages(self, memory: int) -> int:
        """Pages of the cache that a device of so many bytes has room for; beside it lie slots of recurrent state, on a
        host in as many bytes. Where no layer writes keys and values, pages take none."""
        room = memory - self.needs.weights - self.needs.workspace
        if not self.slot_bytes or self.fixed_slots:
            return pages_within(room, self.needs.token)
        return min(pages_within(room, self.needs.token), pages_within(room + self.state_bytes, 2 * self.needs.token))


@dataclass(frozen=True)
class ModelSplit:
    """A model on so many devices. parts: the fullest one's, where they share its matrices; of each stage, where they
    share its layers; limit: why no more can share it."""

    devices: int
    parts: tuple[DevicePart, ...]
    limit: str = ""

    def fullest(self, memory: int) -> DevicePart:
        """The part that leaves the least room for the cache, the heavier one where several leave none."""
        return min(self.parts, key=lambda part: (part.pages(memory), -part.needs.weights))


def _least(part_of: Callable[[Share], DevicePart], memory: int, count: int | None) -> ModelSplit:
    """The fewest devices that the model fits on, else the most that can share it. count: exactly so many."""

    def split(devices: int) -> ModelSplit:
        try:
            return ModelSplit(devices, (part_of(Share(0, devices)),))
        except UnsupportedError:  # matrices that cannot be shared
            if devices == 1:
                raise
        return ModelSplit(devices, tuple(part_of(Share(stage=n, stages=devices)) for n in range(devices)))

    best = split(count or 1)
    if count is not None:
        return best
    single, state, devices = best.parts[0].needs, best.parts[0].state_bytes, 1
    while not best.fullest(memory).pages(memory) and devices < MOST_DEVICES:
        devices *= 2
        whole_state = single.over(devices).total(PAGE_TOKENS)
        if whole_state - state + state // devices > memory and devices < MOST_DEVICES:
            continue  # shares are no smaller than equal ones
        try:
            best = split(devices)
        except (CapacityError, UnsupportedError) as error:
            return replace(best, limit=str(error))
    return best


def _fit(place: str, memory: int, split: ModelSplit, context: int, positions: int) -> Fit:
    fullest = split.fullest(memory)
    needs, pages = fullest.needs, fullest.pages(memory)
    formats = dict.fromkeys(group.format for group in fullest.program.kv_groups.values())
    return Fit(
        place=place,
        devices=split.devices,
        stages=len(split.parts),
        memory=memory,
        weights=needs.weights,
        workspace=needs.workspace,
        token_bytes=needs.token,
        kv_format="+".join(formats),
        cache_tokens=pages * PAGE_TOKENS,
        context=context,
        sequences=min(pages // -(-context // PAGE_TOKENS), fullest.slots(pages) if fullest.slot_bytes else pages),
        longest=min(pages * PAGE_TOKENS, positions),
        roofs=None,
        limit=split.limit,
        held_in=held_in(split),
        slots=fullest.slots(pages),
        slot_bytes=fullest.slot_bytes,
    )


def _rated(fit: Fit, split: ModelSplit, roofs: "Roofs | SheetRoofs | None") -> Fit:
    """The fit with the rates of its Programs at these roofs; without a rate of products there is none of prefill."""
    from roofline.program.passes.price import arithmetic_roof
    from roofline.program.rates import ProgramSpeeds, in_turn

    if roofs is None:
        return fit
    arithmetic, operations = arithmetic_roof(split.parts[0].program, roofs)
    fit = replace(fit, roofs=roofs, arithmetic=arithmetic, operations=operations)
    if not fit.sequences:
        return fit
    stages = [ProgramSpeeds(part.program, roofs) for part in split.parts]
    batches = sorted({*(n for n in BATCHES if n <= fit.sequences), min(fit.sequences, MOST_SEQUENCES)})
    rates = [in_turn([speeds.decode(n, fit.context) for speeds in stages]) for n in batches]
    if math.isfinite(roofs.bf16_flops):
        rates.append(in_turn([speeds.prefill(fit.context) for speeds in stages]))
    return replace(fit, rates=tuple(rates))


def held_in(split: ModelSplit) -> dict[str, str]:
    """Formats of matrices that kernels read in another one -> that other one."""
    recipes = [recipe for part in split.parts for recipe in part.program.weights.values() if len(recipe.shape) == 2]
    names = {(formats.packed(piece.format).name, recipe.layout) for recipe in recipes for piece in recipe.pieces}
    return {name: STAND_INS[layout][name] for name, layout in sorted(names) if name in STAND_INS.get(layout, {})}
