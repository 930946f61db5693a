"""K-quants of two and three bits, 16 groups of 16 weights: Q2_K, Q3_K (layouts of ggml's `ggml-common.h`).

Both hold the lower two bits of their codes in 64 bytes: each half block of 128 weights has 32 of them, and pair k of
byte i belongs to weight 32k + i. `pack` is the plain scheme of blocks256.py.
"""

import numpy as np

from roofline.ops.formats.base import Integers, integer_format
from roofline.ops.formats.blocks32 import half, half_bytes, inverse
from roofline.ops.formats.blocks256 import signed_codes

_BLOCK = 256
_PAIRS = np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]


def bit_pairs(packed: np.ndarray) -> np.ndarray:
    """uint8 [n, 64] -> [n, 256], values 0 to 3."""
    return ((packed.reshape(-1, 2, 1, 32) >> _PAIRS) & np.uint8(3)).reshape(-1, _BLOCK)


def pack_bit_pairs(codes: np.ndarray) -> np.ndarray:
    """The inverse of `bit_pairs`."""
    return np.bitwise_or.reduce(codes.reshape(-1, 2, 4, 32) << _PAIRS, axis=2).reshape(-1, 64)


def _integers_q2_k(blocks: np.ndarray) -> Integers:
    """Bytes: 16 of a scale (low half) and a minimum, 64 of bit pairs, d f16, dmin f16."""
    scales, minima = (
        part.astype(np.float32) for part in (blocks[:, :16] & np.uint8(15), blocks[:, :16] >> np.uint8(4))
    )
    return bit_pairs(blocks[:, 16:80]), half(blocks, 80) * scales, -(half(blocks, 82) * minima)


def _pack_q2_k(values: np.ndarray) -> np.ndarray:
    groups = values.reshape(-1, 16, 16)
    low = np.minimum(groups.min(axis=2), 0)  # minima are stored negated and cannot be negative
    step = (groups.max(axis=2) - low) / np.float32(3)
    d = half_bytes(step.max(axis=1, keepdims=True) / np.float32(15))
    dmin = half_bytes((-low).max(axis=1, keepdims=True) / np.float32(15))
    scales = np.rint(step * inverse(half(d, 0))).clip(0, 15).astype(np.uint8)
    minima = np.rint(-low * inverse(half(dmin, 0))).clip(0, 15).astype(np.uint8)
    step_stored = half(d, 0) * scales.astype(np.float32)  # codes are chosen against what will be read back
    offset = half(dmin, 0) * minima.astype(np.float32)
    codes = np.rint((groups + offset[:, :, None]) * inverse(step_stored)[:, :, None]).clip(0, 3).astype(np.uint8)
    return np.concatenate([scales | (minima << np.uint8(4)), pack_bit_pairs(codes), d, dmin], axis=1)


def q3_scales(packed: np.ndarray) -> np.ndarray:
    """uint8 [n, 12] -> int8 [n, 16], 6 bits each, less 32. The low halves of the first eight bytes are the lower four
    bits of scales 0 to 7, their high halves of 8 to 15; bit pair k of byte 8 + i is above those of scale 4k + i."""
    low = np.concatenate([packed[:, :8] & np.uint8(15), packed[:, :8] >> np.uint8(4)], axis=1)
    high = (packed[:, None, 8:] >> np.arange(0, 8, 2, dtype=np.uint8)[None, :, None]) & np.uint8(3)  # [n, 4, 4]
    return (low | (high.reshape(-1, 16) << np.uint8(4))).view(np.int8) - np.int8(32)


def _pack_q3_scales(scales: np.ndarray) -> np.ndarray:
    codes = (scales + np.int8(32)).view(np.uint8)
    low = (codes[:, :8] & np.uint8(15)) | ((codes[:, 8:] & np.uint8(15)) << np.uint8(4))
    pairs = (codes >> np.uint8(4)).reshape(-1, 4, 4) << np.arange(0, 8, 2, dtype=np.uint8)[None, :, None]
    return np.concatenate([low, np.bitwise_or.reduce(pairs, axis=1)], axis=1)


def codes_q3_k(blocks: np.ndarray) -> np.ndarray:
    """uint8 [n, 110] -> [n, 256], 0 to 7, see `_integers_q3_k`."""
    third = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[None, :, None]) & np.uint8(1)  # [n, 8, 32]
    return bit_pairs(blocks[:, 32:96]) | (third.reshape(-1, _BLOCK) << np.uint8(2))


def _integers_q3_k(blocks: np.ndarray) -> Integers:
    """Bytes: 32 of third bits (bit g of byte i: weight 32g + i), 64 of bit pairs, 12 of scales, d f16; a weight is
    (d * scale) * (code - 4)."""
    q = codes_q3_k(blocks).view(np.int8) - np.int8(4)
    return q, half(blocks, 108) * q3_scales(blocks[:, 96:108]).astype(np.float32), None


def _pack_q3_k(values: np.ndarray) -> np.ndarray:
    d, scales, codes = signed_codes(values, 4, 31)
    codes = codes.reshape(-1, 8, 32)
    third = np.bitwise_or.reduce((codes >> np.uint8(2)) << np.arange(8, dtype=np.uint8)[None, :, None], axis=1)
    return np.concatenate([third, pack_bit_pairs(codes & np.uint8(3)), _pack_q3_scales(scales), d], axis=1)


FORMATS = (
    integer_format("Q2_K", _BLOCK, 84, 10, _integers_q2_k, _pack_q2_k),
    integer_format("Q3_K", _BLOCK, 110, 11, _integers_q3_k, _pack_q3_k),
)
