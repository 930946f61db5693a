"""Sums that do not depend on how many processes take part: a fixed binary tree over fixed virtual shards of a batch.

Round r of a run on `world` ranks computes the shards r * world to (r + 1) * world - 1, one a rank. The ranks' sum of a
round is a subtree, and rounds are added as a binary counter adds: with powers of two that is one tree for every world.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.train.config.schema import TrainConfig


def rounds(virtual: int, rank: int, world: int) -> list[tuple[int, int]]:
    """This rank's shares of a global batch, in order, as `order.share` takes them. Raises ConfigError."""
    if virtual & (virtual - 1) or world & (world - 1) or virtual % world:
        raise ConfigError(
            f"elastic.virtual_shards={virtual} on {world} processes: both must be powers of two, and the second "
            "must divide the first"
        )
    return [(r * world + rank, virtual) for r in range(virtual // world)]


def check(config: TrainConfig) -> None:
    """Raises UnsupportedError for what adds in an order that depends on the ranks."""
    if config.optimizer.name == "muon":
        reason = "its products of matrices are added up over the ranks that share them"
        raise UnsupportedError("elastic with optimizer.name=muon", reason, ["adamw", "decoupled_adamw"])
    if config.fsdp_config is not None and config.fsdp_config.sharding_strategy == "HYBRID_SHARD":
        reason = "copies are added up by a reduction of the backend"
        raise UnsupportedError("elastic with HYBRID_SHARD", reason, ["FULL_SHARD", "SHARD_GRAD_OP"])


class TreeSum:
    """Lists of tensors, added pair by pair: equal subtrees as soon as there are two."""

    def __init__(self) -> None:
        self._held: list[tuple[int, list[Any]]] = []  # level, sum; levels fall

    def push(self, leaf: Sequence[Any]) -> None:
        """The next leaf. None stands for tensors that got no gradient."""
        level, right = 0, list(leaf)
        while self._held and self._held[-1][0] == level:
            _, left = self._held.pop()
            right = [b if a is None else a if b is None else a + b for a, b in zip(left, right, strict=True)]
            level += 1
        self._held.append((level, right))

    def total(self) -> list[Any]:
        """The sum of all leaves, whose number is a power of two."""
        assert len(self._held) == 1, "the number of leaves is no power of two"
        return self._held[0][1]


class TreeReduceScatter(ReduceScatter):
    """FSDP2's reduce-scatter as an exchange and a tree over the ranks: gloo and NCCL add in orders of their own."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        world = dist.get_world_size(group)
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        parts = list(received.view(world, -1).unbind())
        while len(parts) > 1:
            parts = [a + b for a, b in zip(parts[0::2], parts[1::2], strict=True)]
        output_tensor.copy_(parts[0].view_as(output_tensor))
        return None
