"""route, expert_linear, combine: a mixture of experts. Source: Shazeer et al. 2017.

A token's experts stand in falling order of their logits, equal ones by number; what belongs to them lies side by side
in the token's row, in that order.
"""

from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError
from roofline.ops.cost import Affine
from roofline.ops.elementwise import per_element
from roofline.ops.registry import Call, op
from roofline.ops.symbol import Type
from roofline.ops.traits import Trait

if TYPE_CHECKING:
    from torch import Tensor


def _route_type(call: Call) -> tuple[Type, Type]:
    if not 1 <= call.top <= call.x.width:
        raise ConfigError(f"route: {call.top} of {call.x.width} experts")
    return Type("f32", call.x.leading, (call.top,)), Type("i32", call.x.leading, (call.top,))


@op(values=("x",), infer=_route_type, traits=(Trait.ROW_WISE,), flops=per_element(4))
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


def _expert_linear_type(call: Call) -> Type:
    rows, width = call.w.shape
    if rows % call.experts:
        raise ConfigError(f"expert_linear: {rows} rows of {call.experts} experts")
    if call.x.width not in (width, call.ids.width * width):
        raise ConfigError(
            f"expert_linear: input of width {call.x.width} for {call.ids.width} experts of {width} columns"
        )
    return Type("f32", call.x.leading, (call.ids.width * (rows // call.experts),))


def _expert_linear_flops(call: Call) -> Affine:
    return Affine.per(call.x.leading, 2 * call.ids.width * (call.w.shape[0] // call.experts) * call.w.shape[1])


_EXPERTS = (Trait.ROW_WISE, Trait.LONG_SUM)


@op(values=("x", "ids"), weights=("w",), infer=_expert_linear_type, traits=_EXPERTS, flops=_expert_linear_flops)
def expert_linear(x: "Tensor", ids: "Tensor", w: "Tensor", experts: int) -> "Tensor":
    """x @ w[id].T for each of a token's experts: [tokens, top * out].

    x [tokens, in], the same for all of them, or [tokens, top * in]; ids int32 [tokens, top]; w [experts * out, in], the
    experts' matrices one below the other. Its price reads every expert once: a step of few tokens reads fewer.
    """
    import torch

    matrices = w.view(experts, -1, w.shape[1])
    parts = x.view(x.shape[0], -1, w.shape[1]).expand(-1, ids.shape[1], -1)  # [tokens, top, in]
    out = x.new_zeros(*ids.shape, matrices.shape[1])  # [tokens, top, out]
    for expert in torch.unique(ids).tolist():
        chosen = ids == expert
        out = out.index_put((chosen,), parts[chosen] @ matrices[expert].T)
    return out.flatten(1)


def _combine_type(call: Call) -> Type:
    if call.x.width % call.weights.width:
        raise ConfigError(f"combine: width {call.x.width} for {call.weights.width} experts a token")
    return Type(call.x.dtype, call.x.leading, (call.x.width // call.weights.width,))


@op(values=("x", "weights"), infer=_combine_type, traits=(Trait.ROW_WISE,), flops=per_element(2))
def combine(x: "Tensor", weights: "Tensor") -> "Tensor":
    """The sum over a token's experts, in their order, of weight * x; x [tokens, top * width], weights [tokens, top]."""
    parts = x.view(*weights.shape, -1).unbind(1)
    total = parts[0] * weights[:, :1]
    for rank in range(1, weights.shape[1]):
        total = total + parts[rank] * weights[:, rank : rank + 1]
    return total
