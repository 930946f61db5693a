"""silu and gelu, plain and gated, relu and its square, above_spread."""

from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError
from roofline.ops.cost import Affine
from roofline.ops.elementwise import ELEMENTWISE, per_element, same_as_x
from roofline.ops.registry import Call, CostRule, op
from roofline.ops.symbol import Type
from roofline.ops.traits import Trait

if TYPE_CHECKING:
    from torch import Tensor


_ACTIVATION = (*ELEMENTWISE, Trait.ROUNDED)


@op(values=("x",), infer=same_as_x, traits=_ACTIVATION, flops=per_element(8), inplace="x")
def silu(x: "Tensor") -> "Tensor":
    """x / (1 + exp(-x)). Source: Elfwing et al. 2017."""
    from torch.nn import functional

    return functional.silu(x)


@op(values=("x",), infer=same_as_x, traits=_ACTIVATION, flops=per_element(12), inplace="x")
def gelu(x: "Tensor", tanh: bool = True) -> "Tensor":
    """x * Phi(x), by its tanh form unless tanh is False. Source: Hendrycks and Gimpel 2016."""
    from torch.nn import functional

    return functional.gelu(x, approximate="tanh" if tanh else "none")


@op(values=("x",), infer=same_as_x, traits=_ACTIVATION, flops=per_element(1), inplace="x")
def relu(x: "Tensor", squared: bool = False) -> "Tensor":
    """max(x, 0), or the square of that. Sources: Nair and Hinton 2010; So et al. 2021."""
    from torch.nn import functional

    y = functional.relu(x)
    return y * y if squared else y


@op(values=("x",), infer=same_as_x, traits=(Trait.ROW_WISE, Trait.READS_WIDE), flops=per_element(6), inplace="x")
def above_spread(x: "Tensor", z: float) -> "Tensor":
    """max(0, x - mean - z * deviation), mean and standard deviation of each row: of a normal distribution the part
    beyond z deviations is left. Source: Gemma 3n's sparse activations."""
    from torch.nn import functional

    values = x.float()
    bound = values.mean(dim=-1, keepdim=True) + values.std(dim=-1, keepdim=True, unbiased=False) * z
    return functional.relu(values - bound).to(x.dtype)


def gated_type(call: Call) -> Type:
    """gate and up of one width; without up, gate holds both side by side."""
    if call.up is None:
        if call.gate.width % 2:
            raise ConfigError(f"gate and up side by side cannot have the odd width {call.gate.width}")
        return Type(call.gate.dtype, call.gate.leading, (call.gate.width // 2,))
    if call.gate != call.up:
        raise ConfigError(f"gate {call.gate} and up {call.up} differ")
    gate: Type = call.gate
    return gate


def gated_flops(count: int) -> CostRule:
    """FLOPs rule: `count` operations for each element of the result."""
    return lambda call: Affine.per(call.gate.leading, count * gated_type(call).width)


def halves(gate: "Tensor", up: "Tensor | None") -> "tuple[Tensor, Tensor]":
    """gate and up, taken apart when they come side by side as [rows, 2 * ffn]."""
    if up is not None:
        return gate, up
    ffn = gate.shape[1] // 2
    return gate[:, :ffn], gate[:, ffn:]


_GATED = (*_ACTIVATION, Trait.GATED)


@op(values=("gate", "up"), infer=gated_type, traits=_GATED, flops=gated_flops(9))
def silu_mul(gate: "Tensor", up: "Tensor | None" = None) -> "Tensor":
    """silu(gate) * up, both [rows, ffn]; or one operand [rows, 2 * ffn] with gate left and up right (SwiGLU)."""
    from torch.nn import functional

    gate_part, up_part = halves(gate, up)
    return functional.silu(gate_part) * up_part


@op(values=("gate", "up"), infer=gated_type, traits=_GATED, flops=gated_flops(13))
def gelu_mul(gate: "Tensor", up: "Tensor | None" = None, tanh: bool = True) -> "Tensor":
    """gelu(gate) * up with the operands of silu_mul (GeGLU)."""
    from torch.nn import functional

    gate_part, up_part = halves(gate, up)
    return functional.gelu(gate_part, approximate="tanh" if tanh else "none") * up_part


# A linear that makes its gate stays apart from those of q, k and v, which a write to the cache takes as one value.
_BESIDE_ATTENTION = (*_GATED, Trait.WHOLE_VALUES)


@op(values=("gate", "up"), infer=gated_type, traits=_BESIDE_ATTENTION, flops=gated_flops(9))
def sigmoid_mul(gate: "Tensor", up: "Tensor | None" = None) -> "Tensor":
    """sigmoid(gate) * up with the operands of silu_mul: the gate of an attention's result, such as Qwen3-Next's."""
    import torch

    gate_part, up_part = halves(gate, up)
    return torch.sigmoid(gate_part) * up_part


SWIGLU_SLOPE = 1.702  # with which x * sigmoid(slope * x) comes near to gelu


def _clamped_type(call: Call) -> Type:
    if call.up is None:
        raise ConfigError("clamped_swiglu takes gate and up as two values")
    return gated_type(call)


@op(values=("gate", "up"), infer=_clamped_type, traits=_ACTIVATION, flops=gated_flops(13), inplace="gate")
def clamped_swiglu(gate: "Tensor", up: "Tensor", limit: float) -> "Tensor":
    """g * sigmoid(1.702 * g) * (u + 1), where g is gate up to limit and u is up within +-limit. Source: gpt-oss."""
    import torch

    g, u = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return g * torch.sigmoid(SWIGLU_SLOPE * g) * (u + 1)
