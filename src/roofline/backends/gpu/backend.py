"""The gpu backend: which Program a GPU runs, what of it fits the device, and what was chosen on the way."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.backends.backend import CompiledAhead, LoadRequest, Neighbours, Notes
from roofline.backends.capacity import Capacity, batch_limits, chosen_slots, device_slots, max_context, stores_of
from roofline.backends.gpu.program import FLOAT8, compile_for_gpu
from roofline.backends.options import LoadOptions
from roofline.common.json_types import JsonMapping
from roofline.common.units import human_bytes, human_rate, human_seconds
from roofline.ops.batch import PAGE_TOKENS, BatchLimits

if TYPE_CHECKING:
    from roofline.backends.checkpoint import LoadableCheckpoint
    from roofline.backends.gpu.devices import UsableDevice
    from roofline.backends.gpu.memory.capacity import Budget, OffloadOption, Placement
    from roofline.backends.gpu.memory.requirements import Needs
    from roofline.backends.gpu.runtime.executable import GpuExecutable
    from roofline.backends.gpu.runtime.matmul import Choices
    from roofline.backends.parallel.ranks import Ranks
    from roofline.hardware.chips.chips import Chip
    from roofline.hardware.chips.products import Product
    from roofline.program.ir import Program, Share

STEP = (2048, 256)  # tokens and sequences of the largest step: a GPU multiplies hundreds of rows in the time of one
RESERVED = 0.05  # of a device's free memory, for what the library and the driver take while they run
HOST_SHARE = 0.5  # of the host's free memory, that layers may be pinned in
MAX_CACHE_TOKENS = 1 << 20  # of a cache whose size nobody asked for


class GpuBackend:
    """See `backends.backend`."""

    copies_weights = True

    def holds_compressed_rows(self, options: LoadOptions, config: JsonMapping) -> bool:
        """Where the kernel has rows that wide. Adapters change the matrix that makes keys and values of the rows."""
        from roofline.backends.gpu.partials import takes_rows

        return not options.max_adapters and takes_rows(int(config["rotary_dim"]), int(config["kv_rank"]))

    def resolve(self, options: LoadOptions, neighbours: Neighbours) -> LoadOptions:
        if neighbours.replicas == 1:
            return options
        from roofline.backends.gpu.devices import group

        names = group(options.device, neighbours.replica, neighbours.replicas, options.ranks)
        return replace(options, device=names)

    def capacity(self, options: LoadOptions, config: JsonMapping, replicas: int) -> Capacity:
        longest = max_context(options, config["max_position"])
        running = options.max_running or STEP[1]
        slots = chosen_slots(options, running, device_slots(running)) if stores_of(config)[1] else 0
        return Capacity(batch_limits(options, longest, STEP, slots), longest, num_pages=0)

    def make(self, request: LoadRequest) -> "tuple[GpuExecutable, Notes]":
        return _make(request, None)

    def check_share(self, request: LoadRequest, share: "Share") -> None:
        from roofline.backends.gpu.devices import find

        options, chip = request.options, None
        if "fp8" in (options.kv_cache_dtype, options.activations):
            chip = find(options.device, 0, options.ranks).chip
        compile_for_gpu(request.checkpoint, request.config, options, chip, share)

    def rank_device(self, options: LoadOptions, rank: int) -> str:
        from roofline.backends.gpu.devices import find

        return find(options.device, rank, options.ranks).torch_name

    def make_share(self, request: LoadRequest, ranks: "Ranks") -> "tuple[GpuExecutable, Notes]":
        return _make(request, ranks)

    def compile_ahead(
        self,
        open_checkpoint: "Callable[[], LoadableCheckpoint]",
        options: LoadOptions,
        chips: Sequence[str],
        folder: Path | None = None,
    ) -> Iterator[CompiledAhead]:
        from roofline.backends.gpu.ahead.model_steps import compile_model_steps

        limits = batch_limits(options, PAGE_TOKENS, STEP)
        return compile_model_steps(open_checkpoint, options, (limits.tokens, limits.segments), chips, folder)


BACKEND = GpuBackend()


def _make(request: LoadRequest, ranks: "Ranks | None") -> "tuple[GpuExecutable, Notes]":
    """The executable on one device: of the whole model, or of one rank's share on that rank's device, where all ranks
    have as many pages. The cache is as large as the device allows unless cache_tokens says."""
    from concurrent.futures import ThreadPoolExecutor

    from roofline.backends.checkpoint import weights_hash
    from roofline.backends.gpu.ahead import kernel_cache
    from roofline.backends.gpu.devices import find
    from roofline.backends.gpu.measure.roofs import ensure_op_roofs
    from roofline.backends.gpu.runtime.device_errors import what_is_lacking
    from roofline.backends.gpu.runtime.executable import GpuExecutable, Runtime
    from roofline.backends.gpu.runtime.libraries import follow_store, sum_in_float32
    from roofline.backends.gpu.runtime.lower import check
    from roofline.backends.gpu.tuning.linear import stored_choices

    checkpoint, options = request.checkpoint, request.options
    device = find(options.device, *((ranks.rank, ranks.grid.size) if ranks is not None else (0, 1)))
    kernel_cache.use()  # after find, which says what is missing where triton is not installed
    share = ranks.share if ranks is not None else None
    program = compile_for_gpu(checkpoint, request.config, options, device.chip, share)
    check(program)  # before memory is asked for
    sum_in_float32()
    placed = _place(request, program, device)
    pages = placed.pages if options.cache_tokens is not None else min(placed.pages, MAX_CACHE_TOKENS // PAGE_TOKENS)
    pages = ranks.least(pages) if ranks is not None else pages
    choices: Choices = {}
    why_default = "not asked for"
    if options.tuned:
        choices, why_default = stored_choices(device.chip, device.number, program.rows_dtype())
    followed = follow_store(device.chip) if options.tuned and not options.exact else ""
    roofs = ensure_op_roofs(device.torch_name, device.device.name)
    runtime = Runtime(
        chip=device.chip,
        device=device.torch_name,
        exact=options.exact,
        graphs=options.graphs,
        choices=choices,
        roofs=roofs,
        hosted=placed.hosted,
        libraries=followed,
        adapter_slots=options.max_adapters or 0,
    )
    with what_is_lacking(device, placed.used), ThreadPoolExecutor(1) as pool:
        first = ranks is None or ranks.rank == 0  # whose fingerprint is the model's
        executable = GpuExecutable(
            program,
            checkpoint.read,
            runtime,
            limits=request.capacity.limits,
            num_pages=pages,
            max_context=min(request.capacity.max_context, pages * PAGE_TOKENS),
            weights_hash=pool.submit(weights_hash, checkpoint) if first else "",
            group=ranks,
        )
    tuned = "; ".join(filter(None, (f"{len(choices)} tuned products" if choices else "", followed)))
    return executable, _notes(request, executable, device, placed, tuned or f"default ({why_default})")


def _place(request: LoadRequest, program: "Program", device: "UsableDevice") -> "Placement":
    """Where the model's bytes go. Raises CapacityError naming what would fit."""
    from roofline.backends.gpu.memory.capacity import place
    from roofline.backends.gpu.memory.requirements import cheaper, needs_of
    from roofline.backends.gpu.runtime.adapters import adapter_bytes

    options, limits, chip = request.options, request.capacity.limits, device.chip
    scratch, other = scratch_bytes(program, limits), _neighbours_needs(request, program, chip)
    if options.max_adapters:
        scratch += adapter_bytes(program, options.max_adapters, options.max_adapter_rank)
    scratch += limits.state_slots * sum(group.slot_bytes for group in program.state_groups.values())
    alternatives = cheaper(program, limits, scratch, caches={"fp8": chip.fp8} if chip.fp8 else {})
    return place(
        needs_of(program, limits, extra=scratch).sharing_device_with(other),
        _budget(device, options.offload),
        least_tokens=request.capacity.max_context if options.max_model_len is not None else PAGE_TOKENS,
        tokens=options.cache_tokens,
        offload=options.offload,
        alternatives={what: needs.sharing_device_with(other) for what, needs in alternatives.items()},
    )


