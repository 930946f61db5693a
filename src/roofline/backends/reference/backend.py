"""The reference backend: Programs computed by torch, slow and simple, in another backend's arithmetic or in float32."""

from dataclasses import replace
from typing import TYPE_CHECKING

from roofline.backends.backend import LoadRequest, Neighbours, Notes
from roofline.backends.capacity import Capacity, host_capacity, host_kv_dtype
from roofline.backends.options import LoadOptions
from roofline.common.errors import UnsupportedError
from roofline.common.json_types import JsonMapping

if TYPE_CHECKING:
    from roofline.backends.parallel.ranks import Ranks
    from roofline.backends.reference.executable import ReferenceExecutable
    from roofline.program.ir import Share
    from roofline.program.target import Target


class ReferenceBackend:
    """See `backends.backend`."""

    def holds_compressed_rows(self, options: LoadOptions, config: JsonMapping) -> bool:
        return True

    def resolve(self, options: LoadOptions, neighbours: Neighbours) -> LoadOptions:
        name = options.kv_cache_dtype
        if options.arithmetic != "plain":
            return replace(options, kv_cache_dtype=host_kv_dtype(name))
        if name != "auto":
            raise UnsupportedError(f"kv_cache_dtype {name!r} in plain arithmetic", "its cache is float32", ("auto",))
        return options

    def capacity(self, options: LoadOptions, config: JsonMapping, replicas: int) -> Capacity:
        return host_capacity(options, config, _kv_dtype(options), replicas)

    def make(self, request: LoadRequest) -> "tuple[ReferenceExecutable, Notes]":
        return _make(request, request.options.threads, None)

    def check_share(self, request: LoadRequest, share: "Share") -> None:
        from roofline.backends.cpu.select import check_threads_of_ranks

        request.compile(_target(request.options), share)
        check_threads_of_ranks(request.options.threads, request.options.ranks)

    def rank_device(self, options: LoadOptions, rank: int) -> str:
        return "cpu"

    def make_share(self, request: LoadRequest, ranks: "Ranks") -> "tuple[ReferenceExecutable, Notes]":
        from roofline.backends.cpu.select import threads_of_rank

        return _make(request, threads_of_rank(request.options.threads, ranks.grid.size), ranks)


BACKEND = ReferenceBackend()


def _make(request: LoadRequest, threads: int | None, ranks: "Ranks | None") -> "tuple[ReferenceExecutable, Notes]":
    """The model, or the share of one of the ranks. threads: torch's (None: as torch chooses)."""
    import torch

    from roofline.backends.checkpoint import weights_hash
    from roofline.backends.reference.executable import ReferenceExecutable

    if threads is not None:
        torch.set_num_threads(threads)
    options, capacity = request.options, request.capacity
    share = ranks.share if ranks is not None else None
    program = request.compile(_target(options), share)
    plain, guesser = program, request.compile_guesser(_target(options), share)
    if guesser is not None:
        program = request.compile(_target(options), share, keeps_hidden=True)
    if program.state_groups and not capacity.limits.state_slots:
        raise UnsupportedError(f"a {program.name} model", "this load has no slots for its recurrent state")
    executable = ReferenceExecutable(
        program=program,
        read=request.checkpoint.read,
        limits=capacity.limits,
        num_pages=capacity.num_pages,
        max_context=capacity.max_context,
        weights_hash=weights_hash(request.checkpoint) if ranks is None or ranks.rank == 0 else "",
        group=ranks,
    )
    if guesser is not None:
        executable.take_fingerprint_of(plain)
        limits = replace(capacity.limits, state_slots=0)
        executable.guesser = executable.variant(guesser, limits, capacity.num_pages, ranks)
    return executable, {
        "backend": f"reference (torch, slow), {options.arithmetic} arithmetic",
        "cache": _kv_dtype(options),
    }


def _kv_dtype(options: LoadOptions) -> str:
    return "f32" if options.arithmetic == "plain" else options.kv_cache_dtype


def _target(options: LoadOptions) -> "Target":
    from roofline.program.target import CPU, PLAIN, with_cache

    return PLAIN if options.arithmetic == "plain" else with_cache(CPU, options.kv_cache_dtype)
