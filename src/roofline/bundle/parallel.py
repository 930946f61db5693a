"""A model on several ranks of this machine: rank 0 in this process, each other in one that reads its own share.

Copies of a model (data parallel) need nothing of this: they are as many servers, behind what balances them.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from roofline.backends.ranks import PATIENCE, Grid
from roofline.bundle.loader import open_source, refuse_isa
from roofline.ops.batch import BatchLimits

if TYPE_CHECKING:
    from torch.distributed import Store

    from roofline.backends.base import Executable
    from roofline.backends.parallel import ParallelExecutable
    from roofline.backends.ranks import Ranks
    from roofline.backends.reference.executable import ReferenceExecutable
    from roofline.models.config import ModelConfig
    from roofline.program.target import Target
    from roofline.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class RankOptions:
    """What all ranks are told: plain values, as they cross to other processes.

    limits: (tokens, segments, rows, pages) of BatchLimits; threads: of each rank, None: the usable cores divided among
    them; patience: longest wait for a stuck rank, in seconds.
    """

    source: str
    weights: str | None
    arithmetic: str
    kv_dtype: str
    limits: tuple[int, int, int, int]
    num_pages: int
    max_context: int
    threads: int | None
    tensor: int
    pipeline: int
    patience: float = PATIENCE

    @property
    def grid(self) -> Grid:
        """The ranks."""
        return Grid(self.tensor, self.pipeline)


def load_rank_0(
    grid: Grid,
    source: str,
    weights: str | None,
    arithmetic: str,
    checkpoint: "Checkpoint",
    config: "ModelConfig",
    kv_dtype: str,
    limits: BatchLimits,
    pages: int,
    longest: int,
    threads: int | None,
    isa: str | None,
    verify: bool,
    tuned: bool,
) -> "tuple[Executable, Mapping[str, str]]":
    """The executable of rank 0, the other ranks running, and notes: for `load`.

    Raises as `launch_ranks`.
    """
    refuse_isa(isa)
    sizes = (limits.tokens, limits.segments, limits.rows, limits.pages)
    options = RankOptions(
        source, weights, arithmetic, kv_dtype, sizes, pages, longest, threads, grid.tensor, grid.pipeline
    )
    executable = launch_ranks(options, checkpoint, config)
    ranks = f"{grid.size}: stages of layers {grid.pipeline}, parts of each layer {grid.tensor}"
    return executable, {
        "backend": f"reference (torch, slow), {arithmetic} arithmetic",
        "cache": kv_dtype,
        "ranks": ranks,
    }


def launch_ranks(options: RankOptions, checkpoint: "Checkpoint", config: "ModelConfig") -> "ParallelExecutable":
    """Start the other ranks, and load this one's share.

    Raises:
        CapacityError: more ranks, or stages, than the model has parts.
        RankError: a rank could not load; it says which, and why.
    """
    from roofline.backends.launch import JOIN_SECONDS, Launched
    from roofline.backends.ranks import Ranks
    from roofline.backends.reference.parallel import parallel_reference
    from roofline.models.registry import get
    from roofline.program.compile import compile_program

    grid, target = options.grid, _target(options)
    # Before any process is started: can the model be divided so?
    compile_program(get(config.family), config, checkpoint.tensors, target, share=grid.share(grid.size - 1))
    launched = Launched(grid.size, __name__, asdict(options))
    try:
        launched.wait("here", JOIN_SECONDS)
        ranks = Ranks(0, grid, launched.store, options.patience)
    except BaseException:
        launched.close(0.0)
        raise
    try:
        inner = _share(options, checkpoint, config, target, ranks)
        executable = parallel_reference(checkpoint, config, inner, target, ranks, launched)
        launched.wait("ready")
    except BaseException:
        launched.close(0.0)
        ranks.close()
        raise
    return executable


def _share(
    options: RankOptions, checkpoint: "Checkpoint", config: "ModelConfig", target: "Target", ranks: "Ranks"
) -> "ReferenceExecutable":
    from roofline.backends.cpu.select import choose_threads
    from roofline.backends.reference.parallel import reference_share

    threads = options.threads or max(1, int(choose_threads().value) // options.grid.size)
    limits, sizes = BatchLimits(*options.limits), (options.num_pages, options.max_context)
    return reference_share(checkpoint, config, limits, *sizes, threads, target, ranks)


def _target(options: RankOptions) -> "Target":
    from roofline.program.target import CPU, PLAIN, with_cache

    return PLAIN if options.arithmetic == "plain" else with_cache(CPU, options.kv_dtype)


def main(argument: str) -> int:
    """One of the other ranks, from start to end; its exit status."""
    from roofline.backends.launch import run_rank

    given = json.loads(argument)
    rank, port = given.pop("rank"), given.pop("port")
    return run_rank(rank, port, lambda store, tell: _follow(RankOptions(**given), rank, store, tell))


def _follow(options: RankOptions, rank: int, store: "Store", tell: Callable[[str], None]) -> None:
    from roofline.backends.parallel import follow
    from roofline.backends.ranks import Ranks
    from roofline.models.config import ModelConfig

    tell("here")
    ranks = Ranks(rank, options.grid, store, options.patience)
    _, _, checkpoint = open_source(options.source, "reference", options.weights, None)
    assert checkpoint is not None, "the reference reads a checkpoint"
    config = ModelConfig.of(checkpoint.model_config()[1])
    inner = _share(options, checkpoint, config, _target(options), ranks)
    tell("ready")
    follow(inner, ranks)
    ranks.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