def _neighbours_needs(request: LoadRequest, program: "Program", chip: "Chip") -> "Needs":
    """What will lie beside a model on its device: a draft model, and two other traces of the model itself."""
    from roofline.backends.gpu.memory.requirements import Needs, needs_of
    from roofline.models.registry import config_of

    needs, limits = Needs((), 0, 0, 0, 1), request.capacity.limits
    draft, traces = request.neighbours.draft, request.neighbours.traces
    if draft is not None:
        config = config_of(draft.config)
        drafting = compile_for_gpu(draft, config, replace(request.options, activations="auto", max_adapters=None), chip)
        needs = needs.sharing_device_with(needs_of(drafting, limits, extra=scratch_bytes(drafting, limits)))
    if traces is not None:
        one = needs_of(program, traces, extra=scratch_bytes(program, traces))
        needs = replace(needs, others=needs.others + 2 * (one.workspace + traces.pages * PAGE_TOKENS * one.token))
    return needs


def _budget(device: "UsableDevice", offload: "OffloadOption") -> "Budget":
    """Return the memory that may be used; how fast layers are copied is measured where some are to stay on the host."""
    from roofline.backends.gpu.measure.roofs import link_rate
    from roofline.backends.gpu.memory.capacity import Budget
    from roofline.hardware.detect import detect

    link = link_rate(device.torch_name) if offload else 0.0
    budget = Budget.of(device.device, free=int(device.free * (1 - RESERVED)), link=link)
    host = int((detect().memory_available or 0) * HOST_SHARE) - budget.shared
    return replace(budget, host=max(0, host))


