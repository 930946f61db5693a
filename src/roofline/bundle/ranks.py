"""A model on several ranks of this machine: rank 0 in this process, each other in one that reads its own share.

Copies of a model (data parallel) need nothing of this: see bundle/replicas.py.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from roofline.backends import table
from roofline.backends.backend import LoadRequest, Notes, ServesRanks
from roofline.backends.capacity import Capacity
from roofline.backends.options import LoadOptions
from roofline.backends.parallel.ranks import PATIENCE, RankError, RankGrid, Ranks
from roofline.bundle.sources import open_checkpoint
from roofline.common.errors import UnsupportedError
from roofline.ops.batch import BatchLimits

if TYPE_CHECKING:
    from torch.distributed import Store

    from roofline.backends.parallel.executable import ParallelExecutable


@dataclass(frozen=True)
class RankPlace:
    """Which rank a process is, the file of the store where ranks meet, and the process of rank 0; see `run_rank`."""

    rank: int
    file: int
    parent: int


@dataclass(frozen=True)
class RankTask:
    """What ranks other than 0 are told; it crosses to their processes as JSON. patience: longest wait for a stuck rank,
    in seconds."""

    source: str
    options: LoadOptions
    capacity: Capacity
    patience: float = PATIENCE

    def to_values(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self) | {"options": self.options.changes()}

    @classmethod
    def from_json(cls, text: str) -> "tuple[RankTask, RankPlace]":
        """(task, place) of what `launch.Launched` made of the values."""
        values = json.loads(text)
        sizes = values["capacity"]
        capacity = Capacity(**{**sizes, "limits": BatchLimits(**sizes["limits"])})
        options = LoadOptions(**values["options"])
        place = RankPlace(values["rank"], values["file"], values["parent"])
        return cls(values["source"], options, capacity, values["patience"]), place


def require_ranks(backend: object, options: LoadOptions) -> ServesRanks:
    """The backend, as one that serves several ranks. Raises UnsupportedError where it does not."""
    if not isinstance(backend, ServesRanks):
        what = f"{options.ranks} ranks with backend {options.backend!r}"
        raise UnsupportedError(what, "it runs a model in one process", ("tensor_parallel=1",))
    return backend


def start_ranks(source: str, request: LoadRequest, patience: float = PATIENCE) -> "tuple[ParallelExecutable, Notes]":
    """Start the other ranks and load this one's share; with notes of what was chosen here.

    source: where the other processes find the model of the request.

    Raises:
        CapacityError: more ranks, or stages, than the model has parts, or the host devices.
        RankError: a rank could not load; it says which, and why.
    """
    from roofline.backends.parallel.executable import ParallelExecutable
    from roofline.backends.parallel.launch import JOIN_SECONDS, Launched

    options, grid = request.options, _grid(request.options)
    backend = require_ranks(table.get(options.backend), options)
    backend.check_share(request, grid.share(grid.size - 1))
    device = backend.rank_device(options, 0)
    launched = Launched(grid.size, __name__, RankTask(source, options, request.capacity, patience).to_values())
    ranks = None
    try:
        launched.wait("here", JOIN_SECONDS)
        ranks = Ranks(0, grid, launched.store, patience, device, launched.lost)
        inner, notes = backend.make_share(request, ranks)
        executable = ParallelExecutable(inner, ranks, vocab_size=request.config.vocab, watch=launched)
        launched.wait("ready")
    except BaseException as error:
        reason = launched.reason() if isinstance(error, RankError) else None
        launched.close(0.0)
        if ranks is not None:
            ranks.close()
        if reason is not None:
            raise RankError(reason) from error
        raise
    parts = f"{grid.size}: stages of layers {grid.pipeline}, parts of each layer {grid.tensor}"
    return executable, {**notes, "ranks": parts}


def _grid(options: LoadOptions) -> RankGrid:
    return RankGrid(options.tensor_parallel, options.pipeline_parallel)


def main(argument: str) -> int:
    """One of the other ranks, from start to end; its exit status."""
    from roofline.backends.parallel.launch import run_rank
    from roofline.common.processes import end_now

    task, place = RankTask.from_json(argument)
    status = run_rank(place.rank, place.file, place.parent, lambda store, tell: _follow(task, place.rank, store, tell))
    if status:
        end_now(status)
    return status


def _follow(task: RankTask, rank: int, store: "Store", tell: Callable[[str], None]) -> None:
    from roofline.backends.parallel.executable import follow
    from roofline.models.registry import config_of

    options = task.options
    backend = require_ranks(table.get(options.backend), options)
    checkpoint = open_checkpoint(task.source, options)
    config = config_of(checkpoint.config)
    device = backend.rank_device(options, rank)
    tell("here")
    ranks = Ranks(rank, _grid(options), store, task.patience, device)
    inner, _ = backend.make_share(LoadRequest(checkpoint, config, options, task.capacity), ranks)
    tell("ready")
    follow(inner, ranks)
    ranks.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
