"""INT4 and INT8: integers of which 32 of a row have a float32 scale, INT4's a zero point too.

What checkpoints of GPTQ, AWQ and compressed-tensors are read as where Q4_0 and Q8_0 cannot hold their scales and zero
points (`weights/quantised`). A weight is scale * (code - zero) and scale * q. Scales of those checkpoints come from 16
bits: the product then has at most 16 bits of mantissa, so float32 holds it exactly.
"""

import numpy as np

from roofline.ops.formats.base import Integers, integer_format
from roofline.ops.formats.blocks32 import inverse, pack_nibbles, unpack_nibbles

BLOCK = 32


def join_int4(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """A matrix's bytes as INT4. codes: uint8 [rows, columns], 0 to 15; scale: float32 [rows, columns / 32]; zero:
    uint8, the same."""
    out = np.empty((*scale.shape, 21), np.uint8)
    out[:, :, :4] = _float_bytes(scale)
    out[:, :, 4] = zero
    out[:, :, 5:] = pack_nibbles(codes.reshape(-1, BLOCK)).reshape(*scale.shape, 16)
    return out.reshape(-1)


def join_int8(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """A matrix's bytes as INT8. values: int8 [rows, columns]; scale: float32 [rows, columns / 32]."""
    out = np.empty((*scale.shape, 36), np.uint8)
    out[:, :, :4] = _float_bytes(scale)
    out[:, :, 4:] = np.ascontiguousarray(values).view(np.uint8).reshape(*scale.shape, BLOCK)
    return out.reshape(-1)


def _float_bytes(scale: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(scale, "<f4").view(np.uint8).reshape(*scale.shape, 4)


def _scale(blocks: np.ndarray) -> np.ndarray:
    """float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, :4]).view("<f4")


def _integers_int4(blocks: np.ndarray) -> Integers:
    """Bytes: scale f32, zero point, 16 bytes of nibbles (code i in the low half of byte i, i + 16 in the high half)."""
    zero = blocks[:, 4:5].astype(np.int16)
    q = (unpack_nibbles(blocks[:, 5:]).astype(np.int16) - zero).clip(-128, 127).astype(np.int8)
    return q, _scale(blocks), None


def _pack_int4(values: np.ndarray) -> np.ndarray:
    low = np.minimum(values.min(axis=1, keepdims=True), 0)
    scale = ((np.maximum(values.max(axis=1, keepdims=True), 0) - low) / np.float32(15)).astype(np.float32)
    zero = np.rint(-low * inverse(scale))
    codes = (np.rint(values * inverse(scale)) + zero).clip(0, 15).astype(np.uint8)
    return join_int4(codes, scale, zero.astype(np.uint8)).reshape(-1, 21)


def _integers_int8(blocks: np.ndarray) -> Integers:
    """Bytes: scale f32, 32 int8."""
    return blocks[:, 4:].view(np.int8), _scale(blocks), None


def _pack_int8(values: np.ndarray) -> np.ndarray:
    scale = (np.abs(values).max(axis=1, keepdims=True) / np.float32(127)).astype(np.float32)
    q = np.rint(values * inverse(scale)).clip(-127, 127).astype(np.int8)
    return join_int8(q, scale).reshape(-1, 36)


FORMATS = (
    integer_format("INT4", BLOCK, 21, -1, _integers_int4, _pack_int4),
    integer_format("INT8", BLOCK, 36, -1, _integers_int8, _pack_int8),
)
