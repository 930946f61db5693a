"""A model on several ranks of this machine: rank 0 in this process, each other in one that reads its own share.

Copies of a model (data parallel) need nothing of this: see bundle/replicas.py.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from roofline.backends.parallel.ranks import PATIENCE, Grid, RankError, Ranks
from roofline.bundle.loader import open_source
from roofline.bundle.makers import Asked, refuse_host_options, weights_hash
from roofline.ops.batch import BatchLimits

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store

    from roofline.backends.base import Executable
    from roofline.backends.parallel.executable import ParallelExecutable, ShareExecutable, Watch
    from roofline.backends.sampling import Sampled, SampleRows
    from roofline.models.config import ModelConfig
    from roofline.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class RankOptions:
    """What all ranks are told: plain values, as they cross to other processes. They mean what they mean in `load`.

    limits: (tokens, segments, rows, pages) of BatchLimits; num_pages: of a cache in the host's memory; max_context:
    positions served, fixed_length: all of them, however small the cache; threads: of each rank, None: the usable cores
    divided among them; draft: what lies beside rank 0; patience: longest wait for a stuck rank, in seconds.
    """

    source: str
    weights: str | None
    kv_dtype: str
    limits: tuple[int, int, int, int]
    num_pages: int
    max_context: int
    threads: int | None
    tensor: int
    pipeline: int
    backend: str = "reference"
    arithmetic: str = "cpu"
    device: str = "auto"
    exact: bool = False
    tuned: bool = True
    activations: str = "auto"
    cache_tokens: int | None = None
    fixed_length: bool = False
    isa: str | None = None
    verify: bool = True
    draft: str | None = None
    patience: float = PATIENCE

    @property
    def grid(self) -> Grid:
        """The ranks."""
        return Grid(self.tensor, self.pipeline)


def load_rank_0(
    grid: Grid,
    source: str,
    weights: str | None,
    backend: str,
    asked: Asked,
    checkpoint: "Checkpoint",
    config: "ModelConfig",
) -> "tuple[Executable, Mapping[str, str]]":
    """The executable of rank 0, the other ranks running, and notes: for `load`. Raises as `launch_ranks`."""
    if backend != "cpu":
        refuse_host_options(backend, asked.isa, asked.threads)
    options = RankOptions(
        source,
        weights,
        asked.kv_dtype,
        astuple(asked.limits),
        asked.pages,
        asked.longest,
        asked.threads,
        grid.tensor,
        grid.pipeline,
        backend,
        asked.arithmetic,
        asked.device,
        asked.exact,
        asked.tuned,
        asked.activations,
        asked.cache_tokens,
        asked.fixed_length,
        asked.isa,
        asked.verify,
        asked.draft,
    )
    executable, notes = launch_ranks(options, checkpoint, config)
    ranks = f"{grid.size}: stages of layers {grid.pipeline}, parts of each layer {grid.tensor}"
    return executable, {**notes, "ranks": ranks}


def launch_ranks(
    options: RankOptions, checkpoint: "Checkpoint", config: "ModelConfig"
) -> "tuple[ParallelExecutable, Mapping[str, str]]":
    """Start the other ranks, and load this one's share; with notes of what was chosen here.

    Raises:
        CapacityError: more ranks, or stages, than the model has parts, or the host devices.
        RankError: a rank could not load; it says which, and why.
    """
    from roofline.backends.parallel.launch import JOIN_SECONDS, Launched

    maker, grid = _maker(options, checkpoint, config), options.grid
    maker.check()
    device = maker.device(0)
    launched, ranks = Launched(grid.size, __name__, asdict(options)), None
    try:
        launched.wait("here", JOIN_SECONDS)
        ranks = Ranks(0, grid, launched.store, options.patience, device)
        inner, notes = maker.share(ranks)
        executable = maker.lead(inner, ranks, launched)
        launched.wait("ready")
    except BaseException as error:
        reason = launched.reason() if isinstance(error, RankError) else None
        launched.close(0.0)
        if ranks is not None:
            ranks.close()
        if reason is not None:
            raise RankError(reason) from error
        raise
    return executable, notes


class _Maker(Protocol):
    """What a backend makes of a model for several ranks."""

    def __init__(self, options: RankOptions, checkpoint: "Checkpoint", config: "ModelConfig") -> None: ...

    def check(self) -> None:
        """Raises, before any process is started, where the model or the host cannot be divided so."""

    def device(self, rank: int) -> str:
        """torch's name of a rank's device."""

    def share(self, ranks: Ranks) -> "tuple[ShareExecutable, Mapping[str, str]]":
        """This rank's part, and notes."""

    def lead(self, inner: Any, ranks: Ranks, watch: "Watch") -> "ParallelExecutable":
        """Rank 0's executable over its part."""


