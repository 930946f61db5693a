"""The simulated backend: no weights are read; steps take what they would at the roofs of a product or of this machine.

`device` names a product of the table of chips; "auto" is this machine's CPU at its measured roofs.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from roofline.backends.backend import LoadRequest, Neighbours, Notes
from roofline.backends.capacity import HOST_STEP, Capacity, batch_limits, host_capacity, max_context
from roofline.backends.options import LoadOptions
from roofline.backends.simulated.calibration import Calibration
from roofline.common.errors import CapacityError, ConfigError, UnsupportedError
from roofline.common.json_types import JsonMapping
from roofline.ops.batch import PAGE_TOKENS

if TYPE_CHECKING:
    from roofline.backends.fit import ModelSplit
    from roofline.backends.simulated.executable import SimulatedExecutable
    from roofline.hardware.chips.products import SheetRoofs
    from roofline.hardware.roofs import Roofs
    from roofline.program.passes.price import RoofRates

THIS_MACHINE = "auto"
MAX_CACHE_TOKENS = 1 << 20  # of a simulated device whose cache nobody sizes: lists of pages are Python's


class SimulatedBackend:
    """See `backends.backend`."""

    copies_weights = True

    def holds_compressed_rows(self, options: LoadOptions, config: JsonMapping) -> bool:
        """As the backend that would compute on the device."""
        from roofline.backends.compressed_rows import holds_compressed_rows

        return holds_compressed_rows(LoadOptions(backend=_simulated(options.device)), config)

    def resolve(self, options: LoadOptions, neighbours: Neighbours) -> LoadOptions:
        from roofline.hardware.chips.products import titled

        if options.max_adapters:
            raise UnsupportedError("adapters of a simulated model", "they have no price", ("max_adapters=0",))
        if options.device == THIS_MACHINE:
            return options
        return replace(options, device=titled(options.device).name)

    def capacity(self, options: LoadOptions, config: JsonMapping, replicas: int) -> Capacity:
        if options.device == THIS_MACHINE:
            from roofline.backends.capacity import host_kv_dtype

            return host_capacity(options, config, host_kv_dtype(options.kv_cache_dtype), replicas)
        longest = max_context(options, config["max_position"])
        return Capacity(batch_limits(options, longest, step_of(options.device)), longest, num_pages=0)

    def make(self, request: LoadRequest) -> "tuple[SimulatedExecutable, Notes]":
        from roofline.backends.fit import split_on_host, split_on_product
        from roofline.hardware.chips.products import titled

        options, checkpoint, kv_dtype = request.options, request.checkpoint, request.options.kv_cache_dtype
        if options.device == THIS_MACHINE:
            split, capacity = split_on_host(checkpoint, request.config, kv_dtype), request.capacity
        else:
            limits = request.capacity.limits
            step = limits.tokens, limits.segments
            split = split_on_product(checkpoint, request.config, titled(options.device), 1, kv_dtype, step)
            capacity = _with_pages(split, request)
        roofs = roofs_of(options.device)
        executable = simulate(split, capacity, roofs, Calibration(), None, f"{request.config} {options.device}")
        return executable, {"backend": f"simulated: {options.device} at its roofs, nothing is computed"}


BACKEND = SimulatedBackend()


def _simulated(device: str) -> str:
    """The name of the backend that computes on a device."""
    from roofline.hardware.chips.products import titled

    return "cpu" if device == THIS_MACHINE or titled(device).host else "gpu"


def step_of(device: str) -> tuple[int, int]:
    """Tokens and sequences of the largest step, where no option says them."""
    from roofline.backends.gpu.backend import STEP

    return HOST_STEP if _simulated(device) == "cpu" else STEP


def roofs_of(device: str) -> "Roofs | SheetRoofs":
    """The roofs of a product's data sheet, or those that were measured of this machine.

    Raises ConfigError where there are none, or none of arithmetic, without which no prompt has a time.
    """
    from roofline.backends.cpu.roofs import stored_roofs
    from roofline.hardware.chips.products import sheet_roofs, titled

    if device == THIS_MACHINE:
        roofs = stored_roofs()
        if roofs is None:
            raise ConfigError("the roofs of this machine were never measured: run `roofline doctor`, or name a chip")
        return roofs
    sheet = sheet_roofs(titled(device))
    if sheet is None:
        raise ConfigError(f"the table of products has no bandwidth of {device}: name another chip")
    if sheet.bf16_flops == float("inf"):
        reason = "so a prompt has no time there"
        raise ConfigError(f"the table of products has no rate of arithmetic of {device}, {reason}: name another chip")
    return sheet


def _with_pages(split: "ModelSplit", request: LoadRequest) -> Capacity:
    """The capacity with as many pages as the options say, or as fit the device. Raises CapacityError for want of
    memory."""
    from roofline.backends.fit import memory_of
    from roofline.hardware.chips.products import titled

    capacity, options = request.capacity, request.options
    memory = memory_of(titled(options.device))
    fullest = split.fullest(memory)
    fitting = fullest.pages(memory)
    pages = fitting if options.cache_tokens is None else -(-options.cache_tokens // PAGE_TOKENS)
    if not 0 < pages <= fitting:
        needed = fullest.needs.total(max(pages, 1) * PAGE_TOKENS)
        remedy = "Name a larger device, or plan with several (`roofline plan`)."
        raise CapacityError(f"the model on {options.device}", needed, memory, "bytes", remedy)
    if options.cache_tokens is None:
        pages = min(pages, MAX_CACHE_TOKENS // PAGE_TOKENS)
    return replace(capacity, num_pages=pages, max_context=min(capacity.max_context, pages * PAGE_TOKENS))


def simulate(
    split: "ModelSplit",
    capacity: Capacity,
    roofs: "RoofRates",
    calibration: Calibration,
    link_bytes_per_s: float | None,
    name: str,
) -> "SimulatedExecutable":
    """An executable of a divided model at these roofs. name: of model and devices."""
    from roofline.backends.simulated.executable import SimulatedExecutable
    from roofline.backends.simulated.step_times import SimulatedStepTimes

    programs = [part.program for part in split.parts]
    times = SimulatedStepTimes(programs, roofs, calibration, link_bytes_per_s)
    page_bytes = max(part.needs.token for part in split.parts) * PAGE_TOKENS
    last = programs[-1]
    return SimulatedExecutable(times, capacity, page_bytes, last.types()[last.logits].width, name)
