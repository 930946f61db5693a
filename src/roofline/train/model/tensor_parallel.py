"""Matrices shared by the ranks of a group, by the split that each family's spec gives: the plan that serving uses.

A column split computes some of the outputs on each rank, a row split some of the inputs, whose products are summed
(Shoeybi et al. 2019). What is around the blocks (embedding, head, norms of the stream) is whole on each rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn import functional

from roofline.common.errors import ConfigError
from roofline.models.config import ModelConfig
from roofline.models.spec import Param
from roofline.ops.matmul import SplitWeight


@dataclass(frozen=True)
class Ranks:
    """This rank among those that share a model's matrices; alone: size 1 and no group."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Part:
    """What a rank holds of a parameter: `ranges` of dimension `dim`, one after the other; all of it if that is None."""

    shape: tuple[int, ...]
    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of the part."""
        if self.dim is None:
            return self.shape
        held = sum(stop - start for start, stop in self.ranges)
        return tuple(held if dim == self.dim else size for dim, size in enumerate(self.shape))

    def cut(self, whole: Tensor) -> Tensor:
        """Cut it out of the whole parameter."""
        if self.dim is None:
            return whole
        return torch.cat([whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges], self.dim)

    def places(self, first: int, rows: int) -> list[tuple[tuple[int, ...], int, int]]:
        """Where rows first..first+rows of the part lie in the whole: (offsets there, first row here, rows)."""
        rest = (0,) * (len(self.shape) - 1)
        if self.dim != 0:
            return [((first, self.ranges[0][0]) if self.dim else (first, *rest), first, rows)]
        found, at = [], 0
        for start, stop in self.ranges:
            low, high = max(first, at), min(first + rows, at + stop - start)
            if low < high:
                found.append(((start + low - at, *rest), low, high - low))
            at += stop - start
        return found


def part(param: Param, ranks: Ranks) -> Part:
    """What this rank holds of a parameter. Raises ConfigError where it does not divide."""
    if ranks.size == 1 or param.split not in ("column", "row"):
        return Part(param.shape)
    dim = 0 if param.split == "column" else 1
    ranges, at = [], 0
    for width in param.parts if dim == 0 and param.parts else (param.shape[dim],):
        if width % ranks.size:
            raise ConfigError(f"tensor_parallel={ranks.size} does not divide the {width} of {param.name}")
        each = width // ranks.size
        ranges.append((at + ranks.rank * each, at + (ranks.rank + 1) * each))
        at += width
    return Part(param.shape, dim, tuple(ranges))


def local_config(cfg: ModelConfig, ranks: Ranks) -> ModelConfig:
    """The shape of a rank's share of a block. Raises ConfigError where heads do not divide."""
    for name in ("heads", "kv_heads", "ffn"):
        if getattr(cfg, name) % ranks.size:
            raise ConfigError(f"tensor_parallel={ranks.size} does not divide {name}={getattr(cfg, name)}")
    return replace(cfg, heads=cfg.heads // ranks.size, kv_heads=cfg.kv_heads // ranks.size, ffn=cfg.ffn // ranks.size)


def used(param: Param, tensor: Tensor, ranks: Ranks) -> Any:
    """A block's parameter as its family is to see it."""
    if ranks.size == 1 or param.split == "replicate":
        return tensor
    if param.split == "shared":
        return _Enter.apply(tensor, ranks.group)
    if len(param.shape) == 1:
        return tensor
    return (Column if param.split == "column" else Row)(tensor, ranks)


class _Enter(torch.autograd.Function):
    """The same on every rank; gradients, to which each rank adds its share, are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return collectives.all_reduce(grads[0].contiguous(), "sum", ctx.group), None


class _Leave(torch.autograd.Function):
    """The sum of what the ranks have; its gradient is that of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return collectives.all_reduce(x.contiguous(), "sum", group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class Column(SplitWeight):
    """Some rows of a weight: x [tokens, in] -> this rank's outputs."""

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(_Enter.apply(x, self.ranks.group), self.tensor, bias)


class Row(SplitWeight):
    """Some columns of a weight: this rank's inputs -> all outputs; the bias is added once."""

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        summed = _Leave.apply(functional.linear(x, self.tensor), self.ranks.group)
        return summed if bias is None else summed + bias


class Pieces(Tensor):
    """A parameter-like tensor of the whole shape of which this rank has pieces: what a distributed checkpoint asks of.

    chunks: (offsets in the whole, a view of what is there).
    """

    chunks: list[tuple[tuple[int, ...], Tensor]]

    @staticmethod
    def __new__(cls, shape: Sequence[int], like: Tensor, chunks: list[tuple[tuple[int, ...], Tensor]]) -> "Pieces":
        made: Any = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=like.dtype, device=like.device)  # type: ignore[attr-defined]
        made.chunks = chunks
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func}: pieces are saved and loaded, nothing is computed with them")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), view.shape) for at, view in self.chunks]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(name, torch.Size(at)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(ChunkStorageMetadata(torch.Size(at), view.shape), properties, self.shape),
            )
            for at, view in self.chunks
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(view for at, view in self.chunks if torch.Size(at) == index.offset)


def pieces(tensor: Tensor, held: Part) -> list[tuple[tuple[int, ...], Tensor]]:
    """(offsets in the whole parameter, a view) of everything this rank has of it, sharded or not."""
    first, local = 0, tensor.detach()
    if isinstance(local, DTensor):
        offsets = compute_local_shape_and_global_offset(local.shape, local.device_mesh, local.placements)[1]
        first, local = offsets[0], local.to_local()
    if not local.numel():
        return []
    if not local.dim():
        return [((), local)]
    return [(at, local[here - first : here - first + rows]) for at, here, rows in held.places(first, len(local))]
