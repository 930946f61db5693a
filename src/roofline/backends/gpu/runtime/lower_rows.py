"""Launches of norms, and of small ops that make a row of a row."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from roofline.backends.gpu.runtime.step import GpuStep
from roofline.program.ir import Instr

if TYPE_CHECKING:
    from torch import Tensor

    from roofline.backends.gpu.runtime.lower import Lowering

Launch = Callable[[GpuStep], None]


def norm(low: "Lowering", instr: Instr) -> Launch:
    """RMS or layer norm of rows, or of equal parts of each."""
    from roofline.backends.gpu.kernels import add_norm as kernel

    eps, parts, layer = instr.attr("eps"), instr.attrs.get("heads", 1), instr.op == "layer_norm"

    def launch(step: GpuStep) -> None:
        weight, bias = _vectors(low, instr)
        x, out = step.value(instr.inputs[0]), step.value(instr.output.name)
        if parts > 1:  # each part by itself: rows of one part
            x, out = x.reshape(x.shape[0] * parts, -1), out.view(out.shape[0] * parts, -1)
        kernel.add_norm(low.chip, x, None, weight, bias, eps, layer=layer, summed=None, out=out)

    return launch


def add_norm(low: "Lowering", instr: Instr) -> Launch:
    """A sum, and the norm of it."""
    from roofline.backends.gpu.kernels import add_norm as kernel

    eps, layer = instr.attr("eps"), instr.attr("layer")
    (x, y), (total, out) = instr.inputs, (value.name for value in instr.outputs)

    def launch(step: GpuStep) -> None:
        weight, bias = _vectors(low, instr)
        operands, results = (step.value(x), step.value(y)), {"summed": step.value(total), "out": step.value(out)}
        kernel.add_norm(low.chip, *operands, weight, bias, eps, layer=layer, **results)

    return launch


def _vectors(low: "Lowering", instr: Instr) -> "tuple[Tensor | None, Tensor | None]":
    """Weight and bias of a norm, to be looked up in each step: a hosted layer's are elsewhere in the next one."""
    weight, bias, *_ = (*(low.weights.vectors[name] for name in instr.weights), None, None)
    return weight, bias


def like_norm(low: "Lowering", instr: Instr) -> Launch:
    """Rows made as long as others."""
    from roofline.backends.gpu.kernels import spread as kernel

    (x, y), out = instr.inputs, instr.output.name
    return lambda step: kernel.like_norm(low.chip, step.value(x), step.value(y), out=step.value(out))


def above_spread(low: "Lowering", instr: Instr) -> Launch:
    """What of rows lies far above their mean."""
    from roofline.backends.gpu.kernels import spread as kernel

    x, out, z = instr.inputs[0], instr.output.name, float(instr.attr("z"))
    return lambda step: kernel.above_spread(low.chip, step.value(x), z, out=step.value(out))


def scale_columns(low: "Lowering", instr: Instr) -> Launch:
    """torch's own product, of each element by itself."""
    import torch

    x, out = instr.inputs[0], instr.output.name

    def launch(step: GpuStep) -> None:
        torch.mul(step.value(x), low.weights.vectors[instr.weights[0]], out=step.value(out))

    return launch
