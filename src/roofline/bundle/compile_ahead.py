"""A model's steps on a chip that is not here, so that everything its launches would compile is compiled before.

Weights and cache take no memory ("meta" tensors) and launches do nothing; which binary a launch asks for depends on
types, sizes and alignments alone. Runs in a process of its own, for what absent.py does to Triton.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roofline.backends.gpu.ahead import check as static
from roofline.backends.gpu.ahead import kernel_cache
from roofline.backends.gpu.ahead import stub_driver as absent
from roofline.backends.sampling import SampleRows
from roofline.bundle.cache_size import step_size
from roofline.hardware.chips import chips
from roofline.ops.batch import PAGE_TOKENS, BatchLimits

if TYPE_CHECKING:
    from roofline.backends.gpu.runtime.executable import GpuExecutable
    from roofline.backends.gpu.runtime.step import Sizes
    from roofline.weights.checkpoint import Checkpoint

# Beyond 2 GiB, which AMD's compiler is told of: only a cache of few tokens is smaller. The second, of the few layers
# that are rehearsed, has more elements a layer than 32 bits count.
_CACHE_BYTES = 5 << 30, 1 << 37
_LAYER = re.compile(r"layers\.(\d+)\.(.*)")


@dataclass(frozen=True)
class Rehearsed:
    """Of one model on one chip: binaries its launches asked for, and how many of them had to be compiled."""

    chip: str
    binaries: int
    compiled: int


def rehearse(
    source: str, wanted: Sequence[chips.Chip], *, weights: str | None = None, exact: bool = False,
    folder: Path | None = None, kv_dtype: str = "auto", activations: str = "auto",
    max_running: int | None = None, max_batch_tokens: int | None = None,
) -> Iterator[Rehearsed]:  # fmt: skip
    """Fill the kernel cache, or `folder`, with what this model runs on these chips, in steps up to the given size.

    source, weights, kv_dtype, activations: as for `bundle.load`. Raises UnsupportedError, ConfigError as that, and
    where torch or triton is missing.
    """
    path = str(folder or kernel_cache.folder())
    max_batch_tokens, max_running = step_size("gpu", max_batch_tokens, max_running)
    call = partial(
        _rehearse, source, path, weights=weights, exact=exact, kv_dtype=kv_dtype, activations=activations,
        running=max_running, batch_tokens=max_batch_tokens,
    )  # fmt: skip
    yield from static.elsewhere(call, [chip.name for chip in wanted])


def _rehearse(
    source: str, path: str, chip_name: str, *, weights: str | None, exact: bool, kv_dtype: str, activations: str,
    running: int, batch_tokens: int,
) -> Rehearsed:  # fmt: skip
    """In the process that it is done in."""
    from roofline.bundle.loader import open_source

    chip = chips.get(chip_name)
    absent.install(chip)
    kernel_cache.use(Path(path))
    asked = absent.asked()
    _, _, checkpoint = open_source(source, "gpu", weights, None)
    assert checkpoint is not None, "without a bundle there is a checkpoint"
    made = partial(executable_of, checkpoint, chip, exact=exact, kv_dtype=kv_dtype, activations=activations)
    for cache in _CACHE_BYTES:
        run_steps(made(running=running, tokens=batch_tokens, cache_bytes=cache))
    return Rehearsed(chip_name, len(asked), sum(not there for there in asked.values()))


def executable_of(
    checkpoint: "Checkpoint", chip: chips.Chip, *, exact: bool, running: int, tokens: int, kv_dtype: str = "auto",
    activations: str = "auto", cache_bytes: int = _CACHE_BYTES[0],
) -> "GpuExecutable":  # fmt: skip
    """The model without memory, of as many layers as differ in their formats."""
    from roofline.backends.gpu.runtime.executable import GpuExecutable, Runtime
    from roofline.bundle.gpu import compile_for_gpu
    from roofline.models.config import ModelConfig

    checkpoint, layers = _first_layers(checkpoint)
    config = replace(ModelConfig.of(checkpoint.config), layers=layers)
    program = compile_for_gpu(checkpoint, config, kv_dtype, exact, chip=chip, activations=activations)
    longest = min(config.max_position, 1 << 15)
    (group,) = program.kv_groups.values()
    pages = cache_bytes // (PAGE_TOKENS * group.token_bytes)
    limits = BatchLimits(
        tokens=max(tokens, running), segments=running, rows=running, pages=running * -(-longest // PAGE_TOKENS)
    )
    runtime = Runtime(chip, "meta", exact, graphs=False)
    return GpuExecutable(
        program, checkpoint.read, runtime, limits=limits, num_pages=pages, max_context=longest, weights_hash=""
    )


def _first_layers(checkpoint: "Checkpoint") -> "tuple[Checkpoint, int]":
    """The checkpoint cut behind the last layer that is of other formats or shapes than all before it; its layers.

    One more stays: in the last layer a Program computes less than in the others.
    """
    from roofline.weights.checkpoint import Checkpoint

    kinds: dict[int, set[tuple[Any, ...]]] = {}
    for name, info in checkpoint.tensors.items():
        if found := _LAYER.match(name):
            kinds.setdefault(int(found[1]), set()).add((found[2], info.format, tuple(info.shape)))
    firsts = {frozenset(held): number for number, held in sorted(kinds.items(), reverse=True)}
    count = min(max(firsts.values()) + 2, len(kinds))
    kept = {n: info for n, info in checkpoint.tensors.items() if not (m := _LAYER.match(n)) or int(m[1]) < count}
    c = checkpoint
    return Checkpoint(c.path, c.kind, kept, c.metadata, c.config, c.read), count


def run_steps(executable: "GpuExecutable") -> None:
    """Steps of every kind: decodes, drafts to verify, chunks of prompts, and each way to sample."""
    from roofline.backends.gpu.kernels.sample import sample

    for sizes in step_sizes(executable.limits, executable.max_context):
        step = executable.step_of(sizes)
        executable.queue(step)
    logits = step.value(executable.program.logits)
    for settings in _samplings(logits.shape[0], executable.vocab_size):
        sample(executable.runtime.chip, logits, settings)


def step_sizes(limits: BatchLimits, longest: int) -> "Iterator[Sizes]":
    """Sizes on both sides of what launches decide by: rows, segments, queries of one, length of the context."""
    from roofline.backends.gpu.runtime.step import Sizes

    contexts = sorted({min(1 << power, longest) for power in range(4, 18)})
    for segments in sorted({min(1 << power, limits.segments) for power in range(12)}):
        for queries in (1, 2, 3, 5, 9, 17, 33):
            tokens, rows = segments * queries, min(segments * queries, limits.rows)
            if tokens <= limits.tokens:
                yield from (Sizes(tokens, rows, segments, queries, c) for c in contexts if c >= queries)
    for tokens in sorted({min(1 << power, limits.tokens) for power in range(5, 16)}):
        for context in {tokens, longest}:
            yield Sizes(tokens, 1, 1, tokens, context)
            yield Sizes(tokens, 2, 2, tokens - 1, context, decodes=1)


def _samplings(rows: int, vocab: int) -> Iterator[SampleRows]:
    """Every combination of what changes scores, cuts them, or asks for log-probabilities."""
    ids, starts = np.zeros(rows, np.int32), np.arange(rows + 1, dtype=np.int32)
    parts: tuple[dict[str, Any], ...] = (
        {"temperature": np.ones(rows, np.float32), "top_k": np.full(rows, 5, np.int32)},
        {"hist_start": starts, "hist_ids": ids, "hist_counts": ids},
        {"bias_start": starts, "bias_ids": ids, "bias_values": ids.astype(np.float32)},
        {"mask": np.zeros((rows, -(-vocab // 32)), np.uint32)},
        {"logprobs": ids},
    )
    for count in range(len(parts) + 1):
        for chosen in combinations(parts, count):
            yield replace(SampleRows.greedy(rows), **{name: value for part in chosen for name, value in part.items()})
