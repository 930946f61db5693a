"""Allocates what a GpuExecutable holds besides weights: rope tables, pages of the KV cache, scratch for one launch."""

from typing import TYPE_CHECKING

import numpy as np

from roofline.backends.gpu.memory.weights import DeviceWeights
from roofline.backends.gpu.runtime.matmul import Products
from roofline.backends.gpu.runtime.step import dtypes
from roofline.common.errors import UnsupportedError
from roofline.ops.batch import PAGE_TOKENS
from roofline.ops.rope_tables import RopeTable, cos_sin
from roofline.program.ir import KvGroup, Program

if TYPE_CHECKING:
    from torch import Tensor


def turns(table: RopeTable, positions: int, device: str) -> "tuple[Tensor, Tensor]":
    """cos and sin of a rope table, float32 [positions, dim / 2]."""
    import torch

    cos, sin = cos_sin(table, np.arange(positions))
    return torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)


def cache(group: KvGroup, pages: int, device: str) -> "tuple[Tensor, Tensor]":
    """k, v [layers, pages + 1, kv_heads, 16, head_dim]; the last page is for rows that are nobody's.

    Raises UnsupportedError for a format that no kernel reads.
    """
    import torch

    if group.format not in dtypes():
        raise UnsupportedError(f"a cache of {group.format!r} on a GPU", "its kernels do not read it", ("bf16", "fp8"))
    shape = (group.layers, pages + 1, group.kv_heads, PAGE_TOKENS, group.head_dim)
    k, v = (torch.empty(shape, dtype=dtypes()[group.format], device=device) for _ in range(2))
    return k, v


def scratch_bytes(program: Program, weights: DeviceWeights, products: Products, tokens: int) -> int:
    """The most that one launch of a step of up to so many tokens may want: products, attention's partial results."""
    from roofline.backends.gpu.kernels.attend_launches import workspace_limit

    most = max(products.scratch_bytes(parts, tokens) for parts in weights.shapes())
    return max(most, *(4 * workspace_limit(group.head_dim) for group in program.kv_groups.values()))
