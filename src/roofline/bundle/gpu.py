"""A checkpoint on a GPU: the Program for it, what fits, and the notes of what was chosen."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.units import human_bytes, human_rate, human_seconds
from roofline.ops.batch import PAGE_TOKENS, BatchLimits
from roofline.program.ir import WHOLE, Share

if TYPE_CHECKING:
    from roofline.backends.gpu.devices import Found
    from roofline.backends.gpu.memory.capacity import Budget, OffloadOption, Placement
    from roofline.backends.gpu.memory.requirements import Needs
    from roofline.backends.gpu.runtime.executable import GpuExecutable
    from roofline.backends.parallel.ranks import Ranks
    from roofline.hardware.chips.chips import Chip
    from roofline.hardware.chips.products import Product
    from roofline.models.config import ModelConfig
    from roofline.program.ir import Program
    from roofline.weights.checkpoint import Checkpoint

RESERVED = 0.05  # of a device's free memory, for what the library and the driver take while they run
HOST_SHARE = 0.5  # of the host's free memory, that layers may be pinned in
FLOAT8 = "E4M3"  # of ops.formats
MOST_TOKENS = 1 << 20  # of a cache whose size nobody asked for


def compile_for_gpu(
    checkpoint: "Checkpoint",
    config: "ModelConfig",
    kv_dtype: str,
    exact: bool,
    share: Share = WHOLE,
    chip: "Chip | None" = None,
    activations: str = "auto",
) -> "Program":
    """The Program in the arithmetic of GPUs: 16-bit rows, in the format of the file where that is F16.

    chip: that it is for, where the cache or activations are to be fp8. Raises ConfigError for a cache of another
    format, UnsupportedError for fp8 on a chip without it, and for activations of fp8 where no weights are.
    """
    from roofline.models import registry
    from roofline.program import target
    from roofline.program.compile import compile_program

    matrices = {info.format for info in checkpoint.tensors.values() if len(info.shape) == 2}
    rows = "f16" if matrices == {"F16"} else "bf16"
    cache = rows8 = ""
    if kv_dtype == "fp8":
        cache = _flavour(chip, "an fp8 KV cache", f"kv_cache_dtype={rows}")
    elif kv_dtype not in ("auto", rows):
        raise ConfigError(
            f"the cache of this model on a GPU is {rows} or fp8, not {kv_dtype}: leave kv_cache_dtype out"
        )
    if activations == "fp8":
        rows8 = _flavour(chip, "activations of fp8", "activations=auto")
        if FLOAT8 not in matrices:
            reason = f"its weights are {', '.join(sorted(matrices))}, and products are of two alike"
            raise UnsupportedError("activations of fp8 for this model", reason, ("activations=auto",))
    wanted = target.gpu(rows, exact, cache, rows8)
    return compile_program(registry.get(config.family), config, checkpoint.tensors, wanted, share=share)


def _flavour(chip: "Chip | None", what: str, instead: str) -> str:
    """The chip's flavour of 8-bit floats. Raises UnsupportedError where it has none."""
    assert chip is not None, f"{what} need a chip, whose flavour it is"
    if not chip.fp8:
        raise UnsupportedError(f"{what} on {chip.name}", "its instructions do not convert 8-bit floats", (instead,))
    return chip.fp8


