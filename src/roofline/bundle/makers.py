"""What each backend makes of a checkpoint or a bundle: an executable, and notes of what was chosen."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

from roofline.common import extensions
from roofline.common.errors import UnsupportedError
from roofline.common.units import human_bytes
from roofline.ops.batch import PAGE_TOKENS, BatchLimits

if TYPE_CHECKING:
    from roofline.backends.base import Executable
    from roofline.backends.cpu.executable import CpuExecutable
    from roofline.backends.cpu.select import Choice
    from roofline.backends.parallel.ranks import Ranks
    from roofline.bundle.reader import Bundle
    from roofline.models.config import ModelConfig
    from roofline.program.ir import Program
    from roofline.weights.checkpoint import Checkpoint

BUNDLED_KV_DTYPE = "bf16"  # of the cache that a bundle's program and prices are written for


@dataclass(frozen=True)
class Asked:
    """What `load` was asked for, checked; its fields mean what they mean there.

    pages: of a cache in the host's memory; longest: positions served, fixed_length: all of them, however small a
    device's cache turns out.
    """

    kv_dtype: str
    limits: BatchLimits
    pages: int
    longest: int
    fixed_length: bool
    cache_tokens: int | None
    threads: int | None
    isa: str | None
    verify: bool
    tuned: bool
    arithmetic: str
    device: str
    exact: bool
    graphs: bool
    offload: "int | Literal['auto']"
    draft: str | None = None
    traces: BatchLimits | None = None
    activations: str = "auto"


def of_bundle(bundle: "Bundle", mapping: Any, asked: Asked) -> "tuple[Executable, Mapping[str, str]]":
    """A bundle on the CPU; mapping: its weights, mapped."""
    from roofline.backends.cpu.executable import CpuExecutable
    from roofline.backends.cpu.memory import settle
    from roofline.backends.cpu.select import choose_isa, choose_threads
    from roofline.backends.prices import PriceTable
    from roofline.hardware import detect, roofs

    chosen_isa, chosen_threads = choose_isa(asked.isa), choose_threads(asked.threads)
    isa = str(chosen_isa.value)

    identity, prices = bundle.identity, PriceTable(**bundle.manifest.prices)
    recast = cache(lambda: _recast(bundle, asked.kv_dtype))
    if asked.kv_dtype != BUNDLED_KV_DTYPE:  # the weights and the code are the same for all formats of the cache
        from roofline.program.text import program_hash

        identity, prices = replace(identity, program_hash=program_hash(recast())), PriceTable.of(recast())

    def program() -> Any:
        from roofline.backends.cpu.lower import keep_operands

        return keep_operands(recast())

    image = settle(mapping)
    if asked.verify and not bundle.checked(isa):
        from roofline.backends.cpu.truth import check_samples

        check_samples(isa, image.address, bundle.samples())
    executable = CpuExecutable(
        bundle.lowered,
        image,
        identity,
        prices,
        program,
        limits=asked.limits,
        num_pages=asked.pages,
        max_context=asked.longest,
        isa=isa,
        threads=int(chosen_threads.value),
        kv_dtype=asked.kv_dtype,
        roofs=roofs.load(detect.detect().fingerprint, int(chosen_threads.value), isa),
    )
    return executable, _notes(executable, chosen_isa, chosen_threads, asked) | {"weights": f"bundle {bundle.path}"}


def _recast(bundle: "Bundle", kv_dtype: str) -> "Program":
    """A bundle's Program with its KV cache in another format."""
    from roofline.program.passes.legalize import recast_cache
    from roofline.program.target import CPU, with_cache

    extensions.load()  # whose ops it may name
    return recast_cache(bundle.program(), with_cache(CPU, kv_dtype))


def _notes(executable: "CpuExecutable", isa: "Choice", threads: "Choice", asked: Asked) -> dict[str, str]:
    """Sets what was tuned, and says what was chosen."""
    from roofline.backends.cpu.select import choose_variants

    variants = choose_variants(executable) if asked.tuned else None
    size = human_bytes(executable.page_bytes * executable.num_pages)
    return {
        "isa": f"{isa.value} ({isa.reason})",
        "threads": f"{threads.value} ({threads.reason})",
        "cache": f"{executable.num_pages * PAGE_TOKENS} tokens in {asked.kv_dtype}, {size}",
        "variants": "default (not asked for)" if variants is None else f"{variants.value} ({variants.reason})",
    }


