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
    experts, groups = call.x.width, call.groups
    if not 1 <= call.top <= experts:
        raise ConfigError(f"route: {call.top} of {experts} experts")
    if call.score not in SCORES or call.group_score not in GROUP_SCORES:
        raise ConfigError(f"route: no score {call.score!r} of experts or {call.group_score!r} of groups")
    if groups < 1 or experts % groups or not 1 <= call.kept_groups <= groups:
        raise ConfigError(f"route: {call.kept_groups} of {groups} groups of {experts} experts")
    if call.kept_groups * (experts // groups) < call.top:
        raise ConfigError(f"route: {call.top} experts of {call.kept_groups} groups of {experts // groups}")
    if groups > 1 and call.group_score == "best_two" and experts // groups < 2:
        raise ConfigError(f"route: groups of {experts // groups} have no best two")
    if call.bias is not None and call.bias.shape != (experts,):
        raise ConfigError(f"route: bias of shape {call.bias.shape} for {experts} experts")
    return Type("f32", call.x.leading, (call.top,)), Type("i32", call.x.leading, (call.top,))


_ROUTE = (Trait.ROW_WISE, Trait.WHOLE_VALUES, Trait.READS_WIDE)
SCORES = ("softmax", "sigmoid")
GROUP_SCORES = ("best_two", "best")
LEAST_TOTAL = 1e-20  # is added to the sum that weights are divided by


def routes_by_logits(score: str, groups: int, scale: float, has_bias: bool) -> bool:
    """Whether experts are those of the largest logits and weights a plain softmax, as Mixtral has it."""
    return score == "softmax" and groups == 1 and scale == 1.0 and not has_bias


@op(values=("x",), weights=("bias",), infer=_route_type, traits=_ROUTE, flops=per_element(4))
def route(
    x: "Tensor",
    top: int,
    renormalise: bool = True,
    bias: "Tensor | None" = None,
    score: str = "softmax",
    groups: int = 1,
    kept_groups: int = 1,
    group_score: str = "best_two",
    scale: float = 1.0,
) -> "tuple[Tensor, Tensor]":
    """(weights float32, ids int32), both [tokens, top], of router logits x [tokens, experts].

    The scores of a token's experts are the softmax of its logits, or the sigmoid of each. Ids are those of the largest
    scores + bias [experts], in falling order, equal ones by number. groups: so many equal parts of the experts, one
    behind the other, of which only the `kept_groups` best count; a group's score is the sum of its best two, or its
    best alone. Weights are the scores of the chosen, without bias, divided by their sum with renormalise, times scale.
    Source: DeepSeek-AI 2024 (DeepSeek-V3).
    """
    import torch

    logits = x.float()
    if routes_by_logits(score, groups, scale, bias is not None):
        ranked, ids = torch.sort(logits, dim=1, descending=True, stable=True)
        ranked, ids = ranked[:, :top], ids[:, :top].int()
        weights = torch.softmax(ranked, dim=1) if renormalise else torch.exp(ranked - logits.logsumexp(1, keepdim=True))
        return weights, ids
    scores = torch.softmax(logits, dim=1) if score == "softmax" else torch.sigmoid(logits)
    ids = chosen_experts(scores if bias is None else scores + bias.float(), top, groups, kept_groups, group_score)
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(dim=1, keepdim=True) + LEAST_TOTAL) if renormalise else weights
    return weights if scale == 1.0 else weights * scale, ids.int()


def chosen_experts(scores: "Tensor", top: int, groups: int, kept_groups: int, group_score: str) -> "Tensor":
    """int64 [tokens, top]: the experts of the largest scores [tokens, experts] within the best groups, falling, equal
    ones by number."""
    import torch

    if groups > 1:
        parts = scores.unflatten(1, (groups, -1))  # [tokens, groups, experts of a group]
        best = torch.sort(parts, dim=2, descending=True).values
        of_group = best[..., 0] + best[..., 1] if group_score == "best_two" else best[..., 0]
        best_groups = torch.sort(of_group, dim=1, descending=True, stable=True).indices[:, :kept_groups]
        dropped = torch.ones_like(of_group, dtype=torch.bool).scatter(1, best_groups, False)
        scores = parts.masked_fill(dropped[..., None], -torch.inf).flatten(1)
    return torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :top]


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
        products = parts[chosen] @ matrices[expert].T
        out = out.to(products.dtype).index_put((chosen,), products)  # which autocast may have in fewer bits
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