def _maker(options: RankOptions, checkpoint: "Checkpoint", config: "ModelConfig") -> _Maker:
    made: dict[str, type[_Maker]] = {"cpu": _Cpu, "gpu": _Gpu, "reference": _Reference}
    return made[options.backend](options, checkpoint, config)


class _Cpu:
    def __init__(self, options: RankOptions, checkpoint: "Checkpoint", config: "ModelConfig") -> None:
        self.options, self.checkpoint, self.config = options, checkpoint, config

    def check(self) -> None:
        from roofline.backends.cpu.lower import check
        from roofline.models.registry import get
        from roofline.program.compile import compile_program
        from roofline.program.target import CPU, with_cache

        given, tensors = self.options, self.checkpoint.tensors
        share = given.grid.share(given.grid.size - 1)
        target = with_cache(CPU, given.kv_dtype)
        check(compile_program(get(self.config.family), self.config, tensors, target, share=share))

    def device(self, rank: int) -> str:
        return "cpu"

    def share(self, ranks: Ranks) -> "tuple[ShareExecutable, Mapping[str, str]]":
        from roofline.backends.cpu.exchange import leave_cores_to_ours
        from roofline.backends.cpu.select import choose_threads
        from roofline.bundle.makers import on_cpu

        leave_cores_to_ours()
        given = self.options
        threads = given.threads or max(1, int(choose_threads().value) // given.grid.size)
        asked = Asked(
            given.kv_dtype, BatchLimits(*given.limits), given.num_pages, given.max_context, given.fixed_length,
            given.cache_tokens, threads, given.isa, given.verify, given.tuned,
            given.arithmetic, given.device, given.exact, graphs=False, offload=0, activations="auto",
        )  # fmt: skip
        return on_cpu(asked, self.checkpoint, self.config, ranks)

    def lead(self, inner: Any, ranks: Ranks, watch: "Watch") -> "ParallelExecutable":
        from roofline.backends.parallel.executable import ParallelExecutable

        def sample_of(_: "Tensor", rows: "SampleRows") -> "Sampled":
            return inner.sample(rows)  # type: ignore[no-any-return]  # from its own logits: every rank has them all

        vocab = self.config.vocab
        return ParallelExecutable(
            inner, ranks, identity=inner.fingerprint, vocab_size=vocab, sample=sample_of, watch=watch
        )


class _Reference:
    def __init__(self, options: RankOptions, checkpoint: "Checkpoint", config: "ModelConfig") -> None:
        from roofline.program.target import CPU, PLAIN, with_cache

        self.options, self.checkpoint, self.config = options, checkpoint, config
        self.target = PLAIN if options.arithmetic == "plain" else with_cache(CPU, options.kv_dtype)

    def check(self) -> None:
        from roofline.models.registry import get
        from roofline.program.compile import compile_program

        grid = self.options.grid
        share, tensors = grid.share(grid.size - 1), self.checkpoint.tensors
        compile_program(get(self.config.family), self.config, tensors, self.target, share=share)

    def device(self, rank: int) -> str:
        return "cpu"

    def share(self, ranks: Ranks) -> "tuple[ShareExecutable, Mapping[str, str]]":
        from roofline.backends.cpu.select import choose_threads
        from roofline.backends.reference.parallel import reference_share

        given = self.options
        threads = given.threads or max(1, int(choose_threads().value) // given.grid.size)
        limits, sizes = BatchLimits(*given.limits), (given.num_pages, given.max_context)
        inner = reference_share(self.checkpoint, self.config, limits, *sizes, threads, self.target, ranks)
        notes = {"backend": f"reference (torch, slow), {given.arithmetic} arithmetic", "cache": given.kv_dtype}
        return inner, notes

    def lead(self, inner: Any, ranks: Ranks, watch: "Watch") -> "ParallelExecutable":
        from roofline.backends.reference.parallel import parallel_reference

        return parallel_reference(self.checkpoint, self.config, inner, self.target, ranks, watch)


class _Gpu:
    def __init__(self, options: RankOptions, checkpoint: "Checkpoint", config: "ModelConfig") -> None:
        self.options, self.checkpoint, self.config = options, checkpoint, config

    def check(self) -> None:
        from roofline.backends.gpu.devices import find
        from roofline.bundle.gpu import compile_for_gpu

        given, grid = self.options, self.options.grid
        chip = find(given.device, 0, grid.size).chip if "fp8" in (given.kv_dtype, given.activations) else None
        how = given.kv_dtype, given.exact, grid.share(grid.size - 1), chip, given.activations
        compile_for_gpu(self.checkpoint, self.config, *how)

    def device(self, rank: int) -> str:
        from roofline.backends.gpu.devices import find

        return find(self.options.device, rank, self.options.grid.size).torch_name

    def share(self, ranks: Ranks) -> "tuple[ShareExecutable, Mapping[str, str]]":
        from roofline.bundle.gpu import load_gpu

        given = self.options
        return load_gpu(
            self.checkpoint,
            self.config,
            BatchLimits(*given.limits),
            identify=lambda: weights_hash(self.checkpoint) if ranks.rank == 0 else "",
            longest=given.max_context,
            fixed_length=given.fixed_length,
            cache_tokens=given.cache_tokens,
            kv_dtype=given.kv_dtype,
            device=given.device,
            exact=given.exact,
            activations=given.activations,
            tuned=given.tuned,
            ranks=ranks,
            draft=given.draft if ranks.rank == 0 else None,
        )

    def lead(self, inner: Any, ranks: Ranks, watch: "Watch") -> "ParallelExecutable":
        from roofline.backends.parallel.executable import ParallelExecutable

        vocab, sample = self.config.vocab, inner.sample_of
        return ParallelExecutable(
            inner, ranks, identity=inner.fingerprint, vocab_size=vocab, sample=sample, watch=watch
        )


def main(argument: str) -> int:
    """One of the other ranks, from start to end; its exit status."""
    from roofline.backends.parallel.launch import run_rank

    given = json.loads(argument)
    rank, port = given.pop("rank"), given.pop("port")
    return run_rank(rank, port, lambda store, tell: _follow(RankOptions(**given), rank, store, tell))


def _follow(options: RankOptions, rank: int, store: "Store", tell: Callable[[str], None]) -> None:
    from roofline.backends.parallel.executable import follow
    from roofline.models.config import ModelConfig

    _, _, checkpoint = open_source(options.source, options.backend, options.weights, None, whole=False)
    assert checkpoint is not None, "no rank of several runs a bundle"
    maker = _maker(options, checkpoint, ModelConfig.of(checkpoint.config))
    device = maker.device(rank)
    tell("here")
    ranks = Ranks(rank, options.grid, store, options.patience, device)
    inner, _ = maker.share(ranks)
    tell("ready")
    follow(inner, ranks)
    ranks.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
