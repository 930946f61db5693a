"""The cpu backend: checkpoints packed for the C++ core at load, or bundles mapped as they lie on disk."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from roofline.backends.backend import LoadRequest, Neighbours, Notes
from roofline.backends.capacity import Capacity, host_capacity, host_kv_dtype
from roofline.backends.options import LoadOptions
from roofline.common import extensions
from roofline.common.json_types import JsonMapping
from roofline.common.units import human_bytes
from roofline.ops.batch import PAGE_TOKENS

if TYPE_CHECKING:
    from roofline import _native
    from roofline.backends.cpu.executable import CpuExecutable
    from roofline.backends.cpu.lowered import Identity, Lowered
    from roofline.backends.cpu.select import ReasonedChoice
    from roofline.backends.cpu.truth import Sample
    from roofline.backends.parallel.ranks import Ranks
    from roofline.backends.prices import PriceTable
    from roofline.hardware.roofs import Roofs
    from roofline.program.ir import Program, Share
    from roofline.program.target import Target

BUNDLED_KV_DTYPE = "bf16"  # of the cache that a bundle's program and prices are written for


class CompiledModel(Protocol):
    """A model lowered for the core, as a bundle keeps it (`bundle.reader.Bundle`)."""

    @property
    def path(self) -> Path: ...

    @property
    def lowered(self) -> "Lowered": ...

    @property
    def identity(self) -> "Identity": ...

    @property
    def prices(self) -> "PriceTable": ...

    def program(self) -> "Program":
        """The Program as it was compiled."""

    def samples(self) -> "list[Sample]":
        """What the kernels are checked against."""

    def checked(self, isa: str) -> bool:
        """Whether the kernels of `isa` were checked with this very build on this kind of chip."""


class CpuBackend:
    """See `backends.backend`."""

    copies_weights = True

    def holds_compressed_rows(self, options: LoadOptions, config: JsonMapping) -> bool:
        return True

    def resolve(self, options: LoadOptions, neighbours: Neighbours) -> LoadOptions:
        return replace(options, kv_cache_dtype=host_kv_dtype(options.kv_cache_dtype))

    def capacity(self, options: LoadOptions, config: JsonMapping, replicas: int) -> Capacity:
        return host_capacity(options, config, options.kv_cache_dtype, replicas)

    def make(self, request: LoadRequest) -> "tuple[CpuExecutable, Notes]":
        return self._pack(request, None)

    def make_from_bundle(
        self, bundle: CompiledModel, mapping: "_native.Mapping", options: LoadOptions, capacity: Capacity
    ) -> "tuple[CpuExecutable, Notes]":
        from roofline.backends.cpu.executable import CpuExecutable, CpuModel
        from roofline.backends.cpu.memory import settle
        from roofline.backends.prices import PriceTable

        kv_dtype = options.kv_cache_dtype
        isa, threads = _choose(options)
        identity, prices = bundle.identity, bundle.prices
        program = cache(lambda: _with_cache(bundle, kv_dtype))

        def planned() -> "Program":
            from roofline.backends.cpu.lower import keep_operands

            return keep_operands(program())

        if kv_dtype != BUNDLED_KV_DTYPE:  # the weights and the code are the same for all formats of the cache
            from roofline.program.text import program_hash

            identity, prices = replace(identity, program_hash=program_hash(program())), PriceTable.of(program())
        lowered, plain_hash = bundle.lowered, identity.program_hash
        if options.max_adapters:
            lowered, identity, prices, planned = _with_adapters(bundle, program(), identity, options.max_adapter_rank)
        image = settle(mapping)
        if options.verify and not bundle.checked(isa.value):
            from roofline.backends.cpu.truth import check_samples

            check_samples(isa.value, image.address, bundle.samples())
        model = CpuModel(lowered, identity, prices, planned, kv_dtype)
        executable = CpuExecutable(
            model, image, capacity, isa=isa.value, threads=threads.value, roofs=_roofs(isa, threads)
        )
        executable.take_fingerprint_of(plain_hash)
        return executable, {**_notes(executable, isa, threads, options), "weights": f"bundle {bundle.path}"}

    def check_share(self, request: LoadRequest, share: "Share") -> None:
        from roofline.backends.cpu.lower import check
        from roofline.backends.cpu.select import check_threads_of_ranks

        check(self._compile(request, share))
        guesser = request.compile_guesser(_target(request.options), share)
        if guesser is not None:
            check(guesser)
        check_threads_of_ranks(request.options.threads, request.options.ranks)

    def rank_device(self, options: LoadOptions, rank: int) -> str:
        return "cpu"

    def make_share(self, request: LoadRequest, ranks: "Ranks") -> "tuple[CpuExecutable, Notes]":
        import torch

        from roofline.backends.cpu.select import threads_of_rank

        torch.set_num_threads(1)  # in this process it only adds rows, and more would be in the core's way
        threads = threads_of_rank(request.options.threads, ranks.grid.size)
        return self._pack(replace(request, options=replace(request.options, threads=threads)), ranks)

    def _pack(self, request: LoadRequest, ranks: "Ranks | None") -> "tuple[CpuExecutable, Notes]":
        """The model, or the share of one of the ranks, with its weights packed now."""
        from concurrent.futures import ThreadPoolExecutor

        from roofline.backends.checkpoint import weights_hash
        from roofline.backends.cpu.executable import CpuExecutable
        from roofline.backends.cpu.truth import check_kernels
        from roofline.program.passes.adapt import adapt
        from roofline.program.text import program_hash

        checkpoint, options = request.checkpoint, request.options
        isa, threads = _choose(options)
        without_places = replace(request, options=replace(options, max_adapters=0))
        share = ranks.share if ranks is not None else None
        plain = self._compile(without_places, share)
        guesser = request.compile_guesser(_target(options), share)
        program = plain if guesser is None else without_places.compile(_target(options), share, keeps_hidden=True)
        if options.max_adapters:
            program = adapt(program, options.max_adapter_rank)
        with ThreadPoolExecutor(1) as pool:
            identity = pool.submit(weights_hash, checkpoint)
            executable = CpuExecutable.from_program(
                program if guesser is None else (program, guesser),
                checkpoint,
                request.capacity,
                weights_hash=identity,
                isa=isa.value,
                threads=threads.value,
                roofs=_roofs(isa, threads),
                group=ranks,
            )
            if options.max_adapters or options.guesses:
                executable.take_fingerprint_of(program_hash(plain))
            if options.verify:
                check_kernels(executable, checkpoint)
        return executable, _notes(executable, isa, threads, options)

    def _compile(self, request: LoadRequest, share: "Share | None") -> "Program":
        return request.compile(_target(request.options), share)


BACKEND = CpuBackend()


def _target(options: LoadOptions) -> "Target":
    from roofline.program.target import CPU, with_cache

    return with_cache(CPU, options.kv_cache_dtype)


def _choose(options: LoadOptions) -> "tuple[ReasonedChoice[str], ReasonedChoice[int]]":
    """Instruction set and threads."""
    from roofline.backends.cpu.select import choose_isa, choose_threads

    return choose_isa(options.isa), choose_threads(options.threads)


def _roofs(isa: "ReasonedChoice[str]", threads: "ReasonedChoice[int]") -> "Roofs | None":
    """The limits that were measured on this machine."""
    from roofline.hardware import detect, roofs

    return roofs.load(detect.detect().fingerprint, threads.value, isa.value)


def _with_cache(bundle: CompiledModel, kv_dtype: str) -> "Program":
    """A bundle's Program with its KV cache in another format."""
    from roofline.program.passes.legalize import recast_cache
    from roofline.program.target import CPU, with_cache

    extensions.load()  # whose ops it may name
    return recast_cache(bundle.program(), with_cache(CPU, kv_dtype))


