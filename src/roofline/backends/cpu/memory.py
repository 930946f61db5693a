"""Weights into packed tiles, vectors into float32, rope tables: everything the core reads but does not own."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from roofline.backends.cpu.lower import Addresses, PackedPiece
from roofline.common.errors import UnsupportedError
from roofline.ops import formats
from roofline.ops.rope_tables import RopeTable, cos_sin
from roofline.program.ir import Piece, Program

TILE_ROWS = 16


class Source(Protocol):
    """Where a weight's bytes come from (weights.Checkpoint)."""

    @property
    def tensors(self) -> Mapping[str, Any]: ...

    def read(self, name: str) -> np.ndarray: ...


class PackedWeights:
    """All weights of a Program, packed into one region of huge pages.

    Attributes:
        addresses: where each weight lies.
        nbytes: bytes of the packed matrices.
    """

    def __init__(self, program: Program, source: Source, threads: int) -> None:
        from roofline import _native

        self._numbers = {name: number for number, name in enumerate(_native.format_names())}
        matrices = {name: recipe for name, recipe in program.weights.items() if len(recipe.shape) == 2}
        self.nbytes = sum(self._tiles(piece, r.columns)[1] for r in matrices.values() for piece in r.pieces)
        self._memory = _native.Memory(max(self.nbytes, 1))
        self._vectors: dict[str, np.ndarray] = {}
        packed: dict[str, tuple[PackedPiece, ...]] = {}
        at = self._memory.address
        for name, recipe in matrices.items():
            pieces, start = [], 0
            for piece in recipe.pieces:
                rows = piece.stop - piece.start
                raw = _rows(source, piece, recipe.columns)
                number = self._numbers[piece.format]
                _native.pack(number, raw, rows, recipe.columns, at, threads)
                pieces.append(PackedPiece(number, at, rows, recipe.columns, start))
                at += self._tiles(piece, recipe.columns)[1]
                start += rows
            packed[name] = tuple(pieces)
        for name, recipe in program.weights.items():
            if len(recipe.shape) == 1:
                parts = [
                    formats.get(p.format).dequantize(_rows(source, p, 1), (p.stop - p.start,)) for p in recipe.pieces
                ]
                self._vectors[name] = np.ascontiguousarray(np.concatenate(parts), dtype=np.float32)
        self.addresses = Addresses(packed, {name: array.ctypes.data for name, array in self._vectors.items()})

    def _tiles(self, piece: Piece, columns: int) -> tuple[int, int]:
        """(tiles, bytes) of a piece. Raises UnsupportedError for a format without kernels."""
        from roofline import _native

        if piece.format not in self._numbers:
            raise UnsupportedError(
                f"weight format {piece.format}", "the cpu backend has no kernel for it", list(self._numbers)
            )
        tiles = -(-(piece.stop - piece.start) // TILE_ROWS)
        return tiles, tiles * _native.tile_bytes(self._numbers[piece.format], columns)


def _rows(source: Source, piece: Piece, columns: int) -> np.ndarray:
    """uint8 view of the piece's rows in the file."""
    layout = formats.get(piece.format)
    row_bytes = columns // layout.block * layout.block_bytes
    return source.read(piece.tensor)[piece.start * row_bytes : piece.stop * row_bytes]


def rope_array(table: RopeTable, positions: int, head_dim: int) -> np.ndarray:
    """float32 [positions, 2, head_dim / 2]: cosines, then sines. Raises UnsupportedError for partial rotation."""
    if table.dim != head_dim:
        raise UnsupportedError("partial rotary embedding", f"{table.dim} of {head_dim} dimensions turn")
    cos, sin = cos_sin(table, np.arange(positions))
    return np.ascontiguousarray(np.stack([cos, sin], axis=1))