def load_gpu(
    checkpoint: "Checkpoint",
    config: "ModelConfig",
    limits: BatchLimits,
    *,
    identify: Callable[[], str],
    longest: int,
    fixed_length: bool,
    cache_tokens: int | None,
    kv_dtype: str = "auto",
    device: str = "auto",
    exact: bool = False,
    graphs: bool = True,
    tuned: bool = True,
    ranks: "Ranks | None" = None,
    offload: "OffloadOption" = 0,
    draft: str | None = None,
    traces: BatchLimits | None = None,
    activations: str = "auto",
) -> "tuple[GpuExecutable, Mapping[str, str]]":
    """The executable, its cache as large as the device allows unless cache_tokens says.

    identify: finds the identity of the weights, beside the copying of them. longest: positions served, where
    fixed_length; else at most so many, cut to the cache. tuned: with the kernels that `roofline tune gemms` chose for
    this device, where results need not be exact. ranks: who shares the model; this one's part is made, on the device of
    its rank, and all have as many pages. offload: layers that stay on the host, "auto": as few as it takes. draft,
    traces: what room is left for, see `load`. activations: "fp8": rounded to that before they are multiplied with
    weights of 8-bit floats.

    Raises UnsupportedError, CapacityError, ConfigError: with cause and remedy.
    """
    from concurrent.futures import ThreadPoolExecutor

    from roofline.backends.gpu.ahead import kernel_cache
    from roofline.backends.gpu.devices import find
    from roofline.backends.gpu.measure.roofs import ensure_op_roofs
    from roofline.backends.gpu.memory.capacity import place
    from roofline.backends.gpu.memory.requirements import cheaper, needs_of
    from roofline.backends.gpu.runtime.device_errors import what_is_lacking
    from roofline.backends.gpu.runtime.executable import GpuExecutable, Runtime
    from roofline.backends.gpu.runtime.libraries import follow_store, sum_in_float32
    from roofline.backends.gpu.tuning.exact_cost import exact_over_fast
    from roofline.backends.gpu.tuning.linear import stored_choices

    share = ranks.share if ranks is not None else WHOLE
    found = find(device, *((ranks.rank, ranks.grid.size) if ranks is not None else (0, 1)))
    kernel_cache.use()  # after find, which says what is missing where triton is not installed
    program = compile_for_gpu(checkpoint, config, kv_dtype, exact, share, found.chip, activations)
    sum_in_float32()
    scratch = _scratch(program, limits)
    beside = _beside(program, draft, traces, limits, kv_dtype, exact, found.chip)
    needs = needs_of(program, limits, extra=scratch).beside(beside)
    others = cheaper(program, limits, scratch, caches={"fp8": found.chip.fp8} if found.chip.fp8 else {})
    placed = place(
        needs,
        _budget(found, offload),
        least_tokens=longest if fixed_length else PAGE_TOKENS,
        tokens=cache_tokens,
        offload=offload,
        alternatives={what: other.beside(beside) for what, other in others.items()},
    )
    pages = placed.pages
    pages = min(pages, MOST_TOKENS // PAGE_TOKENS) if cache_tokens is None else pages
    pages = ranks.least(pages) if ranks is not None else pages
    longest = min(longest, pages * PAGE_TOKENS)
    choices, why = stored_choices(found.chip, found.number, program.rows_dtype()) if tuned else ({}, "not asked for")
    followed = follow_store(found.chip) if tuned and not exact else ""
    roofs = ensure_op_roofs(found.torch_name, found.device.name)
    runtime = Runtime(found.chip, found.torch_name, exact, graphs, choices, roofs, placed.hosted, followed)
    with what_is_lacking(found, placed.used), ThreadPoolExecutor(1) as meanwhile:
        executable = GpuExecutable(
            program,
            checkpoint.read,
            runtime,
            limits=limits,
            num_pages=pages,
            max_context=longest,
            weights_hash=meanwhile.submit(identify),
            group=ranks,
        )
    (group,) = program.kv_groups.values()
    size = human_bytes(executable.page_bytes * pages)
    notes = {
        "device": f"{found.device.title}, kernels for {found.chip.name}",
        "weights": f"{human_bytes(executable.weight_bytes - executable.weights.hosted_bytes)} on the device",
        "variants": _variants(len(choices), followed) or f"default ({why})",
        "cache": f"{pages * PAGE_TOKENS} tokens in {group.format}, {size}",
    }
    if products := _float8_products(program, found.chip):
        notes["products"] = products
    if placed.hosted:
        notes["offload"] = _offloaded(placed, len(needs.layers), executable.weights.hosted_bytes)
    if (product := found.device.product) is not None:
        notes["datasheet"] = _promised(product)
    if exact and not share.stage:  # the products are those of the first layer
        ratios = ", ".join(f"{rows} rows {exact_over_fast(executable, rows):.2f}" for rows in (1, limits.tokens))
        notes["exact"] = f"time of a layer's products over the fast ones: {ratios}"
    return executable, notes


def _beside(
    program: "Program",
    draft: str | None,
    traces: BatchLimits | None,
    limits: BatchLimits,
    kv_dtype: str,
    exact: bool,
    chip: "Chip",
) -> "Needs":
    """What will lie beside a model on its device: a draft model, and two other traces of the model itself."""
    from roofline.backends.gpu.memory.requirements import Needs, needs_of
    from roofline.bundle.loader import open_source
    from roofline.models.config import ModelConfig

    found = Needs((), 0, 0, 0, 1)
    if draft is not None:
        _, _, checkpoint = open_source(draft, "gpu", None, None)
        assert checkpoint is not None, "a GPU runs no bundles"
        config = ModelConfig.of(checkpoint.config)
        other = compile_for_gpu(checkpoint, config, kv_dtype, exact, chip=chip)
        found = found.beside(needs_of(other, limits, extra=_scratch(other, limits)))
    if traces is not None:
        one = needs_of(program, traces, extra=_scratch(program, traces))
        found = replace(found, others=found.others + 2 * (one.workspace + traces.pages * PAGE_TOKENS * one.token))
    return found


def _float8_products(program: "Program", chip: "Chip") -> str:
    """How weights of 8-bit floats are multiplied; "" where there are none."""
    held = [recipe for recipe in program.weights.values() if FLOAT8 in recipe.type.formats]
    if not held:
        return ""
    if any(instr.attrs.get("x_dtype") for instr in program.body):
        return f"activations rounded to {chip.fp8}, a scale for each row, as asked; weights of 8-bit floats"
    return f"weights of 8-bit floats widened to {program.rows_dtype()}, which activations keep"


def _budget(found: "Found", offload: "OffloadOption") -> "Budget":
    """What may be used; how fast layers are copied is measured where some are to stay on the host."""
    from roofline.backends.gpu.memory.capacity import Budget
    from roofline.backends.gpu.memory.offload import link_rate
    from roofline.hardware.detect import detect

    link = link_rate(found.torch_name) if offload else 0.0
    free = int(found.free * (1 - RESERVED))
    budget = Budget.of(found.device, free=free, link=link)
    host = int((detect().memory_available or 0) * HOST_SHARE) - budget.shared
    return replace(budget, host=max(0, host))


def _offloaded(placed: "Placement", layers: int, size: int) -> str:
    least = "" if placed.seconds is None else f", a step takes at least {human_seconds(placed.seconds)}"
    return f"{len(placed.hosted)} of {layers} layers ({human_bytes(size)}) on the host, no graphs{least}"


def _promised(product: "Product") -> str:
    """What the data sheet says of one device, with its source."""
    figures = (("bf16", product.bf16, "op"), ("memory", product.bandwidth, "B"))
    said = [f"{name} {human_rate(f.value / product.dies, unit)} ({f.source})" for name, f, unit in figures if f]
    return ", ".join(said) or "nothing known"


def _variants(choices: int, followed: str) -> str:
    return "; ".join(filter(None, (f"{choices} tuned products" if choices else "", followed)))


def _scratch(program: "Program", limits: BatchLimits) -> int:
    """Bytes of the workspace that the plan does not know of: what one launch may want, be it a widened matrix and the
    rows it makes or attention's partial results; and what a stage goes on from."""
    from roofline.backends.gpu.kernels.attend_launches import workspace_limit

    sizes = [recipe.shape for recipe in program.weights.values() if len(recipe.shape) == 2]
    widened = max(2 * rows * columns + 2 * limits.tokens * rows for rows, columns in sizes)
    partial = max(4 * workspace_limit(group.head_dim) for group in program.kv_groups.values())
    return max(widened, partial) + sum(value.type.row_bytes * limits.tokens for value in program.carried)
