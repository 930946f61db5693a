"""Faults for the start-up check to catch: weights that were packed with a wrong scale, and a kernel that computes
something else. `load_with_wrong_kernel` is a factory for engine processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from roofline.backends.cpu.executable import CpuExecutable
from roofline.bundle import load, loader
from roofline.program.ir import Program
from roofline.weights.checkpoint import Checkpoint, read_config
from roofline.weights.random_weights import parse, random_checkpoint

WEIGHTS = "random:3:Q8_0"
BLOCK = 34  # bytes of Q8_0: a 16-bit scale, 32 numbers


def wrong_scale(folder: Path, tensor: str, factor: int) -> Checkpoint:
    """A checkpoint of which all scales of one matrix but those of its first 16 rows, which loading looks at itself, are
    larger by a power of two."""
    right = random_checkpoint(read_config(folder), *parse(WEIGHTS))

    def changed(name: str) -> np.ndarray:
        raw = right.bytes_of(name)
        if name != tensor:
            return raw
        blocks = raw.copy().reshape(-1, BLOCK)
        first = 16 * right.tensors[name].shape[-1] // 32
        scales = blocks[first:, :2].copy().view("<u2")
        blocks[first:, :2] = (scales + np.uint16(int(np.log2(factor)) << 10)).view(np.uint8)
        return blocks.reshape(raw.shape)

    return replace(right, bytes_of=changed)


@contextmanager
def wrong_kernel() -> Iterator[None]:
    """What is loaded meanwhile attends with scores eight times too small, as a kernel that forgot a factor."""
    right = CpuExecutable.from_program.__func__  # type: ignore[attr-defined]

    def planted(cls: type, program: Program, *arguments: Any, **keywords: Any) -> CpuExecutable:
        body = [
            replace(instr, attrs={**instr.attrs, "scale": instr.attr("scale") / 8}) if instr.op == "attend" else instr
            for instr in program.body
        ]
        executable: CpuExecutable = right(cls, replace(program, body=tuple(body)), *arguments, **keywords)
        return executable

    with patch.object(CpuExecutable, "from_program", classmethod(planted)):
        yield


def load_with_wrong_kernel(source: str, **options: Any) -> loader.LoadedModel:
    """As `load`; only the portable kernels are right."""
    if options.get("isa") == "portable":
        return load(source, **options)
    with wrong_kernel():
        return load(source, **options)