def scratch_bytes(program: "Program", limits: BatchLimits) -> int:
    """Bytes of the workspace that the plan does not know of: what one launch may want, be it a widened matrix and the
    rows it makes or attention's partial results; and what a stage goes on from."""
    from roofline.backends.gpu.partials import workspace_limit

    sizes = [recipe.shape for recipe in program.weights.values() if len(recipe.shape) == 2]
    widened = max(2 * rows * columns + 2 * limits.tokens * rows for rows, columns in sizes)
    partial = max(4 * workspace_limit(group.value_dim or group.head_dim) for group in program.kv_groups.values())
    return max(widened, partial) + sum(value.type.row_bytes * limits.tokens for value in program.carried)


def _notes(
    request: LoadRequest, executable: "GpuExecutable", device: "UsableDevice", placed: "Placement", variants: str
) -> dict[str, str]:
    """What was chosen. variants: which kernels multiply."""
    from roofline.backends.gpu.tuning.exact_cost import exact_over_fast

    program = executable.program
    kv_format = next(iter(program.kv_groups.values())).format  # of all groups
    pages, hosted_bytes = executable.num_pages, executable.weights.hosted_bytes
    notes = {
        "device": f"{device.device.title}, kernels for {device.chip.name}",
        "weights": f"{human_bytes(executable.weight_bytes - hosted_bytes)} on the device",
        "variants": variants,
        **_state_note(program, request.capacity.limits.state_slots),
        "cache": f"{pages * PAGE_TOKENS} tokens in {kv_format}, {human_bytes(executable.page_bytes * pages)}",
    }
    if products := float8_products(program, device.chip):
        notes["products"] = products
    if placed.hosted:
        least = "" if placed.seconds is None else f", a step takes at least {human_seconds(placed.seconds)}"
        layers = f"{len(placed.hosted)} of {request.config.layers} layers"
        notes["offload"] = f"{layers} ({human_bytes(hosted_bytes)}) on the host, no graphs{least}"
    if (product := device.device.product) is not None:
        notes["datasheet"] = _datasheet(product)
    if request.options.exact and not program.share.stage:  # the products are those of the first layer
        rows = (1, request.capacity.limits.tokens)
        ratios = ", ".join(f"{count} rows {exact_over_fast(executable, count):.2f}" for count in rows)
        notes["exact"] = f"time of a layer's products over the fast ones: {ratios}"
    return notes


def _state_note(program: "Program", slots: int) -> dict[str, str]:
    size = sum(group.slot_bytes for group in program.state_groups.values())
    return {"state": f"{slots} slots of {human_bytes(size)}, {human_bytes(slots * size)}"} if size else {}


def float8_products(program: "Program", chip: "Chip") -> str:
    """How weights of 8-bit floats are multiplied; "" where there are none."""
    if not any(FLOAT8 in recipe.type.formats for recipe in program.weights.values()):
        return ""
    if any(instr.attrs.get("x_dtype") for instr in program.body):
        return f"activations rounded to {chip.fp8}, a scale for each row, as asked; weights of 8-bit floats"
    return f"weights of 8-bit floats widened to {program.rows_dtype()}, which activations keep"


def _datasheet(product: "Product") -> str:
    """Return what the data sheet says of one device, with its source."""
    figures = (("bf16", product.bf16, "op"), ("memory", product.bandwidth, "B"))
    texts = [f"{name} {human_rate(f.value / product.dies, unit)} ({f.source})" for name, f, unit in figures if f]
    return ", ".join(texts) or "nothing known"
