"""Gradient norms over all ranks, and clipping by them."""

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
    """The norm of all gradients together, before clipping; afterwards they are clipped, and divided by `scale`.

    exact: the norm does not depend on how the parameters are sharded. A norm that is not finite leaves gradients alone.
    """
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = (_exact_norm(grads, world) if exact else _norm(model, world)) / scale
    if not math.isfinite(norm):
        return norm
    factor = 1 / scale
    if section is not None and section.clipping_type == "norm":
        factor *= min(1.0, section.clipping_threshold / (norm + 1e-6))  # as torch's clip_grad_norm_
    local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    if factor != 1.0:
        torch._foreach_mul_(local, factor)
    if section is not None and section.clipping_type == "value":
        for grad in local:
            grad.clamp_(-section.clipping_threshold, section.clipping_threshold)
    return norm


def _norm(model: Model, world: World) -> float:
    """Parts of a matrix that ranks share count once each, what all of them have counts once."""
    parted: list[Tensor] = []
    whole: list[Tensor] = []
    for _, param, parameter in model.canonical():
        if parameter.grad is not None:
            (whole if part(param, model.ranks).dim is None else parted).append(parameter.grad)
    squares = [_total(grads) ** 2 if grads else 0.0 for grads in (whole, parted)]
    return math.sqrt(squares[0] + (_over(world, squares[1]) if parted else 0.0))


def _over(world: World, value: float) -> float:
    if world.tensor.group is None:
        return value
    summed = torch.tensor([value], dtype=torch.float64, device=world.device)
    dist.all_reduce(summed, group=world.tensor.group)
    return float(summed)


def _total(grads: list[Tensor]) -> float:
    total = nn.utils.get_total_norm(grads)
    return float(total.full_tensor() if isinstance(total, DTensor) else total)


def _exact_norm(grads: list[Tensor], world: World) -> float:
    """From the squares of rows, which one rank has whole, added without rounding (Shewchuk 1997, math.fsum)."""
    rows = []
    for grad in grads:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        if local.numel():
            rows.append(local.double().reshape(local.shape[0], -1).square().sum(1))
    mine = torch.cat(rows).tolist() if rows else []
    most = int(world.most([len(mine)])[0])
    every = world.gather([*mine, *([0.0] * (most - len(mine)))])
    return math.sqrt(math.fsum(value for each in every for value in each))
