"""Tensor parallelism: matrices divided over the ranks of a group by the splits in each family's spec, as in serving.

With a column split each rank computes some of the outputs. With a row split it multiplies some of the inputs, and the
ranks' products are summed (Shoeybi et al. 2019). Embedding, head and the last norm are not divided.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn import functional

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.models.config import ModelConfig
from roofline.models.spec import WHOLE_IN_TRAINING, Param
from roofline.ops.own_weight import OwnWeight
from roofline.train.model.autograd import AutogradContext
from roofline.train.model.lockstep import Lockstep


@dataclass(frozen=True)
class TensorRanks:
    """This rank among those that share a model's matrices; by default it is alone, without a group.

    lockstep: counts the sums over the group.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    lockstep: Lockstep = field(default_factory=Lockstep, compare=False)

    def sum(self, x: Tensor, per_token: bool = True) -> Tensor:
        """The sum of x over the ranks. per_token: its rows are those of tokens."""
        if torch.compiler.is_compiling():
            return _sum(x, self.group)
        tokens = self.lockstep.tokens
        if tokens is None:
            return self.lockstep.call(lambda: _sum(x, self.group), lambda: x)
        shape = (tokens, *x.shape[1:]) if per_token else x.shape
        self.lockstep.call(lambda: collectives.wait_tensor(_sum(x.new_zeros(shape), self.group)), lambda: x)
        return x


@dataclass(frozen=True)
class ParameterPart:
    """The part of a parameter that a rank has: `ranges` of dimension `dim`, concatenated; everything if dim is None."""

    shape: tuple[int, ...]
    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of the part."""
        if self.dim is None:
            return self.shape
        length = sum(stop - start for start, stop in self.ranges)
        return tuple(length if dim == self.dim else size for dim, size in enumerate(self.shape))

    def cut(self, parameter: Tensor) -> Tensor:
        """The part of a full parameter."""
        if self.dim is None:
            return parameter
        return torch.cat([parameter.narrow(self.dim, start, stop - start) for start, stop in self.ranges], self.dim)

    def places(self, first: int, rows: int) -> list[tuple[tuple[int, ...], int, int]]:
        """Where rows first..first+rows of the part lie in the full parameter: (offsets there, first row here, rows)."""
        later_dims = (0,) * (len(self.shape) - 1)
        if self.dim != 0:
            return [((first, self.ranges[0][0]) if self.dim else (first, *later_dims), first, rows)]
        places, at = [], 0
        for start, stop in self.ranges:
            low, high = max(first, at), min(first + rows, at + stop - start)
            if low < high:
                places.append(((start + low - at, *later_dims), low, high - low))
            at += stop - start
        return places


def part(param: Param, ranks: TensorRanks) -> ParameterPart:
    """The part of a parameter that this rank has. Raises ConfigError if the ranks do not divide it."""
    if ranks.size == 1 or param.split not in ("column", "row"):
        return ParameterPart(param.shape)
    dim = 0 if param.split == "column" else 1
    ranges, at = [], 0
    for width in param.parts if dim == 0 and param.parts else (param.shape[dim],):
        if width % ranks.size:
            raise ConfigError(f"tensor_parallel={ranks.size} does not divide the {width} of {param.name}")
        columns = width // ranks.size
        ranges.append((at + ranks.rank * columns, at + (ranks.rank + 1) * columns))
        at += width
    return ParameterPart(param.shape, dim, tuple(ranges))


def local_config(cfg: ModelConfig, ranks: TensorRanks) -> ModelConfig:
    """The shape of a rank's share of a block. Raises ConfigError if the ranks do not divide heads or ffn,
    UnsupportedError for layers with recurrent state or of several sizes."""
    if ranks.size > 1 and cfg.state_parts:
        reason = "layers that keep recurrent state are trained whole on each rank"
        raise UnsupportedError(f"tensor_parallel={ranks.size} of a {cfg.family} model", reason, ("fsdp",))
    if ranks.size > 1 and hasattr(cfg, "kv_rank"):
        reason = "attention over compressed rows, parts of which all heads share, is trained whole on each rank"
        raise UnsupportedError(f"tensor_parallel={ranks.size} of a {cfg.family} model", reason, ("fsdp",))
    sizes = cfg.layers_by(lambda n: (cfg.kv_shape(n), cfg.heads_of(n), cfg.ffn_of(n), cfg.kv_source(n) == n))
    if ranks.size > 1 and len(sizes) > 1:
        reason = "layers of several sizes are trained whole on each rank"
        raise UnsupportedError(f"tensor_parallel={ranks.size} of a {cfg.family} model", reason, ("fsdp",))
    for name in ("heads", "kv_heads", "ffn"):
        if getattr(cfg, name) % ranks.size:
            raise ConfigError(f"tensor_parallel={ranks.size} does not divide {name}={getattr(cfg, name)}")
    return replace(cfg, heads=cfg.heads // ranks.size, kv_heads=cfg.kv_heads // ranks.size, ffn=cfg.ffn // ranks.size)


def family_form(param: Param, tensor: Tensor, ranks: TensorRanks) -> Tensor | OwnWeight:
    """A block's parameter in the form in which its family uses it."""
    if ranks.size == 1 or param.split in WHOLE_IN_TRAINING:
        return tensor
    if param.split == "shared":
        shared: Tensor = _Enter.apply(tensor, ranks, False)
        return shared
    if len(param.shape) == 1:
        return tensor
    return (Column if param.split == "column" else RowSplitWeight)(tensor, ranks)


