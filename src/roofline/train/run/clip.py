"""Computes the norm of all gradients over all ranks, and clips the gradients."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from roofline.train.config.schema import ClippingSection
from roofline.train.model.modules import Model
from roofline.train.model.tensor_parallel import part
from roofline.train.parallel.processes import World


def clip(model: Model, world: World, section: ClippingSection | None, scale: float, exact: bool) -> float:
    """Divide the gradients by `scale` and clip them; returns their norm before clipping.

    exact: the norm's bits do not depend on how parameters are sharded. If the norm is not finite, nothing is changed.
    """
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = (_exact_norm(grads, world) if exact else _norm(model, world)) / scale
    if not math.isfinite(norm):
        return norm
    factor = 1 / scale
    if section is not None and section.clipping_type == "norm":
        factor *= min(1.0, section.clipping_threshold / (norm + 1e-6))  # as in torch's clip_grad_norm_
    local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    if factor != 1.0:
        torch._foreach_mul_(local, factor)
    if section is not None and section.clipping_type == "value":
        for grad in local:
            grad.clamp_(-section.clipping_threshold, section.clipping_threshold)
    return norm


def _norm(model: Model, world: World) -> float:
    """The norm of all gradients, with those of divided matrices summed over the ranks that share them."""
    divided: list[Tensor] = []
    replicated: list[Tensor] = []
    for _, param, parameter in model.canonical():
        if parameter.grad is not None:
            (replicated if part(param, model.ranks).dim is None else divided).append(parameter.grad)
    squares = [_total_norm(grads) ** 2 if grads else 0.0 for grads in (replicated, divided)]
    if divided and world.tensor.group is not None:
        summed = torch.tensor([squares[1]], dtype=torch.float64, device=world.device)
        dist.all_reduce(summed, group=world.tensor.group)
        squares[1] = float(summed)
    return math.sqrt(sum(squares))


def _total_norm(grads: list[Tensor]) -> float:
    total = nn.utils.get_total_norm(grads)
    return float(total.full_tensor() if isinstance(total, DTensor) else total)


def _exact_norm(grads: list[Tensor], world: World) -> float:
    """The norm from the squares of rows, which are never divided, added without rounding (Shewchuk 1997, math.fsum)."""
    rows = []
    for grad in grads:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        if local.numel():
            rows.append(local.double().reshape(local.shape[0], -1).square().sum(1))
    mine = torch.cat(rows).tolist() if rows else []
    max_count = int(world.most([len(mine)])[0])
    every = world.gather([*mine, *([0.0] * (max_count - len(mine)))])
    return math.sqrt(math.fsum(value for each in every for value in each))
