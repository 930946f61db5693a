"""Quantised blocks as integers and scales: weight = scale * q + minimum, which is what integer dot products need.

The layouts are GGUF's. `ops.formats` has the same blocks as float32; a test holds the two together.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from roofline.common.errors import UnsupportedError
from roofline.ops import formats
from roofline.ops.formats.blocks32 import half
from roofline.ops.formats.blocks256 import affine_scales, codes_q4_k, codes_q5_k, codes_q6_k


@dataclass(frozen=True)
class Groups:
    """q: int8 [rows, columns]; scale: float32 [rows, columns / group]; minimum: the same or None (symmetric)."""

    q: np.ndarray
    scale: np.ndarray
    minimum: np.ndarray | None
    group: int


def unpack(raw: np.ndarray, name: str, shape: tuple[int, int]) -> Groups:
    """The groups of a matrix. raw: its bytes, uint8. Raises UnsupportedError on a format without integer groups."""
    if name not in _UNPACKERS:
        raise UnsupportedError(f"format {name} with 8-bit activations", "it has no integer groups", sorted(_UNPACKERS))
    blocks = raw.reshape(-1, formats.get(name).block_bytes)
    q, scale, minimum = _UNPACKERS[name](blocks)  # [blocks, block], [blocks, groups of a block]
    rows, columns = shape
    group = q.shape[1] // scale.shape[1]
    fold = (rows, columns // group)
    return Groups(
        q.astype(np.int8).reshape(rows, columns),
        scale.reshape(fold),
        None if minimum is None else minimum.reshape(fold),
        group,
    )


Unpacked = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def _nibbles(blocks: np.ndarray, start: int) -> np.ndarray:
    """[blocks, 32]: the low halves of the 16 bytes from `start` on, then their high halves."""
    packed = blocks[:, start:]
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.int16)


def _affine(codes: np.ndarray, blocks: np.ndarray) -> Unpacked:
    """Q4_K and Q5_K: eight groups with a scale and a minimum each, in steps of the block's two float16."""
    scale, minimum = (part.astype(np.float32) for part in affine_scales(blocks[:, 4:16]))
    return codes.reshape(-1, 256), half(blocks, 0) * scale, -(half(blocks, 2) * minimum)


def _q6_k(blocks: np.ndarray) -> Unpacked:
    scale = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return codes_q6_k(blocks).reshape(-1, 256).astype(np.int16) - 32, half(blocks, 208) * scale, None


_UNPACKERS: dict[str, Callable[[np.ndarray], Unpacked]] = {
    "Q8_0": lambda blocks: (blocks[:, 2:].view(np.int8), half(blocks, 0), None),
    "Q4_0": lambda blocks: (_nibbles(blocks, 2) - 8, half(blocks, 0), None),
    "Q4_1": lambda blocks: (_nibbles(blocks, 4), half(blocks, 0), half(blocks, 2)),
    "Q4_K": lambda blocks: _affine(codes_q4_k(blocks), blocks),
    "Q5_K": lambda blocks: _affine(codes_q5_k(blocks), blocks),
    "Q6_K": _q6_k,
}
