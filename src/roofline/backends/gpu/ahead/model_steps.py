"""Compiles all kernels of a model for chips that are not here, by running its steps without memory or a device.

Weights and cache take no memory ("meta" tensors) and launches do nothing; which binary a launch asks for depends on
types, sizes and alignments alone. Runs in a process of its own, because stub_driver.py replaces Triton's driver.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from roofline.backends.backend import CompiledAhead
from roofline.backends.capacity import pages_within
from roofline.backends.gpu.ahead import check as static
from roofline.backends.gpu.ahead import kernel_cache, stub_driver
from roofline.backends.options import LoadOptions
from roofline.backends.sampling import SampleRows
from roofline.hardware.chips import chips
from roofline.ops.batch import PAGE_TOKENS, BatchLimits

if TYPE_CHECKING:
    from roofline.backends.checkpoint import LoadableCheckpoint
    from roofline.backends.gpu.runtime.executable import GpuExecutable
    from roofline.backends.gpu.runtime.step import StepSizes
    from roofline.program.trace import DescribesTensor

# Beyond 2 GiB, which AMD's compiler is told of: only a cache of few tokens is smaller. The second, of the few layers
# that are compiled for, has more elements a layer than 32 bits count.
_CACHE_BYTES = 5 << 30, 1 << 37
_LAYER = re.compile(r"layers\.(\d+)\.(.*)")


def compile_model_steps(
    open_checkpoint: "Callable[[], LoadableCheckpoint]",
    options: LoadOptions,
    step: tuple[int, int],
    chip_names: Sequence[str],
    folder: Path | None = None,
) -> Iterator[CompiledAhead]:
    """Fill the kernel cache, or `folder`, with what a model runs on these chips.

    open_checkpoint: called in another process; step: (tokens, sequences) of the largest. Raises UnsupportedError,
    ConfigError as loading the model does, and where torch or triton is missing.
    """
    path = folder or kernel_cache.folder()
    yield from static.elsewhere(partial(_compile_for_chip, open_checkpoint, options, step, path), chip_names)


def _compile_for_chip(
    open_checkpoint: "Callable[[], LoadableCheckpoint]",
    options: LoadOptions,
    step: tuple[int, int],
    path: Path,
    chip_name: str,
) -> CompiledAhead:
    """In the process of its own."""
    chip = chips.get(chip_name)
    stub_driver.install(chip)
    kernel_cache.use(path)
    requests = stub_driver.record_requests()
    checkpoint = open_checkpoint()
    for cache_bytes in _CACHE_BYTES:
        run_steps(executable_without_memory(checkpoint, chip, options, step, cache_bytes))
    return CompiledAhead(chip_name, len(requests), sum(not cached for cached in requests.values()))


def executable_without_memory(
    checkpoint: "LoadableCheckpoint",
    chip: chips.Chip,
    options: LoadOptions,
    step: tuple[int, int],
    cache_bytes: int = _CACHE_BYTES[0],
) -> "GpuExecutable":
    """The model on "meta" tensors, with as many layers as differ in their formats."""
    from roofline.backends.gpu.program import compile_for_gpu
    from roofline.backends.gpu.runtime.executable import GpuExecutable, Runtime
    from roofline.models.registry import config_of

    first = _first_layers(checkpoint)
    config = config_of(checkpoint.config).first(first.layers)
    program = compile_for_gpu(first, config, options, chip)
    longest = min(config.max_position, 1 << 15)
    token_bytes = sum(group.token_bytes for group in program.kv_groups.values())
    tokens, running = step
    limits = BatchLimits(
        tokens=max(tokens, running),
        segments=running,
        rows=running,
        pages=running * -(-longest // PAGE_TOKENS),
        state_slots=running if program.state_groups else 0,
    )
    return GpuExecutable(
        program,
        checkpoint.read,
        Runtime(chip, "meta", options.exact, graphs=False),
        limits=limits,
        num_pages=pages_within(cache_bytes, token_bytes),
        max_context=longest,
        weights_hash="",
    )


@dataclass(frozen=True)
class _FirstLayers:
    """A checkpoint of which only the first `layers` are left."""

    checkpoint: "LoadableCheckpoint"
    tensors: "Mapping[str, DescribesTensor]"
    layers: int

    def read(self, name: str) -> np.ndarray:
        return self.checkpoint.read(name)


def _first_layers(checkpoint: "LoadableCheckpoint") -> _FirstLayers:
    """The checkpoint cut behind the last layer that is of other formats or shapes than all before it.

    One more stays: in the last layer a Program computes less than in the others.
    """
    kinds: dict[int, set[tuple[str, str, tuple[int, ...]]]] = {}
    for name, info in checkpoint.tensors.items():
        if match := _LAYER.match(name):
            kinds.setdefault(int(match[1]), set()).add((match[2], info.format, tuple(info.shape)))
    first_of_kind = {frozenset(kind): layer for layer, kind in sorted(kinds.items(), reverse=True)}
    count = min(max(first_of_kind.values()) + 2, len(kinds))
    tensors = {n: info for n, info in checkpoint.tensors.items() if not (m := _LAYER.match(n)) or int(m[1]) < count}
    return _FirstLayers(checkpoint, tensors, count)


def run_steps(executable: "GpuExecutable") -> None:
    """Steps of every kind: decodes, drafts to verify, chunks of prompts, and each way to sample."""
    from roofline.backends.gpu.kernels.sample import sample

    for sizes in step_sizes(executable.limits, executable.max_context):
        step = executable.step_of(sizes)
        executable.queue(step)
    logits = step.value(executable.program.logits)
    for settings in _samplings(logits.shape[0], executable.vocab_size):
        sample(executable.runtime.chip, logits, settings)


def step_sizes(limits: BatchLimits, longest: int) -> "Iterator[StepSizes]":
    """Sizes on both sides of what launches decide by: rows, segments, queries of one, length of the context."""
    from roofline.backends.gpu.runtime.step import StepSizes

    contexts = sorted({min(1 << power, longest) for power in range(4, 18)})
    for segments in sorted({min(1 << power, limits.segments) for power in range(12)}):
        for queries in (1, 2, 3, 5, 9, 17, 33):
            tokens, rows = segments * queries, min(segments * queries, limits.rows)
            if tokens <= limits.tokens:
                yield from (StepSizes(tokens, rows, segments, queries, c) for c in contexts if c >= queries)
    for tokens in sorted({min(1 << power, limits.tokens) for power in range(5, 16)}):
        for context in {tokens, longest}:
            yield StepSizes(tokens, 1, 1, tokens, context)
            yield StepSizes(tokens, 2, 2, tokens - 1, context, decodes=1)


def _samplings(rows: int, vocab: int) -> Iterator[SampleRows]:
    """Every combination of what changes scores, cuts them, or asks for log-probabilities."""
    ids, starts = np.zeros(rows, np.int32), np.arange(rows + 1, dtype=np.int32)
    parts: tuple[dict[str, np.ndarray], ...] = (
        {"temperature": np.ones(rows, np.float32), "top_k": np.full(rows, 5, np.int32)},
        {"hist_start": starts, "hist_ids": ids, "hist_counts": ids},
        {"bias_start": starts, "bias_ids": ids, "bias_values": ids.astype(np.float32)},
        {"mask": np.zeros((rows, -(-vocab // 32)), np.uint32)},
        {"logprobs": ids},
    )
    for count in range(len(parts) + 1):
        for chosen in combinations(parts, count):
            yield replace(SampleRows.greedy(rows), **{name: value for part in chosen for name, value in part.items()})