def on_cpu(
    asked: Asked, checkpoint: "Checkpoint", config: "ModelConfig", ranks: "Ranks | None" = None
) -> "tuple[CpuExecutable, Mapping[str, str]]":
    """A checkpoint packed for the CPU here and now. ranks: who shares the matrices; this one's part is made."""
    from concurrent.futures import ThreadPoolExecutor

    from roofline.backends.cpu.executable import CpuExecutable
    from roofline.backends.cpu.select import choose_isa, choose_threads
    from roofline.backends.cpu.truth import check_kernels
    from roofline.hardware import detect, roofs
    from roofline.models import registry
    from roofline.program import target
    from roofline.program.compile import compile_program
    from roofline.program.ir import WHOLE

    chosen_isa, chosen_threads = choose_isa(asked.isa), choose_threads(asked.threads)
    with ThreadPoolExecutor(1) as beside:
        identity = beside.submit(weights_hash, checkpoint)
        chosen = target.with_cache(target.CPU, asked.kv_dtype)
        share = ranks.share if ranks is not None else WHOLE
        program = compile_program(registry.get(config.family), config, checkpoint.tensors, chosen, share=share)
        executable = CpuExecutable.from_program(
            program,
            checkpoint,
            weights_hash=identity,
            limits=asked.limits,
            num_pages=asked.pages,
            max_context=asked.longest,
            isa=str(chosen_isa.value),
            threads=int(chosen_threads.value),
            roofs=roofs.load(detect.detect().fingerprint, int(chosen_threads.value), str(chosen_isa.value)),
            group=ranks,
        )
        if asked.verify:
            check_kernels(executable, checkpoint)
    return executable, _notes(executable, chosen_isa, chosen_threads, asked)


def weights_hash(checkpoint: "Checkpoint") -> str:
    """SHA-256 over the tensors' bytes, in the order of their names; of random ones, over what they are made from."""
    from roofline.ops import formats

    digest = hashlib.sha256()
    made = checkpoint.kind == "random"  # then seed, name and shape say what is in a tensor, and reading makes it anew
    digest.update(str(checkpoint.path).encode() if made else b"")
    for name in sorted(checkpoint.tensors):
        info = checkpoint.tensors[name]
        digest.update(f"{name} {info.format} {info.shape}".encode())
        if made:
            continue
        raw = checkpoint.read(name)
        digest.update(raw.data)
        if formats.packed(info.format).name != info.format:  # what a format from outside means by them may change
            digest.update(formats.packed_bytes(info.format, raw).data)
    return digest.hexdigest()


def on_gpu(asked: Asked, checkpoint: "Checkpoint", config: "ModelConfig") -> "tuple[Executable, Mapping[str, str]]":
    """A checkpoint on one GPU."""
    refuse_host_options("gpu", asked.isa, asked.threads)
    from roofline.bundle.gpu import load_gpu

    return load_gpu(
        checkpoint,
        config,
        asked.limits,
        identify=partial(weights_hash, checkpoint),
        longest=asked.longest,
        fixed_length=asked.fixed_length,
        cache_tokens=asked.cache_tokens,
        kv_dtype=asked.kv_dtype,
        device=asked.device,
        exact=asked.exact,
        graphs=asked.graphs,
        offload=asked.offload,
        tuned=asked.tuned,
        draft=asked.draft,
        traces=asked.traces,
        activations=asked.activations,
    )


def refuse_host_options(backend: str, isa: str | None, threads: int | None) -> None:
    """Raises UnsupportedError where an instruction set is asked of torch's kernels, or it or threads of a device."""
    for name, given in (("isa", isa), ("threads", threads if backend == "gpu" else None)):
        if given is not None:
            reason = "it computes on a device" if backend == "gpu" else "torch chooses its own kernels"
            instead = "device=..." if backend == "gpu" else "backend=cpu"
            raise UnsupportedError(f"{name}={given!r} with the {backend} backend", reason, (instead,))


def by_reference(
    asked: Asked, checkpoint: "Checkpoint", config: "ModelConfig"
) -> "tuple[Executable, Mapping[str, str]]":
    """A checkpoint computed by torch, the slow way."""
    refuse_host_options("reference", asked.isa, asked.threads)
    from roofline.backends.reference.executable import reference_executable
    from roofline.program.target import CPU, PLAIN, with_cache

    target = PLAIN if asked.arithmetic == "plain" else with_cache(CPU, asked.kv_dtype)
    sizes = asked.limits, asked.pages, asked.longest
    executable = reference_executable(checkpoint, config, *sizes, asked.threads, target)
    return executable, {
        "backend": f"reference (torch, slow), {asked.arithmetic} arithmetic",
        "cache": asked.kv_dtype,
    }
