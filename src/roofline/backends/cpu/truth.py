"""The start-up truth check: chosen kernels and formats against slow arithmetic on the original file's bytes."""

import numpy as np

from roofline.backends.cpu.executable import CpuExecutable
from roofline.backends.cpu.memory import Source
from roofline.common.errors import RooflineError
from roofline.ops import formats

ROWS = 16
TOLERANCE = 2e-5  # relative to the largest output; the orders differ, the arithmetic does not


class TruthError(RooflineError):
    """A kernel does not compute what the file says. The engine must not start."""


def check_kernels(executable: CpuExecutable, source: Source) -> list[str]:
    """For each weight format of the program, the first rows of one matrix against float64.

    The packed tiles are multiplied by the kernels; the file's own bytes are dequantised and multiplied with the same
    8-bit activations in float64.

    Returns the formats that were checked. Raises TruthError naming format and matrix.
    """
    seen: dict[str, str] = {}
    for name, recipe in executable.program.weights.items():
        if len(recipe.shape) != 2:
            continue
        for piece, packed in zip(recipe.pieces, executable.packed(name), strict=True):
            if piece.format not in seen:
                seen[piece.format] = piece.tensor
                _check(executable.isa, source, piece.tensor, piece.start, piece.format, packed.address, recipe.columns)
    return list(seen)


def _check(isa: str, source: Source, tensor: str, start: int, name: str, address: int, columns: int) -> None:
    from roofline import _native

    layout = formats.get(name)
    row_bytes = columns // layout.block * layout.block_bytes
    rows = min(ROWS, len(source.read(tensor)) // row_bytes - start)
    raw = source.read(tensor)[start * row_bytes : (start + rows) * row_bytes]
    w = layout.dequantize(raw, (rows, columns)).astype(np.float64)  # [rows, columns]
    x = np.random.default_rng(0).standard_normal((2, columns)).astype(np.float32)
    y = np.empty((2, rows), np.float32)
    number = _native.format_names().index(name)
    _native.kernels.linear(isa, number, address, rows, columns, x, y)
    used = x.astype(np.float64)
    if name not in ("F32", "F16", "BF16"):
        q, scale = np.empty(x.shape, np.int8), np.empty((2, columns // 32), np.float32)
        _native.kernels.quantise(isa, x, columns, q, scale, np.empty_like(scale))
        used = q.astype(np.float64) * np.repeat(scale.astype(np.float64), 32, axis=1)
    wanted = used @ w.T
    size = np.abs(used) @ np.abs(w).T + 1e-30
    worst = float(np.max(np.abs(y - wanted) / size))
    if not worst < TOLERANCE:
        raise TruthError(
            f"{name} kernels ({isa}) are wrong on {tensor}: relative error {worst:.2g}, allowed {TOLERANCE:g}. "
            "Try a lower ROOFLINE_ISA, and report this."
        )
