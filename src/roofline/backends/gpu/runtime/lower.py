"""Instructions -> launches: one function an op, which looks up what it can once and returns what runs in each step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roofline.backends.gpu.memory.requirements import layer_of
from roofline.backends.gpu.memory.weights import DeviceWeights
from roofline.backends.gpu.runtime import lower_experts, lower_latent, lower_rows, lower_state
from roofline.backends.gpu.runtime.adapters import DeviceAdapters
from roofline.backends.gpu.runtime.matmul import Products
from roofline.backends.gpu.runtime.step import GpuStep, dtypes
from roofline.common.errors import UnsupportedError
from roofline.hardware.chips.chips import Chip
from roofline.ops.collectives import RankGroup, exchange, require_ranks
from roofline.ops.position_factors import PositionFactors
from roofline.ops.traits import Trait
from roofline.program.ir import Instr, Program, kv_group_of

if TYPE_CHECKING:
    from torch import Tensor

Launch = Callable[[GpuStep], None]


@dataclass(frozen=True)
class Lowering:
    """What lowering knows. tables: name of a rope table -> cos and sin, float32 [positions, dim / 2]; factors: by
    position, float32 [positions]; group: who shares
    the matrices of a Program that is one rank's; adapters: of a Program with places for them."""

    program: Program
    chip: Chip
    weights: DeviceWeights
    products: Products
    tables: "dict[str, tuple[Tensor, Tensor]]"
    factors: "dict[PositionFactors, Tensor]"
    device: str
    exact: bool
    group: RankGroup | None = None
    adapters: DeviceAdapters | None = None

    def launches(self) -> list[tuple[Instr, Launch]]:
        """Instructions that do something, each with its launch. Raises UnsupportedError as `check` does."""
        check(self.program)
        launches = []
        for instr in self.program.body:
            if not instr.has(Trait.VIEW):
                launches.append((instr, _LOWER[instr.op](self, instr)))
        return launches


def by_layer(launches: Iterable[tuple[Instr, Launch]]) -> list[tuple[int | None, list[tuple[Instr, Launch]]]]:
    """Launches cut where the layer changes whose weights they read; those that read none go with the ones before."""
    cut: list[tuple[int | None, list[tuple[Instr, Launch]]]] = [(None, [])]
    for instr, launch in launches:
        layers = {layer_of(name) for name in instr.weights} or {cut[-1][0]}
        assert len(layers) == 1, "an instruction reads weights of one layer"
        (layer,) = layers
        if layer != cut[-1][0]:
            cut.append((layer, []))
        cut[-1][1].append((instr, launch))
    return cut


def _embed(low: Lowering, instr: Instr) -> Launch:
    from roofline.backends.gpu.kernels.dequantize import dequantize
    from roofline.backends.gpu.kernels.embed import embed

    (part,) = low.weights.matrices[instr.weights[0]]
    table, name, first = part.weight, instr.inputs[0], instr.attr("first")

    def look_up(ids: "Tensor", out: "Tensor") -> None:
        ids = ids.new_zeros(ids.shape) if instr.attr("one_row") else ids
        if part.quantised:
            dequantize(low.chip, table, out=out, ids=ids)
        else:
            embed(low.chip, ids, table, out=out)

    def launch(step: GpuStep) -> None:
        ids, out = step.value(name), step.value(instr.output.name)
        if first is None:
            look_up(ids, out)
            return
        inside = (ids >= first) & (ids < first + part.rows)  # ids of other ranks' rows give zeros
        look_up((ids - first).where(inside, 0), out)
        out.masked_fill_(~inside[:, None], 0.0)

    return launch


def _exchange(low: Lowering, instr: Instr) -> Launch:
    order, widths = instr.attr("order"), instr.attrs.get("widths", ())
    x, out, group = instr.inputs[0], instr.output.name, low.group
    require_ranks(len(widths) or instr.attr("ranks"), group)
    assert group is not None, "an exchange is among several"
    return lambda step: exchange(step.value(x), step.value(out), group, order, widths)


def _take_rows(low: Lowering, instr: Instr) -> Launch:
    from roofline.backends.gpu.kernels.embed import embed

    (x, rows), out = instr.inputs, instr.output.name
    return lambda step: embed(low.chip, step.value(rows), step.value(x), out=step.value(out))


