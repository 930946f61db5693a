"""The processes of a run: their ranks, the collectives between them, and the sharding of a model over them."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultAllocMixin,
    DefaultReduceScatter,
)

from roofline.common import env
from roofline.common.errors import ConfigError, RooflineError, SaidElsewhere
from roofline.common.loopback import LOOPBACK, gloo_on_loopback
from roofline.train.config.schema import FsdpSection, TrainConfig
from roofline.train.model.lockstep import Lockstep
from roofline.train.model.modules import Model
from roofline.train.model.tensor_parallel import TensorRanks
from roofline.train.parallel import alike
from roofline.train.parallel.elastic import TreeReduceScatter
from roofline.train.parallel.meeting import Meeting
from roofline.train.parallel.placement import ProcessPlacement

T = TypeVar("T")
COMPUTE = {"fp32": None, "amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}


class OutOfMemory(Exception):
    """Memory ran out on some rank during a step; it is raised on all ranks."""


@dataclass
class World:
    """This process among those of its run; a single process needs no process group.

    tensor: the neighbouring ranks that share its matrices and its rows.
    grouped: there is a process group. owner: this run has created it. mesh: of all ranks, if grouped.
    watching: the ranks tell each other after each microbatch whether one has failed, not only after each step.
    lockstep: counts the collectives of a microbatch.
    local_size: how many ranks this machine has, where a launcher says so.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    grouped: bool = False
    owner: bool = False
    tensor: TensorRanks = field(default_factory=TensorRanks)
    mesh: DeviceMesh | None = None
    meeting: Meeting | None = None  # where the ranks of a group of ours came together
    watching: bool = False
    lockstep: Lockstep = field(default_factory=Lockstep)
    local_size: int | None = None

    def agree(self, failed: bool = False) -> None:
        """Raise OutOfMemory on every rank if one has failed."""
        if self.watching and self.most([failed])[0]:
            raise OutOfMemory

    @property
    def data_rank(self) -> int:
        """The index of the share of a batch that this rank computes."""
        return self.rank // self.tensor.size

    @property
    def data_size(self) -> int:
        """The number of shares of a batch."""
        return self.size // self.tensor.size

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all shares of a batch, in float64."""
        return [value / self.tensor.size for value in self._reduce(values, dist.ReduceOp.SUM)]

    def most(self, values: Sequence[float]) -> list[float]:
        """The maxima over all ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The values of every share of a batch, in float64; each rank gives equally many."""
        return self.gather_ranks(values)[:: self.tensor.size]

    def gather_ranks(self, values: Sequence[float]) -> list[list[float]]:
        """The values of every rank, in float64; each rank gives equally many."""
        if not self.grouped:
            return [list(values)]
        mine = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine)
        return [each.tolist() for each in every]

    def wrapped_sum(self, value: int) -> int:
        """The sum over all ranks, modulo 2^64."""
        value %= 1 << 64
        if not self.grouped:
            return value
        total = torch.tensor([value - (1 << 64) if value >> 63 else value], dtype=torch.int64, device=self.device)
        dist.all_reduce(total)
        return int(total) % (1 << 64)

    def share(self, value: T) -> T:
        """Rank 0's value, which is plain data."""
        if not self.grouped:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def raise_together(self, error: RooflineError | None) -> None:
        """Raise rank 0's error, if it has one, on all ranks; a user sees it once."""
        error = self.share(error)
        if error is not None:
            raise error if self.rank == 0 else SaidElsewhere(str(error))

    def first(self, act: Callable[[], T]) -> T | None:
        """What `act` gives on rank 0, None elsewhere; its RooflineError is raised on all ranks."""
        result: T | None = None
        error: RooflineError | None = None
        if self.rank == 0:
            try:
                result = act()
            except RooflineError as caught:
                error = caught
        self.raise_together(error)
        return result

    def collect(self, value: T) -> list[T]:
        """The values of all ranks on rank 0, plain data or tensors on the CPU; elsewhere nothing."""
        if not self.grouped:
            return [value]
        values: list[T] | None = [value] * self.size if self.rank == 0 else None
        dist.gather_object(value, values)
        return values or []

    def every(self, value: T) -> list[T]:
        """The values of all ranks, plain data."""
        values = [value] * self.size
        if self.grouped:
            dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.grouped:
            dist.barrier()

    def _reduce(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        if not self.grouped:
            return [float(value) for value in values]
        reduced = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(reduced, op)
        return reduced.tolist()


def join(config: TrainConfig, store: Path | None = None) -> World:
    """This process's World from torchrun's environment variables, with a process group if one is needed.

    An existing group, such as Ray Train's, is used and not destroyed. store: a file through which the processes find
    each other, instead of MASTER_ADDR. Raises ConfigError where a variable says what cannot be, and, on all of them,
    where their configurations differ.
    """
    group = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
    place = ProcessPlacement.from_environment(group)
    accelerated = torch.accelerator.is_available() and config.device != "cpu"
    if config.device == "gpu" and not accelerated:
        raise ConfigError("device=gpu: torch finds no accelerator here")
    chip = torch.accelerator.current_accelerator() if accelerated else None
    device = torch.device(chip.type, place.local_rank) if chip is not None else torch.device("cpu")
    if chip is not None:
        torch.accelerator.set_device_index(place.local_rank)
    world = World(place.rank, place.size, device, local_size=place.local_size)
    if world.size > 1 or config.elastic is not None or config.fsdp_config is not None:
        if dist.is_initialized():
            world.grouped = True
        else:
            _start_group(world, store, timedelta(seconds=config.dist_timeout))
        try:
            if world.size > 1:
                alike.check(world, alike.of_code(), alike.SAME_CODE)
                alike.check(world, alike.of_config(config, device), alike.SAME_FILE)
            _lay_out(world, config)
        except RooflineError:
            leave(world)
            raise
    elif config.tensor_parallel > 1:
        raise ConfigError(f"tensor_parallel={config.tensor_parallel} on one process: start more of them")
    return world


def leave(world: World) -> None:
    """Destroy the process group if this run has created it, and end its threads if nothing else uses it.

    A thread of gloo that releases a tensor while the interpreter ends aborts the process ("terminate called without
    an active exception"). They end with the last reference to the group: torch's caches keep the mesh, which keeps
    the group, and FSDP's states are cycles.
    """
    if world.owner:
        dist.destroy_process_group()
        if world.mesh is not None:
            world.mesh._pg_registry.clear()
        gc.collect()
    world.grouped = world.owner = False
    world.mesh, world.tensor = None, TensorRanks()


def shard(model: Model, world: World, config: TrainConfig) -> None:
    """Shard the blocks, and the rest of the model, by FSDP2."""
    assert world.mesh is not None
    section = config.fsdp_config or FsdpSection()
    kind = world.device.type
    hybrid = section.sharding_strategy == "HYBRID_SHARD"
    mesh = world.mesh["replicate", "shard"] if hybrid else world.mesh["shard"]
    compute = COMPUTE[config.precision] if section.mixed_precision != "FULL" else None
    pure = section.mixed_precision == "PURE" and config.elastic is None  # a sum in 16 bits depends on the tree
    reduce = compute if pure else torch.float32
    # Inputs are not cast: the residual stream stays float32, as without sharding.
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    reshard_blocks = section.sharding_strategy != "SHARD_GRAD_OP"
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_blocks)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in _fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)  # losses are weighted already, so gradients are summed
        if kind == "cpu":
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
        auto = config.device_train_microbatch_size == "auto"
        if config.elastic is not None:
            module.set_custom_reduce_scatter(TreeReduceScatter(world.lockstep))
        elif auto:
            module.set_custom_reduce_scatter(_Counted(world.lockstep, DefaultReduceScatter()))
        if auto:
            module.set_custom_all_gather(_Counted(world.lockstep, DefaultAllGather()))
        if auto and hybrid:
            module.set_all_reduce_hook(partial(_count_sum, world.lockstep, id(module)))


