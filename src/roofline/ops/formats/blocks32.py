"""Formats of 32 weights with one float16 scale: Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 (layouts of ggml's `ggml-common.h`).

Nibble formats hold weight i in the low half and weight i + 16 in the high half of byte i; the fifth bit of weight i is
bit i of 32.
"""

import numpy as np

from roofline.ops.formats.base import Integers, integer_format

_BLOCK = 32


def half(blocks: np.ndarray, start: int) -> np.ndarray:
    """float32 [blocks, 1] of the float16 at byte `start`."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def half_bytes(values: np.ndarray) -> np.ndarray:
    """The bytes of the values as float16."""
    with np.errstate(over="ignore"):  # too large becomes infinity, as in every converter
        return values.astype("<f2").view(np.uint8)


def inverse(scale: np.ndarray) -> np.ndarray:
    """1 / scale, and 0 where the scale is 0."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """uint8 [blocks, 16] -> uint8 [blocks, 32]."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=1)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    return codes[:, :16] | (codes[:, 16:] << np.uint8(4))


def _integers_q8_0(blocks: np.ndarray) -> Integers:
    """Bytes: scale f16, 32 int8."""
    return blocks[:, 2:].view(np.int8), half(blocks, 0), None


def _pack_q8_0(values: np.ndarray) -> np.ndarray:
    scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    scaled = values * inverse(scale)
    codes = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)  # halves away from zero
    return np.concatenate([half_bytes(scale), codes.view(np.uint8)], axis=1)


def _integers_q4_0(blocks: np.ndarray) -> Integers:
    """Bytes: scale f16, 16 bytes of nibbles; a weight is scale * (code - 8)."""
    return unpack_nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8), half(blocks, 0), None


def _pack_q4_0(values: np.ndarray) -> np.ndarray:
    # The value of largest magnitude, with its sign, gets code 0 (= -8): both signs use the full range.
    extreme = np.take_along_axis(values, np.abs(values).argmax(axis=1, keepdims=True), axis=1)
    scale = extreme / np.float32(-8)
    codes = np.trunc(values * inverse(scale) + np.float32(8.5)).clip(0, 15).astype(np.uint8)
    return np.concatenate([half_bytes(scale), pack_nibbles(codes)], axis=1)


def _integers_q4_1(blocks: np.ndarray) -> Integers:
    """Bytes: scale f16, minimum f16, 16 bytes of nibbles; a weight is scale * code + minimum."""
    return unpack_nibbles(blocks[:, 4:]), half(blocks, 0), half(blocks, 2)


def _pack_q4_1(values: np.ndarray) -> np.ndarray:
    low = values.min(axis=1, keepdims=True)
    scale = (values.max(axis=1, keepdims=True) - low) / np.float32(15)
    codes = np.trunc((values - low) * inverse(scale) + np.float32(0.5)).clip(0, 15).astype(np.uint8)
    return np.concatenate([half_bytes(scale), half_bytes(low), pack_nibbles(codes)], axis=1)


def _fifth_bits(blocks: np.ndarray, start: int) -> np.ndarray:
    """uint8 [blocks, 32]: 16 where bit i of the four bytes from `start` on is set."""
    return np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little") << np.uint8(4)


def _pack_fifth_bits(codes: np.ndarray) -> np.ndarray:
    return np.packbits(codes >> np.uint8(4), axis=1, bitorder="little")


def _integers_q5_0(blocks: np.ndarray) -> Integers:
    """Bytes: scale f16, 4 of fifth bits, 16 of nibbles; a weight is scale * (code - 16)."""
    codes = unpack_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return codes.view(np.int8) - np.int8(16), half(blocks, 0), None


def _pack_q5_0(values: np.ndarray) -> np.ndarray:
    extreme = np.take_along_axis(values, np.abs(values).argmax(axis=1, keepdims=True), axis=1)
    scale = extreme / np.float32(-16)
    codes = np.trunc(values * inverse(scale) + np.float32(16.5)).clip(0, 31).astype(np.uint8)
    return np.concatenate([half_bytes(scale), _pack_fifth_bits(codes), pack_nibbles(codes & np.uint8(15))], axis=1)


def _integers_q5_1(blocks: np.ndarray) -> Integers:
    """Bytes: scale f16, minimum f16, 4 of fifth bits, 16 of nibbles; a weight is scale * code + minimum."""
    return unpack_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4), half(blocks, 0), half(blocks, 2)


def _pack_q5_1(values: np.ndarray) -> np.ndarray:
    low = values.min(axis=1, keepdims=True)
    scale = (values.max(axis=1, keepdims=True) - low) / np.float32(31)
    codes = np.trunc((values - low) * inverse(scale) + np.float32(0.5)).clip(0, 31).astype(np.uint8)
    head = half_bytes(scale), half_bytes(low)
    return np.concatenate([*head, _pack_fifth_bits(codes), pack_nibbles(codes & np.uint8(15))], axis=1)


FORMATS = (
    integer_format("Q4_0", _BLOCK, 18, 2, _integers_q4_0, _pack_q4_0),
    integer_format("Q4_1", _BLOCK, 20, 3, _integers_q4_1, _pack_q4_1),
    integer_format("Q5_0", _BLOCK, 22, 6, _integers_q5_0, _pack_q5_0),
    integer_format("Q5_1", _BLOCK, 24, 7, _integers_q5_1, _pack_q5_1),
    integer_format("Q8_0", _BLOCK, 34, 8, _integers_q8_0, _pack_q8_0),
)
