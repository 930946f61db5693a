"""Launches of attention over compressed rows, which the cache holds instead of keys and values."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from roofline.backends.gpu.runtime.step import GpuStep, dtypes
from roofline.common.errors import UnsupportedError
from roofline.ops.position_factors import PositionFactors
from roofline.program.ir import Instr, Program, kv_group_of

if TYPE_CHECKING:
    from roofline.backends.gpu.runtime.lower import Lowering

Launch = Callable[[GpuStep], None]


def check_rows(program: Program) -> None:
    """Raises UnsupportedError for rows or a form of attention over them that the kernel does not have."""
    from roofline.backends.gpu.partials import check_row

    for instr in program.body:
        if instr.op != "attend" or not instr.attr("value_dim"):
            continue
        group = program.kv_groups[kv_group_of(instr.inputs[1])]
        check_row(group.head_dim - group.value_dim, group.value_dim)
        bent = [name for name in ("window", "soft_cap", "alibi") if instr.attr(name)] + ["sinks"] * bool(instr.weights)
        if bent or group.kv_heads != 1:
            what = f"attention over compressed rows with {bent[0] if bent else 'several kv heads'} on a GPU"
            raise UnsupportedError(what, "it has no kernel", ("backend=cpu", "backend=reference"))


def head_linear(low: "Lowering", instr: Instr) -> Launch:
    """A product of each head with a matrix of its own; one of quantised weights is widened first."""
    from roofline.backends.gpu.kernels.dequantize import dequantize
    from roofline.backends.gpu.kernels.head_linear import head_linear as kernel

    (x,), out, heads = instr.inputs, instr.output.name, instr.attr("heads")

    def launch(step: GpuStep) -> None:
        (part,) = low.weights.matrices[instr.weights[0]]
        rows, weight = step.value(x), part.weight
        if part.quantised:
            weight = step.space(rows.dtype, part.rows, part.weight.columns)
            dequantize(low.chip, part.weight, out=weight)
        kernel(low.chip, rows, weight, heads, out=step.value(out), exact=low.exact)

    return launch


def rope_latent_write(low: "Lowering", instr: Instr) -> Launch:
    """Queries and rows turned, these into the cache."""
    from roofline.backends.gpu.kernels.rope_kv_write import rope_kv_write

    cache, layer, table = instr.outputs[-1].name, instr.attr("layer"), instr.attr("table")
    turns, interleaved = low.tables[table], low.program.tables[table].style == "interleaved"
    by_position = PositionFactors.of(instr.attrs)
    factors = None if by_position is None else low.factors[by_position]

    def launch(step: GpuStep) -> None:
        rows = step.caches[kv_group_of(cache)][0][layer]
        rope_kv_write(
            low.chip, step.value(instr.inputs[0]), step.fields["positions"], step.slots, turns, None, 0.0,
            interleaved=interleaved, q=step.value(instr.output.name), k=rows, v=None, factors=factors,
        )  # fmt: skip

    return launch


def attend(low: "Lowering", instr: Instr) -> Launch:
    """Attention whose keys are the rows, and whose values their last columns."""
    import torch

    from roofline.backends.gpu.kernels.attend_launches import prepare_all, workspace_floats
    from roofline.backends.gpu.kernels.attend_rows import attend_rows

    cache, layer = instr.inputs[1], instr.attr("layer")
    group = low.program.kv_groups[kv_group_of(cache)]
    shape = {
        "heads": instr.attr("heads"),
        "kv_heads": 1,
        "head_dim": group.value_dim,
        "turned": group.head_dim - group.value_dim,
        "cache_bytes": dtypes()[group.format].itemsize,
    }

    def launch(step: GpuStep) -> None:
        key = tuple(shape.items())
        if key not in step.launches:  # the same for all layers
            step.launches[key] = prepare_all(low.chip, **step.sizes.of_attention(), **shape, exact=low.exact)
        fields = (step.fields[name] for name in ("seg_start", "context_len", "page_start", "pages"))
        operands = step.value(instr.inputs[0]), step.caches[kv_group_of(cache)][0][layer], *fields
        for how in step.launches[key]:
            floats = workspace_floats(how)
            space = step.space(torch.float32, floats) if floats else None
            attend_rows(how, *operands, scale=instr.attr("scale"), workspace=space, out=step.value(instr.output.name))

    return launch
