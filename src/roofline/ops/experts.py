"""route, expert_linear, combine, sigmoid_scale: a mixture of experts. Source: Shazeer et al. 2017.

A token's experts stand in falling order of their logits, equal ones by number; what belongs to them lies side by side
in the token's row, in that order.
"""

from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError
from roofline.ops.cost import Affine
from roofline.ops.elementwise import per_element
from roofline.ops.matmul import Q8Rows
from roofline.ops.own_weight import OwnWeight
from roofline.ops.registry import Call, op
from roofline.ops.symbol import Type
from roofline.ops.traits import Trait

if TYPE_CHECKING:
    from torch import Tensor


def _route_type(call: Call) -> tuple[Type, Type]:
    if not 1 <= call.top <= call.x.width:
        raise ConfigError(f"route: {call.top} of {call.x.width} experts")
    return Type("f32", call.x.leading, (call.top,)), Type("i32", call.x.leading, (call.top,))


_ROUTE = (Trait.ROW_WISE, Trait.WHOLE_VALUES, Trait.READS_WIDE)


@op(values=("x",), infer=_route_type, traits=_ROUTE, flops=per_element(4))
def route(x: "Tensor", top: int, renormalise: bool = True) -> "tuple[Tensor, Tensor]":
    """(weights float32, ids int32), both [tokens, top], of router logits x [tokens, experts].

    Ids are those of the largest logits. Weights are the softmax over the chosen logits (Mixtral), or over all with
    renormalise False.
    """
    import torch

    logits, ids = torch.sort(x.float(), dim=1, descending=True, stable=True)
    logits, ids = logits[:, :top], ids[:, :top].int()
    weights = torch.softmax(logits, dim=1) if renormalise else torch.exp(logits - x.float().logsumexp(1, keepdim=True))
    return weights, ids


def expert_linear_type(call: Call) -> Type:
    """Type rule shared with the fused form."""
    rows, width = call.w.shape
    if rows % call.experts:
        raise ConfigError(f"expert_linear: {rows} rows of {call.experts} experts")
    if call.x.width not in (width, call.ids.width * width):
        raise ConfigError(
            f"expert_linear: input of width {call.x.width} for {call.ids.width} experts of {width} columns"
        )
    return Type("f32", call.x.leading, (call.ids.width * (rows // call.experts),))


def expert_linear_flops(call: Call) -> Affine:
    """2 * in * out for each of a row's experts."""
    return Affine.per(call.x.leading, 2 * call.ids.width * (call.w.shape[0] // call.experts) * call.w.shape[1])


def expert_bytes(call: Call) -> Affine:
    """The bytes of each expert that the rows of a step are sent to."""
    each = call.w.nbytes // call.experts
    return Affine(experts=each) if call.x.leading == "tokens" else Affine(row_experts=each)


EXPERTS = (Trait.ROW_WISE, Trait.LONG_SUM, Trait.EXPERTS)
_PRICES = {"flops": expert_linear_flops, "weight_bytes": expert_bytes}
_ROUNDED = (*EXPERTS, Trait.ROUNDED, Trait.SPLITS)


@op(values=("x", "ids"), weights=("w",), infer=expert_linear_type, traits=_ROUNDED, **_PRICES)
def expert_linear(x: "Tensor | Q8Rows", ids: "Tensor", w: "Tensor", experts: int) -> "Tensor":
    """x @ w[id].T for each of a token's experts: [tokens, top * out].

    x [tokens, in], the same for all of them, or [tokens, top * in]; ids int32 [tokens, top]; w [experts * out, in], the
    experts' matrices one below the other. Its price reads the experts that the step's rows are sent to.
    """
    import torch

    if isinstance(x, Q8Rows):
        x = x.dequantize()
    if isinstance(w, OwnWeight):
        return w.expert_linear(x, ids, experts)
    matrices = w.view(experts, -1, w.shape[1])
    parts = x.unflatten(1, (-1, w.shape[1])).expand(-1, ids.shape[1], -1)  # [tokens, top, in]
    out = x.new_zeros(*ids.shape, matrices.shape[1])  # [tokens, top, out]
    for expert in torch.unique(ids).tolist():
        chosen = ids == expert
        out = out.index_put((chosen,), parts[chosen] @ matrices[expert].T)
    return out.flatten(1)


def _expert_bias_type(call: Call) -> Type:
    (rows,) = call.bias.shape
    if rows % call.experts or call.x.width != call.ids.width * (rows // call.experts):
        raise ConfigError(
            f"expert_bias: {rows} biases of {call.experts} experts for {call.ids.width} parts of {call.x.width}"
        )
    x: Type = call.x
    return x


def _expert_bias_bytes(call: Call) -> Affine:
    each = call.bias.nbytes // call.experts
    return Affine(experts=each) if call.x.leading == "tokens" else Affine(row_experts=each)


_BIAS = (Trait.ROW_WISE, Trait.WHOLE_VALUES, Trait.SPLITS)


@op(
    values=("x", "ids"),
    weights=("bias",),
    infer=_expert_bias_type,
    traits=_BIAS,
    flops=per_element(1),
    weight_bytes=_expert_bias_bytes,
    inplace="x",
)
def expert_bias(x: "Tensor", ids: "Tensor", bias: "Tensor", experts: int) -> "Tensor":
    """x + bias[id] in each part of a row, in x's dtype: x [tokens, top * out], ids int32 [tokens, top], bias
    [experts * out], the experts' biases one behind the other."""
    parts = x.unflatten(1, (ids.shape[1], -1))  # [tokens, top, out]
    return (parts + bias.view(experts, -1)[ids.long()].to(x.dtype)).flatten(1)


def _combine_type(call: Call) -> Type:
    if call.x.width % call.weights.width:
        raise ConfigError(f"combine: width {call.x.width} for {call.weights.width} experts a token")
    return Type("f32", call.x.leading, (call.x.width // call.weights.width,))


_COMBINE = (Trait.ROW_WISE, Trait.WHOLE_VALUES)


@op(values=("x", "weights"), infer=_combine_type, traits=_COMBINE, flops=per_element(2))
def combine(x: "Tensor", weights: "Tensor") -> "Tensor":
    """The sum over a token's experts, in their order, of weight * x; x [tokens, top * width], weights [tokens, top]."""
    parts = x.unflatten(1, (weights.shape[1], -1)).unbind(1)
    total = parts[0] * weights[:, :1]
    for rank in range(1, weights.shape[1]):
        total = total + parts[rank] * weights[:, rank : rank + 1]
    return total


def _sigmoid_scale_type(call: Call) -> Type:
    if call.gate.width != 1:
        raise ConfigError(f"sigmoid_scale: a gate of width {call.gate.width}, not one number a row")
    return Type("f32", call.x.leading, call.x.trailing)


_SCALE = (Trait.ROW_WISE, Trait.WHOLE_VALUES)


@op(values=("x", "gate"), infer=_sigmoid_scale_type, traits=_SCALE, flops=per_element(1))
def sigmoid_scale(x: "Tensor", gate: "Tensor") -> "Tensor":
    """x times the sigmoid of gate: x [tokens, width], gate [tokens, 1] (the shared expert of Qwen2-MoE)."""
    import torch

    return x * torch.sigmoid(gate.float()).to(x.dtype)
