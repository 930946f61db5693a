"""Recipes -> numbers, straight from the file's bytes."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from roofline.backends.reference.unpack import Groups, unpack
from roofline.ops import formats
from roofline.program.ir import Program, Recipe, WeightPiece

if TYPE_CHECKING:
    from torch import Tensor

Read = Callable[[str], np.ndarray]


class ReferenceWeights:
    """The weights of a Program. read: file tensor name -> its bytes, uint8. What was unpacked is kept."""

    def __init__(self, program: Program, read: Read) -> None:
        self._recipes, self._read = program.weights, read
        self._tensors: dict[str, Tensor] = {}
        self._groups: dict[str, list[Groups]] = {}

    def row_count(self, name: str) -> int:
        """The rows of a weight."""
        return self._recipes[name].shape[0]

    def tensor(self, name: str) -> "Tensor":
        """float32 values in the weight's shape."""
        import torch

        if name not in self._tensors:
            recipe = self._recipes[name]
            parts = [self._values(recipe, piece) for piece in recipe.pieces]
            self._tensors[name] = torch.from_numpy(np.concatenate(parts).reshape(recipe.shape))
        return self._tensors[name]

    def groups(self, name: str) -> list[Groups]:
        """The quantised pieces of a matrix as integers and scales."""
        if name not in self._groups:
            recipe = self._recipes[name]
            self._groups[name] = [
                unpack(
                    formats.packed_bytes(p.format, p.bytes_of(self._read(p.tensor), recipe.columns)),
                    formats.packed(p.format).name,
                    (p.stop - p.start, recipe.columns),
                )
                for p in recipe.pieces
            ]
        return self._groups[name]

    def rows(self, name: str, ids: np.ndarray) -> "Tensor":
        """float32 [len(ids), columns]: some rows, without widening the rest."""
        import torch

        recipe = self._recipes[name]
        rows_read = np.unique(ids)
        values = np.empty((len(rows_read), recipe.columns), np.float32)
        base = 0  # first row of the piece within the weight
        for piece in recipe.pieces:
            count = piece.stop - piece.start
            for i, row in enumerate(rows_read):
                if base <= row < base + count:
                    at = piece.start + int(row) - base
                    values[i] = self._values(recipe, replace(piece, start=at, stop=at + 1))
            base += count
        return torch.from_numpy(values[np.searchsorted(rows_read, ids)])

    def _values(self, recipe: Recipe, piece: WeightPiece) -> np.ndarray:
        raw = piece.bytes_of(self._read(piece.tensor), recipe.columns)
        shape = (piece.stop - piece.start, *recipe.shape[1:])
        return formats.get(piece.format).dequantize(raw, shape)
