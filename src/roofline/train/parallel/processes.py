"""The processes of a run: who they are, what they agree on, and how a model is sharded over them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from roofline.common import env
from roofline.common.errors import ConfigError
from roofline.train.config.schema import FsdpSection, TrainConfig
from roofline.train.model.modules import Model
from roofline.train.model.tensor_parallel import Ranks
from roofline.train.parallel.elastic import TreeReduceScatter


class OutOfMemory(Exception):
    """Some rank's memory ended in a microbatch; all ranks know."""


@dataclass
class World:
    """This process among those of its run; alone it needs no process group.

    local_rank: among those of its host. tensor: those that share its matrices, and its rows; they stand side by side.
    mesh: of all ranks, where there is a group (grouped), which this run has made (owner) or found.
    watching: before each of FSDP's collectives the ranks ask each other whether one of them has failed, which otherwise
        would leave the rest waiting in it.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    grouped: bool = False
    owner: bool = False
    tensor: Ranks = field(default_factory=Ranks)
    mesh: Any = None
    watching: bool = False

    def agree(self, failed: bool = False) -> None:
        """Raises OutOfMemory on every rank when one has failed."""
        if self.watching and self.most([failed])[0]:
            raise OutOfMemory("on another rank")

    @property
    def data_rank(self) -> int:
        """Which share of a batch this rank computes."""
        return self.rank // self.tensor.size

    @property
    def data_size(self) -> int:
        """How many shares there are."""
        return self.size // self.tensor.size

    def sum(self, values: Sequence[float]) -> list[float]:
        """Over all shares of a batch, in float64."""
        return [value / self.tensor.size for value in self._reduced(values, dist.ReduceOp.SUM)]

    def most(self, values: Sequence[float]) -> list[float]:
        """The greatest of all ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Those of every share of a batch, in float64; as many of each."""
        if not self.grouped:
            return [list(values)]
        mine = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine)
        return [each.tolist() for each in found[:: self.tensor.size]]

    def wrapped_sum(self, value: int) -> int:
        """Over all ranks, modulo 2^64."""
        value %= 1 << 64
        if not self.grouped:
            return value
        both = torch.tensor([value - (1 << 64) if value >> 63 else value], dtype=torch.int64, device=self.device)
        dist.all_reduce(both)
        return int(both) % (1 << 64)

    def share(self, value: Any) -> Any:
        """What rank 0 has, as plain data."""
        if not self.grouped:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def barrier(self) -> None:
        """Wait for all."""
        if self.grouped:
            dist.barrier()

    def _reduced(self, values: Sequence[float], op: Any) -> list[float]:
        if not self.grouped:
            return [float(value) for value in values]
        both = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(both, op)
        return both.tolist()


def join(config: TrainConfig) -> World:
    """This process's place, from the variables that torchrun sets; the process group where it needs one.

    A group that is there already, as Ray Train makes one, is joined and left standing.
    """
    rank, size, local = (int(env.foreign(name) or fallback) for name, fallback in _PLACE)
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    found = torch.accelerator.is_available() and config.device != "cpu"
    if config.device == "gpu" and not found:
        raise ConfigError("device=gpu: torch finds no accelerator here")
    chip = torch.accelerator.current_accelerator() if found else None
    device = torch.device(chip.type, local) if chip is not None else torch.device("cpu")
    if chip is not None:
        torch.accelerator.set_device_index(local)
    world = World(rank, size, local, device)
    if size > 1 or config.elastic is not None or config.fsdp_config is not None:
        if dist.is_initialized():
            world.grouped = True
        else:
            _start_group(world)
        _lay_out(world, config)
    elif config.tensor_parallel > 1:
        raise ConfigError(f"tensor_parallel={config.tensor_parallel} on one process: start more of them")
    return world


def leave(world: World) -> None:
    """End the process group, if it is this run's."""
    if world.owner:
        dist.destroy_process_group()
    world.grouped = world.owner = False


