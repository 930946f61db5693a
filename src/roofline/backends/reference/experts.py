"""Experts in the orders of the CPU: which ones a row goes to, and the products with their matrices."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from roofline.backends.reference import orders
from roofline.backends.reference.weights import ReferenceWeights
from roofline.ops.exp2 import LOG2E, exp2_falling, exp2_signed
from roofline.ops.experts import LEAST_TOTAL, chosen_experts
from roofline.ops.matmul import Q8Rows

if TYPE_CHECKING:
    from torch import Tensor


def route_exp2(x: "Tensor", top: int, renormalise: bool) -> "tuple[Tensor, Tensor]":
    """Order "exp2": p = 2^((x - max) * log2 e), weight = p / total. The total over the chosen ascends by rank; over all
    experts it is added in 16 lanes (index mod 16), and these as a tree."""
    import torch

    ranked, ids = torch.sort(x, dim=1, descending=True, stable=True)
    chosen = exp2_falling((ranked[:, :top] - ranked[:, :1]) * LOG2E)
    if renormalise:
        total = chosen[:, 0]
        for rank in range(1, top):
            total = total + chosen[:, rank]
    else:
        powers = exp2_falling((x - ranked[:, :1]) * LOG2E)
        total = _total16(powers)
    return chosen / total[:, None], ids[:, :top].int()


def route_scores_exp2(x: "Tensor", bias: "Tensor | None", attributes: "Mapping[str, Any]") -> "tuple[Tensor, Tensor]":
    """The same where experts are chosen by scores (see ops.experts.route, whose attributes these are): a sigmoid is
    1 / (1 + 2^(-x * log2 e)), a softmax p / total with the total over all experts; the total of the chosen scores
    ascends by rank, then LEAST_TOTAL is added."""
    import torch

    if attributes["score"] == "sigmoid":
        scores = 1.0 / (1.0 + exp2_signed(-x * LOG2E))
    else:
        powers = exp2_falling((x - x.amax(dim=1, keepdim=True)) * LOG2E)
        scores = powers / _total16(powers)[:, None]
    biased = scores if bias is None else scores + bias
    groups = (attributes[name] for name in ("top", "groups", "kept_groups", "group_score"))
    ids = chosen_experts(biased, *groups)
    weights = scores.gather(1, ids)
    if attributes["renormalise"]:
        total = weights[:, 0]
        for rank in range(1, weights.shape[1]):
            total = total + weights[:, rank]
        weights = weights / (total + torch.tensor(LEAST_TOTAL))[:, None]
    return weights if attributes["scale"] == 1.0 else weights * attributes["scale"], ids.int()


def _total16(powers: "Tensor") -> "Tensor":
    """The sum of each row, added in 16 lanes (index mod 16), and these as a tree."""
    import torch

    lanes = torch.zeros(powers.shape[0], orders.LANES)
    for part in torch.nn.functional.pad(powers, (0, -powers.shape[1] % orders.LANES)).split(orders.LANES, dim=1):
        lanes = lanes + part
    return orders.tree16(lanes)


def sigmoid_scale_exp2(x: "Tensor", gate: "Tensor") -> "Tensor":
    """Order "exp2": x * (1 / (1 + 2^(-gate * log2 e)))."""
    return x * (1.0 / (1.0 + exp2_signed(-gate * LOG2E)))


def expert_linear(
    weights: ReferenceWeights, name: str, x: "Tensor | Q8Rows", ids: "Tensor", experts: int, order: str
) -> "Tensor":
    """Orders "q8g32", "q15g32" and "f32" of a linear, a row with each of its experts: float32 [rows, top * out]; x as
    in ops.expert_linear."""
    import torch

    top = ids.shape[1]
    filled = torch.zeros(ids.shape[0], top, weights.row_count(name) // experts)
    for expert in torch.unique(ids).tolist():
        chosen = ids == expert
        rows, ranks = chosen.nonzero(as_tuple=True)
        if isinstance(x, Q8Rows):
            groups = weights.groups(name)
            rows_per_expert = len(groups) // experts
            part = _slots(x, rows, ranks, groups[0].q.shape[1])
            expert_groups = groups[expert * rows_per_expert : (expert + 1) * rows_per_expert]
            out = torch.cat([orders.linear_integers(part, pieces) for pieces in expert_groups], dim=1)
        else:
            assert order == "f32", "rows of floats have no other order"
            matrices = weights.tensor(name).unflatten(0, (experts, -1))  # [experts, out, in]
            inputs = x.view(x.shape[0], -1, matrices.shape[2])
            out = orders.linear_f32(inputs[rows, ranks if inputs.shape[1] > 1 else 0 * ranks], matrices[expert])
        filled[chosen] = out
    return filled.flatten(1)


def head_linear(weights: ReferenceWeights, name: str, x: "Tensor | Q8Rows", heads: int, order: str) -> "Tensor":
    """The same of each head with its own matrix: float32 [rows, heads * out]; x as in ops.head_linear."""
    import torch

    rows = x.q.shape[0] if isinstance(x, Q8Rows) else x.shape[0]
    return expert_linear(weights, name, x, torch.arange(heads).expand(rows, -1), heads, order)


def _slots(x: Q8Rows, rows: "Tensor", ranks: "Tensor", width: int) -> Q8Rows:
    """The rows that an expert reads: of each token, or of each of its experts, side by side there."""
    q = x.q.view(x.q.shape[0], -1, width)
    scale = x.scale.view(x.scale.shape[0], q.shape[1], -1)
    at = ranks if q.shape[1] > 1 else 0 * ranks
    return Q8Rows(q[rows, at], scale[rows, at])
