"""Launches of ops with recurrent state, which lies in slots beside the pages of the cache."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from roofline.backends.gpu.runtime.step import GpuStep
from roofline.ops.state import COLUMNS, MATRIX
from roofline.program.ir import Instr, kv_group_of

if TYPE_CHECKING:
    from torch import Tensor

    from roofline.backends.gpu.kernels.causal_conv import StateFields
    from roofline.backends.gpu.runtime.lower import Lowering

Launch = Callable[[GpuStep], None]


def causal_conv(low: "Lowering", instr: Instr) -> Launch:
    """A sum over the last tokens of each channel."""
    from roofline.backends.gpu.kernels import causal_conv as kernel

    states_of, x, silu = _states(low, instr, COLUMNS), instr.inputs[0], bool(instr.attr("silu"))

    def launch(step: GpuStep) -> None:
        w, *bias = (low.weights.vectors[name] for name in instr.weights)
        value, out = step.value(x), step.value(instr.outputs[0].name)
        shift = bias[0] if bias else None
        kernel.causal_conv(low.chip, _fields(step), value, states_of(step), w, shift, silu=silu, out=out)

    return launch


def delta_rule(low: "Lowering", instr: Instr) -> Launch:
    """The gated delta rule."""
    from roofline.backends.gpu.kernels import delta_rule as kernel

    states_of, (qkv, a, b) = _states(low, instr, MATRIX), instr.inputs[:3]
    heads = kernel.DeltaHeads(
        key_heads=instr.attr("key_heads"),
        value_heads=instr.attr("value_heads"),
        key_dim=instr.attr("key_dim"),
        tiled=bool(instr.attr("tiled")),
        eps=float(instr.attr("eps")),
    )

    def launch(step: GpuStep) -> None:
        a_log, dt_bias = (low.weights.vectors[name] for name in instr.weights)
        gates = step.value(a), step.value(b), a_log, dt_bias
        out = step.value(instr.outputs[0].name)
        kernel.delta_rule(low.chip, _fields(step), step.value(qkv), gates, states_of(step), heads, out=out)

    return launch


def selective_scan(low: "Lowering", instr: Instr) -> Launch:
    """The selective scan."""
    from roofline.backends.gpu.kernels import selective_scan as kernel

    states_of, (xbc, dt) = _states(low, instr, MATRIX), instr.inputs[:2]
    names = ("states", "groups", "least", "most")
    sizes = kernel.ScanSizes(**{name: instr.attr(name) for name in names})

    def launch(step: GpuStep) -> None:
        a_log, dt_bias, d = (low.weights.vectors[name] for name in instr.weights)
        rows, out = (step.value(xbc), step.value(dt)), step.value(instr.outputs[0].name)
        kernel.selective_scan(low.chip, _fields(step), *rows, (a_log, dt_bias, d), states_of(step), sizes, out=out)

    return launch


def _states(low: "Lowering", instr: Instr, part: str) -> "Callable[[GpuStep], Tensor]":
    """What an instruction's layer keeps as that part, in all slots: float32 [slots, values]."""
    group = kv_group_of(instr.outputs[-1].name)
    start, stop = low.program.state_groups[group].place(part)
    layer = instr.attr("layer")
    return lambda step: step.states[group][:, layer, start:stop]


def _fields(step: GpuStep) -> "StateFields":
    from roofline.backends.gpu.kernels.causal_conv import StateFields

    return StateFields(**{name: step.fields[name] for name in StateFields.__annotations__})