def _linear(low: Lowering, instr: Instr) -> Launch:
    x, out, rows8 = instr.inputs[0], instr.output.name, instr.attr("x_dtype") != "f32"

    def launch(step: GpuStep) -> None:
        parts = low.weights.matrices[instr.weights[0]]
        bias = low.weights.vectors[instr.weights[1]] if len(instr.weights) > 1 else None
        low.products.linear(step, step.value(x), parts, bias, step.value(out), rows8)

    return launch


def _linear_silu_mul(low: Lowering, instr: Instr) -> Launch:
    x, out, rows8 = instr.inputs[0], instr.output.name, instr.attr("x_dtype") != "f32"

    def launch(step: GpuStep) -> None:
        (part,) = low.weights.matrices[instr.weights[0]]
        low.products.gated(step, step.value(x), part, step.value(out), rows8)

    return launch


def _rope_kv_write(low: Lowering, instr: Instr) -> Launch:
    from roofline.backends.gpu.kernels.rope_kv_write import rope_kv_write

    cache, layer = instr.outputs[-1].name, instr.attr("layer")
    turns = interleaved = None
    if instr.op == "rope_kv_write":
        turns = low.tables[instr.attr("table")]
        interleaved = low.program.tables[instr.attr("table")].style == "interleaved"
    eps, factors = instr.attrs.get("eps", 0.0), _factors(low, instr)
    norm_last = bool(instr.attrs.get("norm_last"))

    def launch(step: GpuStep) -> None:
        norms = None
        if instr.weights:
            q_norm, k_norm = (low.weights.vectors[name] for name in instr.weights)
            norms = q_norm, k_norm
        k, v = (pages[layer] for pages in step.caches[kv_group_of(cache)])
        rope_kv_write(
            low.chip, step.value(instr.inputs[0]), step.fields["positions"], step.slots, turns, norms, eps,
            interleaved=bool(interleaved), q=step.value(instr.output.name), k=k, v=v, factors=factors,
            norm_last=norm_last,
        )  # fmt: skip

    return launch


def _rope_queries(low: Lowering, instr: Instr) -> Launch:
    """The kernel that also writes keys, over pages without a head."""
    from roofline.backends.gpu.kernels.rope_kv_write import rope_kv_write

    table = instr.attrs.get("table")
    turns = None if table is None else low.tables[table]
    interleaved = table is not None and low.program.tables[table].style == "interleaved"
    head_dim = instr.output.type.width // instr.attr("heads")
    group = next(name for name, group in low.program.kv_groups.items() if group.head_dim == head_dim and group.layers)
    factors = _factors(low, instr)

    def launch(step: GpuStep) -> None:
        k, v = (pages[0][:, :0] for pages in step.caches[group])
        norm = low.weights.vectors[instr.weights[0]] if instr.weights else None
        rope_kv_write(
            low.chip, step.value(instr.inputs[0]), step.fields["positions"], step.slots, turns,
            None if norm is None else (norm, norm), instr.attr("eps"), interleaved=interleaved,
            q=step.value(instr.output.name), k=k, v=v, factors=factors, norm_last=instr.attr("norm_last"),
        )  # fmt: skip

    return launch


def _factors(low: Lowering, instr: Instr) -> "Tensor | None":
    factors = PositionFactors.of(instr.attrs)
    return None if factors is None else low.factors[factors]


def _scale_by_position(low: Lowering, instr: Instr) -> Launch:
    (x, positions), out, factors = instr.inputs, instr.output.name, _factors(low, instr)
    assert factors is not None, "the op has factors"

    def launch(step: GpuStep) -> None:
        step.value(out).copy_(step.value(x).float() * factors[step.value(positions).long()][:, None])

    return launch


