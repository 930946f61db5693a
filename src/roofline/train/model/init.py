"""Initialises parameters: their values depend on seed, name and shape alone, not on devices or their number."""

import hashlib
import math

import numpy as np
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from roofline.models.spec import Param
from roofline.train.config.schema import InitSection
from roofline.train.model.modules import Model
from roofline.train.model.tensor_parallel import part
from roofline.train.model.widen import widened


def initialize(model: Model, seed: int, init: InitSection) -> None:
    """Fill a model's parameters in place; each rank fills its own part of a sharded model."""
    for name, param, tensor in model.canonical():
        values = torch.from_numpy(_values(f"{seed}/{name}", param, model.cfg.layers, init))
        fill(tensor, part(param, model.ranks).cut(values))


def start_adapter(model: Model, seed: int) -> None:
    """Fill what is trained beside frozen matrices: B with zeros, A as PEFT does (uniform, within 1 / sqrt(inputs)), and
    lengths of rows with those of the matrix."""
    trained = {param.name: tensor for _, param, tensor in model.canonical()}
    for param, form, frozen in model.frozen():
        stem = param.name.removesuffix(".weight")
        for each, shape in form.trained.items():
            if each == "lora_A":
                key, limit = f"{seed}/{stem}.{each}", 1 / math.sqrt(shape[1])
                numbers = (_uniform(key, math.prod(shape)) * 2 - 1) * limit
                fill(trained[f"{stem}.{each}"], torch.from_numpy(numbers.astype(np.float32)).view(shape))
            elif each == "lora_B":
                fill(trained[f"{stem}.{each}"], torch.zeros(shape))
            else:
                raw = frozen.full_tensor() if isinstance(frozen, DTensor) else frozen.detach()
                values = widened(raw, form.format, form.shape[1], torch.float32)
                fill(trained[f"{stem}.{each}"], values.square().sum(1).sqrt())


def fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy the values of a parameter into it, or into this rank's shard of it."""
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            moved = values.to(tensor.device, tensor.dtype)
            tensor.copy_(distribute_tensor(moved, tensor.device_mesh, tensor.placements, src_data_rank=None))
        else:
            tensor.copy_(values)


def _values(key: str, param: Param, layers: int, init: InitSection) -> np.ndarray:
    """The initial values of a parameter, float32 [shape]."""
    part = param.name.removesuffix(".weight").rpartition(".")[2]
    if part == "a_log":  # of gated DeltaNet, as its authors: decays from slow to fast
        return np.log(0.01 + 15.99 * _uniform(key, math.prod(param.shape))).astype(np.float32)
    if len(param.shape) == 1:
        return np.full(param.shape, float(part.endswith("norm") or part == "dt_bias"), np.float32)
    std = init.init_std if init.name == "baseline_" else math.sqrt(2 / param.shape[1])
    if param.split == "row" and init.init_div_is_residual:
        divisor = init.init_div_is_residual
        std /= math.sqrt(2 * layers) if divisor is True else float(divisor)
    return _normal(key, math.prod(param.shape), std).reshape(param.shape)


def _normal(key: str, count: int, std: float) -> np.ndarray:
    """Normal numbers by Box and Muller 1958 in float64."""
    pairs = (count + 1) // 2
    unit = _uniform(key, 2 * pairs)
    radius, angle = np.sqrt(-2 * np.log(unit[:pairs])), 2 * np.pi * unit[pairs:]
    out = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
    return (out * std).astype(np.float32)


def _uniform(key: str, count: int) -> np.ndarray:
    """Numbers above 0 and below 1 in float64, from Philox's raw bits, which numpy keeps stable."""
    words = np.frombuffer(hashlib.sha256(key.encode()).digest()[:16], "<u8")
    bits = np.random.Philox(key=words).random_raw(count) >> np.uint64(11)
    return (bits.astype(np.float64) + 0.5) * 2.0**-53
