"""Mixtures of experts as launches: routing, products with the experts' matrices, and what is made of them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from roofline.backends.gpu.memory.weights import DeviceWeights
from roofline.backends.gpu.runtime.step import GpuStep
from roofline.common.errors import UnsupportedError
from roofline.hardware.chips.chips import Chip
from roofline.ops import formats
from roofline.ops.experts import routes_by_logits
from roofline.program.ir import Instr, Program

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from roofline.backends.gpu.kernels.experts import Schedule

Launch = Callable[[GpuStep], None]


class ExpertLowering(Protocol):
    """What these launches need to know of it (see lower.py)."""

    @property
    def chip(self) -> Chip: ...

    @property
    def weights(self) -> DeviceWeights: ...

    @property
    def exact(self) -> bool: ...


def route(low: ExpertLowering, instr: Instr) -> Launch:
    from roofline.backends.gpu.kernels.route import RouterScores, route, route_scores

    weights, ids = (value.name for value in instr.outputs)
    renormalise, has_bias = instr.attr("renormalise"), bool(instr.weights)
    plain = routes_by_logits(instr.attr("score"), instr.attr("groups"), instr.attr("scale"), has_bias)
    scores = RouterScores(
        sigmoid=instr.attr("score") == "sigmoid",
        groups=instr.attr("groups"),
        kept_groups=instr.attr("kept_groups"),
        by_best=instr.attr("group_score") == "best",
        scale=instr.attr("scale"),
    )

    def launch(step: GpuStep) -> None:
        logits, places = step.value(instr.inputs[0]), {"weights": step.value(weights), "ids": step.value(ids)}
        step.schedules.pop(ids, None)  # of an earlier step of these sizes
        if plain:
            route(low.chip, logits, renormalise=renormalise, **places)
            return
        bias = low.weights.vectors[instr.weights[0]] if has_bias else None
        route_scores(low.chip, logits, bias, scores, renormalise=renormalise, **places)

    return launch


def expert_linear(low: ExpertLowering, instr: Instr) -> Launch:
    from roofline.backends.gpu.kernels.experts import expert_linear

    (x, ids), out, experts, name = instr.inputs, instr.output.name, int(instr.attr("experts")), instr.weights[0]

    def launch(step: GpuStep) -> None:
        (part,) = low.weights.matrices[name]
        matrix: Tensor = part.weight  # [experts * out, in]
        plan = _schedule(low, step, ids, experts, matrix.dtype)
        rows = step.value(x)
        rows = rows.view(-1, matrix.shape[1])  # a row a token, or a row a slot
        slots = step.value(out).view(plan.order.shape[0], -1)
        expert_linear(low.chip, rows, matrix.view(experts, -1, matrix.shape[1]), plan, out=slots)

    return launch


def expert_bias(low: ExpertLowering, instr: Instr) -> Launch:
    from roofline.backends.gpu.kernels.route import expert_bias

    (x, ids), out, experts = instr.inputs, instr.output.name, int(instr.attr("experts"))

    def launch(step: GpuStep) -> None:
        bias = low.weights.vectors[instr.weights[0]].view(experts, -1)
        parts, results = (step.value(name).view(-1, bias.shape[1]) for name in (x, out))  # a row a slot
        expert_bias(low.chip, parts, step.value(ids), bias, out=results)

    return launch


def expert_scale(low: ExpertLowering, instr: Instr) -> Launch:
    """Few numbers a token: torch's own kernels."""
    import torch

    (x, ids), out = instr.inputs, instr.output.name

    def launch(step: GpuStep) -> None:
        factors = low.weights.vectors[instr.weights[0]]
        torch.mul(step.value(x), factors[step.value(ids).long()], out=step.value(out))

    return launch


def combine(low: ExpertLowering, instr: Instr) -> Launch:
    from roofline.backends.gpu.kernels.route import combine

    (x, weights), out = instr.inputs, instr.output.name

    def launch(step: GpuStep) -> None:
        result = step.value(out)
        combine(low.chip, step.value(x).view(-1, result.shape[1]), step.value(weights), out=result)

    return launch


def check_experts(program: Program) -> None:
    """Raises UnsupportedError for experts in blocks or in several formats: the kernel multiplies floats."""
    for instr in program.body:
        kinds = set(program.weight_types(instr)[0].formats) if instr.op == "expert_linear" else set()
        if len(kinds) > 1 or any(formats.get(kind).block > 1 for kind in kinds):
            what = f"{instr.weights[0]} in {' and '.join(sorted(kinds))} on a GPU"
            reason = "its kernel multiplies experts of one 16-bit or 32-bit format"
            raise UnsupportedError(what, reason, ("the same model in BF16", "backend=cpu"))


def _schedule(low: ExpertLowering, step: GpuStep, ids: str, experts: int, dtype: "torch.dtype") -> "Schedule":
    """Slots sorted by expert: once a step for all products that the same experts are asked for."""
    from roofline.backends.gpu.kernels.experts import schedule

    if ids not in step.schedules:
        step.schedules[ids] = schedule(low.chip, step.value(ids), experts, dtype, exact=low.exact)
    return step.schedules[ids]