def _attend(low: Lowering, instr: Instr) -> Launch:
    import torch

    from roofline.backends.gpu.kernels.attend import attend
    from roofline.backends.gpu.kernels.attend_launches import prepare_all, workspace_floats
    from roofline.ops.attention import log2_slopes

    if instr.attr("value_dim"):
        return lower_latent.attend(low, instr)
    cache, layer, heads = instr.inputs[1], instr.attr("layer"), instr.attr("heads")
    kv_heads, head_dim = low.program.types()[cache].trailing
    among = heads, instr.attr("first_head"), instr.attr("all_heads")
    slopes = torch.tensor(log2_slopes(*among), device=low.device) if instr.attr("alibi") else None
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "window": instr.attr("window")}
    shape["cache_bytes"] = dtypes()[low.program.kv_groups[kv_group_of(cache)].format].itemsize

    def launch(step: GpuStep) -> None:
        key = tuple(shape.items())
        if key not in step.launches:  # the same for all layers
            step.launches[key] = prepare_all(low.chip, **step.sizes.of_attention(), **shape, exact=low.exact)
        k, v = (pages[layer] for pages in step.caches[kv_group_of(cache)])
        names = ("seg_start", "context_len", "page_start", "pages")
        sinks = low.weights.vectors[instr.weights[0]] if instr.weights else None
        for how in step.launches[key]:
            floats = workspace_floats(how)
            attend(
                how, step.value(instr.inputs[0]), k, v, *(step.fields[name] for name in names),
                scale=instr.attr("scale"), soft_cap=instr.attr("soft_cap"), slopes=slopes, sinks=sinks,
                workspace=step.space(torch.float32, floats) if floats else None, out=step.value(instr.output.name),
            )  # fmt: skip

    return launch


def _activated(low: Lowering, instr: Instr) -> Launch:
    from roofline.backends.gpu.kernels.gated import activated, gated

    plain, out = instr.op.removesuffix("_mul"), instr.output.name
    multiplies = instr.op == "mul" or instr.op.endswith("_mul")
    if instr.op == "mul":
        kind = "plain"
    elif plain == "gelu":
        kind = "gelu_tanh" if instr.attr("tanh") else "gelu_erf"
    else:
        kind = "relu_squared" if plain == "relu" and instr.attr("squared") else plain

    def launch(step: GpuStep) -> None:
        operands = [step.value(name) for name in instr.inputs]
        (gated if multiplies else activated)(low.chip, kind, *operands, out=step.value(out))

    return launch


def _clamped_swiglu(low: Lowering, instr: Instr) -> Launch:
    from roofline.backends.gpu.kernels.gated import clamped_swiglu

    (gate, up), out, limit = instr.inputs, instr.output.name, float(instr.attr("limit"))
    return lambda step: clamped_swiglu(low.chip, step.value(gate), step.value(up), limit, out=step.value(out))


def _adapter_down(low: Lowering, instr: Instr) -> Launch:
    """Nothing: one launcher computes both products, and keeps what is between them in memory of its own."""
    return lambda step: None


def _adapter_up(low: Lowering, instr: Instr) -> Launch:
    from roofline.backends.gpu.kernels.adapter import adapter

    assert low.adapters is not None, "a Program with places for adapters has memory for them"
    (t, y, slots), out = instr.inputs, instr.output.name
    down = next(instr for instr in low.program.body if t in (value.name for value in instr.outputs))
    matrices, of_rows = low.adapters.of_group(instr.attr("group")), instr.output.type.leading == "rows"

    def launch(step: GpuStep) -> None:
        result = step.value(out)
        if result.data_ptr() != step.value(y).data_ptr():
            result.copy_(step.value(y))
        if not step.sizes.adapted:
            return
        x, ids = step.value(down.inputs[0]), step.value(slots)
        if of_rows:
            ids = ids.index_select(0, step.fields["logit_rows"])
        for matrix in matrices:
            site = matrix.site
            columns = result[:, site.column : site.column + site.outputs]
            adapter(low.chip, x, matrix.a, matrix.b, matrix.scales, ids, out=columns)

    return launch


def _by_torch(compute: "Callable[[Instr, list[Tensor]], Tensor]") -> Callable[[Lowering, Instr], Launch]:
    """Small ops that no model's layers are made of: torch's own kernels."""

    def lower(low: Lowering, instr: Instr) -> Launch:
        def launch(step: GpuStep) -> None:
            step.value(instr.output.name).copy_(compute(instr, [step.value(name) for name in instr.inputs]))

        return launch

    return lower


