"""Initialises parameters: their values depend on seed, name and shape alone, not on devices or their number."""

import hashlib
import math

import numpy as np
import torch

from roofline.models.spec import Param
from roofline.train.config.schema import InitSection
from roofline.train.model.modules import Model
from roofline.train.model.tensor_parallel import part


def initialize(model: Model, seed: int, init: InitSection) -> None:
    """Fill a model's parameters in place; each rank fills its own part of a sharded model."""
    for name, param, tensor in model.canonical():
        values = torch.from_numpy(_values(f"{seed}/{name}", param, model.cfg.layers, init))
        fill(tensor, part(param, model.ranks).cut(values))


def fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy the values of a parameter into it, or into this rank's shard of it."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    with torch.no_grad():
        if isinstance(tensor, DTensor):
            moved = values.to(tensor.device, tensor.dtype)
            tensor.copy_(distribute_tensor(moved, tensor.device_mesh, tensor.placements, src_data_rank=None))
        else:
            tensor.copy_(values)


def _values(key: str, param: Param, layers: int, init: InitSection) -> np.ndarray:
    """The initial values of a parameter, float32 [shape]."""
    if len(param.shape) == 1:
        return np.full(param.shape, float(param.name.endswith("norm.weight")), np.float32)
    std = init.init_std if init.name == "baseline_" else math.sqrt(2 / param.shape[1])
    if param.split == "row" and init.init_div_is_residual:
        divisor = init.init_div_is_residual
        std /= math.sqrt(2 * layers) if divisor is True else float(divisor)
    return _normal(key, math.prod(param.shape), std).reshape(param.shape)


def _normal(key: str, count: int, std: float) -> np.ndarray:
    """Normal numbers by Box and Muller 1958 in float64, from Philox's raw bits, which numpy keeps stable."""
    words = np.frombuffer(hashlib.sha256(key.encode()).digest()[:16], "<u8")
    pairs = (count + 1) // 2
    bits = np.random.Philox(key=words).random_raw(2 * pairs) >> np.uint64(11)
    unit = (bits.astype(np.float64) + 0.5) * 2.0**-53  # above 0, below 1
    radius, angle = np.sqrt(-2 * np.log(unit[:pairs])), 2 * np.pi * unit[pairs:]
    out = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
    return (out * std).astype(np.float32)