class _Counted(DefaultAllocMixin, AllGather, ReduceScatter):
    """A collective of FSDP that is counted. Where this rank has been in it already, its result is zeros."""

    def __init__(self, lockstep: Lockstep, collective: Callable[..., dist.Work | None]) -> None:
        self.lockstep, self.collective = lockstep, collective

    def __call__(self, output_tensor: torch.Tensor, *tensors: object, **options: object) -> dist.Work | None:
        def substitute() -> None:
            output_tensor.zero_()

        return self.lockstep.call(lambda: self.collective(output_tensor, *tensors, **options), substitute)


def _count_sum(lockstep: Lockstep, module: int, _: torch.Tensor) -> None:
    """Note that a module's gradients have been summed over the copies of the model."""
    lockstep.summed.add(module)


@contextmanager
def follow(model: Model, world: World, tokens: int, joins: bool) -> Iterator[None]:
    """A context in which a rank without memory computes a short row in place of a microbatch, in step with the others.

    tokens: of the microbatch. joins: this rank has been in some of the microbatch's collectives, which are left out.
    """
    lockstep = world.lockstep
    summed = set(lockstep.summed) if joins else set[int]()
    lockstep.begin(lockstep.count if joins else 0, tokens)
    modules = _fsdp_modules(model)
    for module in modules:
        module.set_requires_all_reduce(id(module) not in summed, recurse=False)
    try:
        yield
    finally:
        lockstep.begin()
        for module in modules:
            module.set_requires_all_reduce(True, recurse=False)


