"""The start-up truth check: chosen kernels and formats against slow arithmetic on the original file's bytes."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from roofline.common.errors import RooflineError
from roofline.ops import formats

if TYPE_CHECKING:
    from roofline.backends.checkpoint import Tensors
    from roofline.backends.cpu.executable import CpuExecutable
    from roofline.backends.cpu.layout import Layout
    from roofline.program.ir import Program

ROWS = 16
TOLERANCE = 2e-5  # relative to the largest output; the orders differ, the arithmetic does not


class TruthError(RooflineError):
    """A kernel does not compute what the file says. The engine must not start."""


@dataclass(frozen=True)
class Sample:
    """The first rows of a matrix as the file has them (`raw`), and where its packed tiles begin in the image."""

    format: str
    tensor: str
    rows: int
    columns: int
    address: int
    raw: bytes


def samples(program: "Program", layout: "Layout", source: "Tensors") -> list[Sample]:
    """One Sample for each weight format of a Program."""
    by_format: dict[str, Sample] = {}
    for name, pieces in layout.matrices.items():
        for piece, packed in zip(program.weights[name].pieces, pieces, strict=True):
            if piece.format in by_format:
                continue
            rows = min(ROWS, packed.rows)
            first = replace(piece, stop=piece.start + rows)
            raw = first.bytes_of(source.read(piece.tensor), packed.columns).tobytes()
            by_format[piece.format] = Sample(piece.format, piece.tensor, rows, packed.columns, packed.address, raw)
    return list(by_format.values())


def check_kernels(executable: "CpuExecutable", source: "Tensors") -> list[str]:
    """`check_samples` for an executable whose file is at hand. Returns the formats that were checked."""
    checked = samples(executable.program, executable.layout, source)
    check_samples(executable.isa, executable.image.address, checked)
    return [sample.format for sample in checked]


def check_samples(isa: str, base: int, rows: list[Sample]) -> None:
    """The packed tiles of the image at `base`, multiplied by the kernels of `isa`, against the file's own bytes,
    dequantised and multiplied with the same 8-bit activations in float64.

    Raises TruthError naming format and matrix.
    """
    for sample in rows:
        _check(isa, base + sample.address, sample)


def _check(isa: str, address: int, sample: Sample) -> None:
    from roofline import _native

    name, rows, columns = sample.format, sample.rows, sample.columns
    raw = np.frombuffer(sample.raw, np.uint8)
    w = formats.get(name).dequantize(raw, (rows, columns)).astype(np.float64)  # [rows, columns]
    x = np.random.default_rng(0).standard_normal((2, columns)).astype(np.float32)
    y = np.empty((2, rows), np.float32)
    packed = formats.packed(name).name
    number = _native.format_names().index(packed)
    _native.kernels.linear(isa, number, address, rows, columns, x, y)
    used = x.astype(np.float64)
    if packed not in ("F32", "F16", "BF16"):
        q, scale = np.empty(x.shape, np.int8), np.empty((2, columns // 32), np.float32)
        _native.kernels.quantise(isa, x, columns, q, scale, np.empty_like(scale))
        used = q.astype(np.float64) * np.repeat(scale.astype(np.float64), 32, axis=1)
    expected = used @ w.T
    size = np.abs(used) @ np.abs(w).T + 1e-30
    worst = float(np.max(np.abs(y - expected) / size))
    if not worst < TOLERANCE:
        raise TruthError(
            f"{name} kernels ({isa}) are wrong on {sample.tensor}: relative error {worst:.2g}, allowed {TOLERANCE:g}. "
            "Try a lower ROOFLINE_ISA, and report this."
        )