def shard(model: Model, world: World, config: TrainConfig) -> None:
    """FSDP2 over the blocks and what is around them."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    section = config.fsdp_config or FsdpSection()
    kind = world.device.type
    mesh = world.mesh["replicate", "shard"] if "replicate" in world.mesh.mesh_dim_names else world.mesh["shard"]
    compute = COMPUTE[config.precision] if section.mixed_precision != "FULL" else None
    pure = section.mixed_precision == "PURE" and config.elastic is None  # a tree of 16 bits has another root
    reduce = compute if pure else torch.float32
    # Inputs are left alone: the residual stream stays float32, as without sharding.
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    again = section.sharding_strategy != "SHARD_GRAD_OP"
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    modules: list[Any] = [model, *model.blocks]
    for module in modules:
        module.set_gradient_divide_factor(1.0)  # losses carry their weights: gradients are summed
        if kind == "cpu":
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
        scatter = TreeReduceScatter() if config.elastic is not None else None
        if scatter is not None:
            module.set_custom_reduce_scatter(scatter)
        if config.device_train_microbatch_size == "auto":
            module.set_custom_all_gather(_AgreedAllGather(world))
            module.set_custom_reduce_scatter(_AgreedReduceScatter(world, scatter))


# New names of torch 2.13, which says so on every use of the old ones.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Agreed:
    """A collective of FSDP's that begins by asking whether all ranks are still there."""

    def __init__(self, world: World, inner: Any = None) -> None:
        self.world, self.inner = world, inner

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AgreedAllGather(_Agreed, AllGather):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        self.world.agree()
        work: dist.Work | None = _GATHER(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class _AgreedReduceScatter(_Agreed, ReduceScatter):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self.world.agree()
        if self.inner is not None:
            found: dist.Work | None = self.inner(output_tensor, input_tensor, group, op, async_op)
            return found
        work: dist.Work | None = _SCATTER(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return work


def reshard(model: Model, world: World) -> None:
    """Give whole parameters back after a forward pass without a backward: until then the model's are not its shards."""
    modules: list[Any] = [model, *model.blocks] if world.grouped else []
    for module in modules:
        module.reshard()


def _lay_out(world: World, config: TrainConfig) -> None:
    """The mesh of all ranks: copies, shards, and within those the ranks that share matrices. Raises ConfigError."""
    from torch.distributed.device_mesh import init_device_mesh

    tensor = config.tensor_parallel
    if world.size % tensor:
        raise ConfigError(f"tensor_parallel={tensor} does not divide {world.size} processes")
    shards, section = world.size // tensor, config.fsdp_config or FsdpSection()
    names, sizes = ["shard", "tensor"], [shards, tensor]
    if section.sharding_strategy == "HYBRID_SHARD":
        if config.elastic is not None:
            raise ConfigError("elastic runs shard fully: fsdp_config.sharding_strategy must not be HYBRID_SHARD")
        group = section.hybrid_group or int(env.foreign("LOCAL_WORLD_SIZE") or world.size) // tensor
        if group < 1 or shards % group:
            raise ConfigError(f"fsdp_config.hybrid_group: {group} does not divide {shards} ranks")
        names, sizes = ["replicate", *names], [shards // group, group, tensor]
    if config.elastic is not None and tensor > 1:
        raise ConfigError("elastic runs share no matrices: sums over their parts would depend on their number")
    world.mesh = init_device_mesh(world.device.type, tuple(sizes), mesh_dim_names=tuple(names))
    if tensor > 1:
        world.tensor = Ranks(world.rank % tensor, tensor, world.mesh["tensor"].get_group())


COMPUTE = {"fp32": None, "amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}
_PLACE = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))


def _start_group(world: World) -> None:
    kind = world.device.type
    backend = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:nccl"
    if env.foreign("MASTER_ADDR"):
        dist.init_process_group(backend, rank=world.rank, world_size=world.size)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    world.grouped = world.owner = True
