"""Sums whose bits do not depend on the number of processes: a fixed binary tree over the virtual shards of a batch.

In round r, `world` ranks compute the shards r * world to (r + 1) * world - 1, one each. The sum over the ranks of a
round is a subtree, and rounds are added as a binary counter adds. With powers of two, every world gives the same tree.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.train.config.schema import TrainConfig
from roofline.train.model.lockstep import Lockstep

Gradients = list[Tensor | None]  # of a model's parameters


def rounds(virtual: int, rank: int, world: int) -> list[tuple[int, int]]:
    """This rank's shares of a global batch, in order: (index, count) as in `order.share`. Raises ConfigError."""
    if virtual & (virtual - 1) or world & (world - 1) or virtual % world:
        raise ConfigError(
            f"elastic.virtual_shards={virtual} on {world} processes: both must be powers of two, and the second "
            "must divide the first"
        )
    return [(r * world + rank, virtual) for r in range(virtual // world)]


def check(config: TrainConfig) -> None:
    """Raise UnsupportedError for settings whose sums depend on the number of ranks."""
    if config.optimizer.name == "muon":
        reason = "its products of matrices are added up over the ranks that share them"
        raise UnsupportedError("elastic with optimizer.name=muon", reason, ["adamw", "decoupled_adamw"])
    if config.fsdp_config is not None and config.fsdp_config.sharding_strategy == "HYBRID_SHARD":
        reason = "copies are added up by a reduction of the backend"
        raise UnsupportedError("elastic with HYBRID_SHARD", reason, ["FULL_SHARD", "SHARD_GRAD_OP"])


class TreeSum:
    """Adds lists of tensors in a binary tree: two subtrees of one level are added as soon as both exist."""

    def __init__(self) -> None:
        self._subtrees: list[tuple[int, Gradients]] = []  # (level, sum), with falling levels

    def push(self, leaf: Gradients) -> None:
        """Add the next leaf. None stands for tensors without a gradient."""
        level, right = 0, list(leaf)
        while self._subtrees and self._subtrees[-1][0] == level:
            _, earlier = self._subtrees.pop()
            right = [b if a is None else a if b is None else a + b for a, b in zip(earlier, right, strict=True)]
            level += 1
        self._subtrees.append((level, right))

    def total(self) -> Gradients:
        """The sum of all leaves, whose number must be a power of two."""
        assert len(self._subtrees) == 1, "the number of leaves is no power of two"
        return self._subtrees[0][1]


class TreeReduceScatter(DefaultAllocMixin, ReduceScatter):
    """A reduce-scatter for FSDP2 that adds the ranks in a binary tree; gloo and NCCL add in orders of their own."""

    def __init__(self, lockstep: Lockstep) -> None:
        self.lockstep = lockstep

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> dist.Work | None:
        world = dist.get_world_size(group)
        received = torch.empty_like(input_tensor)

        def exchange() -> None:
            dist.all_to_all_single(received, input_tensor, group=group)

        def substitute() -> None:
            received.zero_()

        self.lockstep.call(exchange, substitute)
        parts = list(received.view(world, -1).unbind())
        while len(parts) > 1:
            parts = [a + b for a, b in zip(parts[0::2], parts[1::2], strict=True)]
        output_tensor.copy_(parts[0].view_as(output_tensor))
        return None
