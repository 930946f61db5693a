"""What a backend reads of a checkpoint, the hash that identifies its weights, and which of them is damaged."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from roofline.ops import formats
from roofline.program.ir import Program
from roofline.program.trace import DescribesTensor

VALUES = 1 << 22  # of a tensor that are widened at a time when damage is looked for


class Tensors(Protocol):
    """Named tensors: format and shape of each, and its bytes."""

    @property
    def tensors(self) -> Mapping[str, DescribesTensor]: ...

    def read(self, name: str) -> np.ndarray:
        """uint8 [nbytes] of a tensor."""


class LoadableCheckpoint(Tensors, Protocol):
    """A model's weights and configuration, whatever kind of file holds them (`weights.checkpoint.Checkpoint`)."""

    @property
    def path(self) -> Path: ...

    @property
    def kind(self) -> str: ...

    @property
    def config(self) -> Mapping[str, object]:
        """The fields of its ModelConfig."""

    @property
    def guessing(self) -> Mapping[str, DescribesTensor]:
        """The tensors of its layer that guesses further tokens, which `read` reads too; empty: it has none."""


def damaged_tensor(program: Program, read: Callable[[str], np.ndarray]) -> str | None:
    """A tensor that holds NaN or infinity among those that a Program is made from, None where none does. Reads all of
    them, and widens some at a time. read: tensor name -> its bytes."""
    for recipe in program.weights.values():
        rows = max(1, VALUES // recipe.columns)
        for piece in recipe.pieces:
            raw = read(piece.tensor)
            for start in range(piece.start, piece.stop, rows):
                part = replace(piece, start=start, stop=min(start + rows, piece.stop))
                shape = part.stop - start, recipe.columns
                with np.errstate(all="ignore"):  # products of what is no number
                    values = formats.get(piece.format).dequantize(part.bytes_of(raw, recipe.columns), shape)
                if not np.isfinite(values).all():
                    return piece.tensor
    return None


def weights_hash(checkpoint: LoadableCheckpoint) -> str:
    """SHA-256 (hex) over the tensors' bytes, in the order of their names; of random ones over seed and shapes."""
    digest = hashlib.sha256()
    random = checkpoint.kind == "random"  # seed, name and shape say what is in a tensor, and reading computes it anew
    digest.update(str(checkpoint.path).encode() if random else b"")
    for name in sorted(checkpoint.tensors):
        info = checkpoint.tensors[name]
        digest.update(f"{name} {info.format} {info.shape}".encode())
        if random:
            continue
        raw = checkpoint.read(name)
        digest.update(raw.data)
        if formats.packed(info.format).name != info.format:  # what a format from outside means by them may change
            digest.update(formats.packed_bytes(info.format, raw).data)
    return digest.hexdigest()
