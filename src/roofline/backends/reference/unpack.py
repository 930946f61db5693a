"""Quantised blocks as integers and scales: weight = scale * q + minimum, which is what integer dot products need.

The layouts are GGUF's. `ops.formats` has the same blocks as float32; a test holds the two together.
"""

from collections.abc import Callable
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


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at a byte offset, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[..., n] bytes -> [..., 2n]: all low halves, then all high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.int16)


def _q8_0(blocks: np.ndarray) -> Unpacked:
    return blocks[:, 2:].view(np.int8), _half(blocks, 0), None


def _q4_0(blocks: np.ndarray) -> Unpacked:
    return _nibbles(blocks[:, 2:]) - 8, _half(blocks, 0), None


def _q4_1(blocks: np.ndarray) -> Unpacked:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _k_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """12 bytes -> eight 6-bit scales and eight 6-bit minima: the last four of each keep their top bits elsewhere."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=1)
    minimum = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=1)
    return scale.astype(np.float32), minimum.astype(np.float32)


def _q4_k(blocks: np.ndarray) -> Unpacked:
    scale, minimum = _k_scales(blocks[:, 4:16])
    q = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256)
    return q, _half(blocks, 0) * scale, -(_half(blocks, 2) * minimum)


def _q5_k(blocks: np.ndarray) -> Unpacked:
    scale, minimum = _k_scales(blocks[:, 4:16])
    q = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None]) & 1
    return (q + 16 * fifth).reshape(-1, 256), _half(blocks, 0) * scale, -(_half(blocks, 2) * minimum)


def _q6_k(blocks: np.ndarray) -> Unpacked:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))  # [blocks, halves, 128]
    shifts = np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    q = low + 16 * high.reshape(-1, 2, 128) - 32
    scale = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return q.reshape(-1, 256), _half(blocks, 208) * scale, None


_UNPACKERS: dict[str, Callable[[np.ndarray], Unpacked]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