def _soft_cap(instr: Instr, x: "list[Tensor]") -> "Tensor":
    return (x[0].float() / instr.attr("cap")).tanh() * instr.attr("cap")


def _cut_heads(instr: Instr, x: "list[Tensor]") -> "Tensor":
    from roofline import ops

    return ops.cut_heads(x[0], instr.attr("heads"), instr.attr("start"), instr.attr("stop"))


def _join_heads(instr: Instr, x: "list[Tensor]") -> "Tensor":
    from roofline import ops

    return ops.join_heads(x[0], x[1], instr.attr("heads"), instr.attr("shared"))


_LOWER: dict[str, Callable[[Lowering, Instr], Launch]] = {
    "embed": _embed,
    "all_reduce": _exchange,
    "all_gather": _exchange,
    "take_rows": _take_rows,
    "rms_norm": lower_rows.norm,
    "layer_norm": lower_rows.norm,
    "add_norm": lower_rows.add_norm,
    "linear": _linear,
    "linear_silu_mul": _linear_silu_mul,
    "route": lower_experts.route,
    "expert_linear": lower_experts.expert_linear,
    "expert_bias": lower_experts.expert_bias,
    "expert_scale": lower_experts.expert_scale,
    "combine": lower_experts.combine,
    "adapter_down": _adapter_down,
    "adapter_up": _adapter_up,
    "rope_kv_write": _rope_kv_write,
    "qkv_write": _rope_kv_write,
    "rope_queries": _rope_queries,
    "scale_by_position": _scale_by_position,
    "rope_latent_write": lower_latent.rope_latent_write,
    "head_linear": lower_latent.head_linear,
    "attend": _attend,
    "silu": _activated,
    "gelu": _activated,
    "relu": _activated,
    "silu_mul": _activated,
    "gelu_mul": _activated,
    "sigmoid_mul": _activated,
    "mul": _activated,
    "clamped_swiglu": _clamped_swiglu,
    "like_norm": lower_rows.like_norm,
    "above_spread": lower_rows.above_spread,
    "scale_columns": lower_rows.scale_columns,
    "causal_conv": lower_state.causal_conv,
    "delta_rule": lower_state.delta_rule,
    "selective_scan": lower_state.selective_scan,
    "add": _by_torch(lambda instr, x: x[0] + x[1].to(x[0].dtype)),
    "scale": _by_torch(lambda instr, x: x[0] * instr.attr("factor")),
    "cast": _by_torch(lambda instr, x: x[0]),
    "soft_cap": _by_torch(_soft_cap),
    "cut_heads": _by_torch(_cut_heads),
    "join_heads": _by_torch(_join_heads),
    "sigmoid_scale": _by_torch(lambda instr, x: x[0].float() * x[1].float().sigmoid()),
}


def without_kernel(program: Program) -> tuple[str, ...]:
    """Ops that a Program has and no kernel here computes, by order of use."""
    lacking = (instr.op for instr in program.body if instr.op not in _LOWER and not instr.has(Trait.VIEW))
    return tuple(dict.fromkeys(lacking))


def check_attention(program: Program) -> None:
    """Raises UnsupportedError for heads and compressed rows that are too wide."""
    from roofline.backends.gpu.partials import LARGEST_HEAD

    lower_latent.check_rows(program)
    heads = (group for group in program.kv_groups.values() if not group.value_dim)
    widest = max((group.head_dim for group in heads), default=0)
    if widest > LARGEST_HEAD:
        reason = f"attention on GPUs has up to {LARGEST_HEAD}"
        raise UnsupportedError(f"heads of {widest} dimensions on a GPU", reason, ("backend=cpu", "backend=reference"))


def check(program: Program) -> None:
    """Raises UnsupportedError for an op or a form of one without a kernel, for an encoder, and for attention that has
    none."""
    check_attention(program)
    for name in without_kernel(program):
        raise UnsupportedError(f"op {name!r} on a GPU", "it has no kernel", sorted(_LOWER))
    lower_experts.check_experts(program)
    if any(instr.op == "attend" and not instr.attr("causal") for instr in program.body):
        reason = "attention has no kernel that sees both ways there, and no hidden states are given"
        raise UnsupportedError("an encoder model on a GPU", reason, ("backend=cpu", "backend=reference"))