def fsdp(model: Model) -> FSDPModule:
    """A sharded model with the methods that FSDP2 has added to it."""
    return cast(FSDPModule, model)


def _fsdp_modules(model: Model) -> list[FSDPModule]:
    return [cast(FSDPModule, module) for module in (model, *model.blocks)]


def forget_step(model: Model) -> None:
    """Bring a sharded model to where a step begins, after one that was given up: no gradient of it is left.

    FSDP2's `reset_iter_state` leaves what was accumulated while gradients were not synchronised, which the step that is
    begun again would count a second time.
    """
    if fsdp(model)._get_fsdp_state()._is_root is not None:  # else no forward pass has begun yet
        fsdp(model).reset_iter_state()  # type: ignore[attr-defined]
    for module in _fsdp_modules(model):
        for group in module._get_fsdp_state()._fsdp_param_groups:  # type: ignore[attr-defined]
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):  # not before the first all-gather
                    parameter._unsharded_param.grad = None
    model.zero_grad(set_to_none=True)


def reshard(model: Model, world: World) -> None:
    """Free gathered parameters after a forward pass without a backward pass, which would free them."""
    for module in _fsdp_modules(model) if world.grouped else ():
        module.reshard()


def _lay_out(world: World, config: TrainConfig) -> None:
    """Set the mesh of all ranks: copies, shards, and inside those the ranks that share matrices. Raises ConfigError."""
    tensor = config.tensor_parallel
    if world.size % tensor:
        raise ConfigError(f"tensor_parallel={tensor} does not divide {world.size} processes")
    shards, section = world.size // tensor, config.fsdp_config or FsdpSection()
    names, sizes = ["shard", "tensor"], [shards, tensor]
    if section.sharding_strategy == "HYBRID_SHARD":
        if config.elastic is not None:
            raise ConfigError("elastic runs shard fully: fsdp_config.sharding_strategy must not be HYBRID_SHARD")
        group = section.hybrid_group or (world.local_size or world.size) // tensor
        if group < 1 or shards % group:
            raise ConfigError(f"fsdp_config.hybrid_group: {group} does not divide {shards} ranks")
        names, sizes = ["replicate", *names], [shards // group, group, tensor]
    if config.elastic is not None and tensor > 1:
        raise ConfigError("elastic runs share no matrices: sums over their parts would depend on their number")
    with _sockets(world):
        world.mesh = init_device_mesh(world.device.type, tuple(sizes), mesh_dim_names=tuple(names))
    if tensor > 1:
        world.lockstep.is_complete = config.compile_config is None
        world.tensor = TensorRanks(world.rank % tensor, tensor, world.mesh["tensor"].get_group(), world.lockstep)


def _start_group(world: World, store: Path | None, timeout: timedelta) -> None:
    kind = world.device.type
    backend = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:nccl"
    meeting = Meeting(world.rank, world.size, timeout.total_seconds(), store)
    meeting.join()
    with _sockets(world):
        dist.init_process_group(
            backend,
            timeout=timeout,
            store=dist.PrefixStore("default_pg", meeting.store),
            rank=world.rank,
            world_size=world.size,
        )
    world.grouped, world.owner, world.meeting = True, True, meeting


def _sockets(world: World) -> AbstractContextManager[None]:
    """A context in which groups listen on the loopback interface alone, where all ranks are on this machine."""
    here = (world.local_size or 1) >= world.size
    return gloo_on_loopback() if here or env.foreign("MASTER_ADDR") in LOOPBACK else nullcontext()