def _sum(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    assert group is not None
    return collectives.all_reduce(x.contiguous(), "sum", group)


class _Enter(torch.autograd.Function):
    """Identity whose backward pass sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, ranks: TensorRanks, per_token: bool) -> Tensor:
        ctx.ranks, ctx.per_token = ranks, per_token
        return x.view_as(x)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ranks.sum(grads[0], ctx.per_token), None, None


class _Leave(torch.autograd.Function):
    """The sum over all ranks; each rank gets its gradient unchanged."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, ranks: TensorRanks) -> Tensor:
        return ranks.sum(x)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


@dataclass(frozen=True, eq=False)
class _SplitWeight(OwnWeight):
    """A weight of which this rank has a part."""

    tensor: Tensor
    ranks: TensorRanks


class Column(_SplitWeight):
    """Some rows of a weight: computes this rank's outputs from x [tokens, in]."""

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(_Enter.apply(x, self.ranks, True), self.tensor, bias)


class RowSplitWeight(_SplitWeight):
    """Some columns of a weight: computes all outputs from this rank's inputs; the bias is added once."""

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        summed = _Leave.apply(functional.linear(x, self.tensor), self.ranks)
        return summed if bias is None else summed + bias


@dataclass(frozen=True)
class TensorPieces:
    """What this rank has of a full tensor, in the form that a checkpoint takes.

    chunks: (offsets in the full tensor, a view). copy: the number of this rank among the `copies` that have the same.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Sequence[tuple[tuple[int, ...], Tensor]]
    copy: int
    copies: int

    @classmethod
    def of(cls, tensor: Tensor, copy: int = 0, copies: int = 1) -> "TensorPieces":
        """A full tensor as one piece."""
        return cls(tuple(tensor.shape), tensor.dtype, pieces(tensor, ParameterPart(tuple(tensor.shape))), copy, copies)


def pieces(tensor: Tensor, part: ParameterPart) -> list[tuple[tuple[int, ...], Tensor]]:
    """(offsets in the full parameter, a view) of everything this rank has of it, sharded or not."""
    first, local = 0, tensor.detach()
    if isinstance(local, DTensor):
        offsets = compute_local_shape_and_global_offset(local.shape, local.device_mesh, local.placements)[1]
        first, local = offsets[0], local.to_local()
    if not local.numel():
        return []
    if not local.dim():
        return [((), local)]
    return [(at, local[here - first : here - first + rows]) for at, here, rows in part.places(first, len(local))]
