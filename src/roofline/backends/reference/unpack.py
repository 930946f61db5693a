"""Quantised blocks as integers and scales: weight = scale * q + minimum, which is what integer dot products need."""

from dataclasses import dataclass

import numpy as np

from roofline.common.errors import UnsupportedError
from roofline.ops import formats


@dataclass(frozen=True)
class Groups:
    """q: int8 [rows, columns]; scale: float32 [rows, columns / group]; minimum: the same or None (symmetric)."""

    q: np.ndarray
    scale: np.ndarray
    minimum: np.ndarray | None
    group: int


def unpack(raw: np.ndarray, name: str, shape: tuple[int, int]) -> Groups:
    """The groups of a matrix. raw: its bytes, uint8. Raises UnsupportedError on a format without integer groups."""
    form = formats.get(name)
    if form.integers is None:
        names = sorted(other.name for other in formats.FORMATS.values() if other.integers is not None)
        raise UnsupportedError(f"format {name} with 8-bit activations", "it has no integer groups", names)
    q, scale, minimum = form.integers(raw.reshape(-1, form.block_bytes))
    rows, columns = shape
    group = q.shape[1] // scale.shape[1]
    fold = (rows, columns // group)
    q, minimum = q.astype(np.int8).reshape(rows, columns), None if minimum is None else minimum.reshape(fold)
    return Groups(q, scale.reshape(fold), minimum, group)
