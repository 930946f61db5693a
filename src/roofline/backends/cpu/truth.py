"""The start-up truth check: chosen kernels and formats against slow arithmetic on the original file's bytes."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from roofline.common.errors import ConfigError, RooflineError
from roofline.ops import formats

if TYPE_CHECKING:
    from roofline.backends.checkpoint import LoadableCheckpoint
    from roofline.backends.cpu.executable import CpuExecutable
    from roofline.backends.cpu.layout import ImageLayout
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

    def fits(self, nbytes: int) -> bool:
        """Whether it is of a known format, and its packed tile lies in an image of so many bytes."""
        from roofline import _native

        packed = formats.packed(self.format)
        if packed.name not in _native.format_names() or not 1 <= self.rows <= ROWS or not 1 <= self.columns < 1 << 24:
            return False
        if self.columns % packed.block or len(self.raw) != formats.get(self.format).nbytes((self.rows, self.columns)):
            return False
        size = _native.tile_bytes(_native.format_names().index(packed.name), self.columns)
        return 0 <= self.address <= nbytes - size and self.address % 64 == 0


def samples(program: "Program", layout: "ImageLayout", source: "LoadableCheckpoint") -> list[Sample]:
    """One Sample for each weight format of a Program, and for each format of ours that stands in for one of them.

    Raises ConfigError where one is not all numbers.
    """
    by_format: dict[str, Sample] = {}
    for name, pieces in layout.matrices.items():
        for piece, packed in zip(program.weights[name].pieces, pieces, strict=True):
            if piece.format in by_format:
                continue
            rows = min(ROWS, packed.rows)
            first = replace(piece, stop=piece.start + rows)
            raw = first.bytes_of(source.read(piece.tensor), packed.columns).tobytes()
            values = formats.get(piece.format).dequantize(np.frombuffer(raw, np.uint8), (rows, packed.columns))
            if not np.isfinite(values).all():
                damage = "holds NaN or infinity, so the file is damaged"
                raise ConfigError(f"{source.path}: tensor {piece.tensor!r}: {damage}")
            by_format[piece.format] = Sample(
                format=piece.format,
                tensor=piece.tensor,
                rows=rows,
                columns=packed.columns,
                address=packed.address,
                raw=raw,
            )
    stand_ins = [_as_packed(s) for s in by_format.values() if formats.packed(s.format).name not in by_format]
    return [*by_format.values(), *{sample.format: sample for sample in stand_ins}.values()]


def _as_packed(sample: Sample) -> Sample:
    """The same rows in the format that stands in for theirs, whose tiles a reader without Python can check."""
    raw = formats.packed_bytes(sample.format, np.frombuffer(sample.raw, np.uint8))
    return replace(sample, format=formats.packed(sample.format).name, raw=raw.tobytes())


def damaged_tensor(executable: "CpuExecutable") -> str | None:
    """A tensor of the image that holds NaN or infinity, None where none does. Reads all weights once, as a step does:
    a matrix is multiplied by ones, which needs no knowledge of how it is packed."""
    import ctypes

    from roofline import _native

    program, layout, base = executable.packed_program, executable.layout, executable.image.address
    for name, place in layout.vectors.items():
        size = math.prod(program.weights[name].shape)
        if not np.isfinite(np.ctypeslib.as_array((ctypes.c_float * size).from_address(base + place))).all():
            return program.weights[name].pieces[0].tensor
    for name, pieces in layout.matrices.items():
        for piece, packed in zip(program.weights[name].pieces, pieces, strict=True):
            x, y = np.ones((1, packed.columns), np.float32), np.empty((1, packed.rows), np.float32)
            at = base + packed.address
            _native.kernels.linear(executable.isa, packed.format, at, packed.rows, packed.columns, x, y)
            if not np.isfinite(y).all():
                return piece.tensor
    return None


def check_kernels(executable: "CpuExecutable", source: "LoadableCheckpoint") -> list[str]:
    """`check_samples` for an executable whose file is at hand. Returns the formats that were checked."""
    checked = samples(executable.packed_program, executable.layout, source)
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
    if formats.get(packed).integers is not None:
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