def _with_adapters(
    bundle: CompiledModel, program: "Program", identity: "Identity", rank: int
) -> "tuple[Lowered, Identity, PriceTable, Callable[[], Program]]":
    """A bundle's Program with places for adapters, on the weights as they lie in the bundle."""
    from roofline.backends.cpu.layout import lay_out
    from roofline.backends.cpu.lower import keep_operands, lower
    from roofline.backends.prices import PriceTable
    from roofline.program.passes.adapt import adapt
    from roofline.program.text import program_hash

    adapted = adapt(program, rank)
    planned = keep_operands(adapted)
    lowered = lower(planned, lay_out(program, bundle.lowered.positions))
    return lowered, replace(identity, program_hash=program_hash(adapted)), PriceTable.of(planned), lambda: planned


def _notes(
    executable: "CpuExecutable", isa: "ReasonedChoice[str]", threads: "ReasonedChoice[int]", options: LoadOptions
) -> Notes:
    """Sets the kernel variants that were tuned, and says what was chosen."""
    from roofline.backends.cpu.select import choose_variants

    variants = choose_variants(executable) if options.tuned else None
    page_bytes = executable.page_bytes + (executable.guesser.page_bytes if executable.guesser is not None else 0)
    size = human_bytes(page_bytes * executable.num_pages)
    return {
        "isa": f"{isa.value} ({isa.reason})",
        "threads": f"{threads.value} ({threads.reason})",
        "cache": f"{executable.num_pages * PAGE_TOKENS} tokens in {options.kv_cache_dtype}, {size}",
        **({"guesses": "with the model's own layer"} if options.guesses else {}),
        "variants": "default (not asked for)" if variants is None else f"{variants.value} ({variants.reason})",
    }
