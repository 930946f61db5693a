"""K-quants, 256 weights with two levels of scales: Q4_K, Q5_K, Q6_K (layouts of ggml's `ggml-common.h`).

`pack` is the plain scheme: scales from the extremes of each group, no search for the least squared error. It is for
random weights and tests; files made for quality come from llama.cpp's quantiser.
"""

import numpy as np

from roofline.ops.formats.base import Integers, integer_format
from roofline.ops.formats.blocks32 import half, half_bytes, inverse

_BLOCK = 256


def affine_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [blocks, 12] -> 6-bit scales and minima, uint8 [blocks, 8] each.

    Bytes 0-3 hold scales 0-3, bytes 4-7 minima 0-3 (lower 6 bits each). Scale 4+j is the low half of byte 8+j with the
    top two bits of byte j above it; minimum 4+j is its high half with the top two bits of byte 4+j.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales, minima


def _pack_scales(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    first = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    second = minima[:, :4] | ((minima[:, 4:] >> 4) << 6)
    third = (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4)
    return np.concatenate([first, second, third], axis=1)


def _affine(blocks: np.ndarray, codes: np.ndarray) -> Integers:
    """Q4_K, Q5_K: (d * scale) * code - (dmin * minimum), a scale and a minimum per 32 weights. codes: [n, 8, 32]."""
    scales, minima = (part.astype(np.float32) for part in affine_scales(blocks[:, 4:16]))
    return codes.reshape(-1, _BLOCK), half(blocks, 0) * scales, -(half(blocks, 2) * minima)


def _low_nibbles(packed: np.ndarray) -> np.ndarray:
    """uint8 [n, 128] -> [n, 8, 32]: each 32 bytes hold group 2j in their low and group 2j + 1 in their high halves."""
    quads = packed.reshape(-1, 4, 32)
    return np.stack([quads & np.uint8(15), quads >> np.uint8(4)], axis=2).reshape(-1, 8, 32)


def codes_q4_k(blocks: np.ndarray) -> np.ndarray:
    """uint8 [n, 144] -> [n, 8, 32]. Bytes: d f16, dmin f16, 12 of scales and minima, 128 of nibbles."""
    return _low_nibbles(blocks[:, 16:144])


def codes_q5_k(blocks: np.ndarray) -> np.ndarray:
    """uint8 [n, 176] -> [n, 8, 32]. Bytes: d f16, dmin f16, 12 of scales and minima, 32 of fifth bits (bit g of byte i:
    group g), 128 of nibbles."""
    fifth = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None]) & np.uint8(1)  # [n, 8, 32]
    return _low_nibbles(blocks[:, 48:176]) | (fifth << np.uint8(4))


def codes_q6_k(blocks: np.ndarray) -> np.ndarray:
    """uint8 [n, 210] -> [n, 16, 16], see `_integers_q6_k`."""
    low = blocks[:, 0:128].reshape(-1, 2, 64)
    low = np.stack([low & np.uint8(15), low >> np.uint8(4)], axis=2).reshape(-1, 16, 16)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & np.uint8(3)  # [n, 2, 4, 32]
    return low | (high.reshape(-1, 16, 16) << np.uint8(4))


def _affine_codes(values: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """The 16 bytes before the codes (uint8 [n, 16]) and the codes in 0..top (uint8 [n, 8, 32])."""
    groups = values.reshape(-1, 8, 32)
    low = np.minimum(groups.min(axis=2), 0)  # minima are stored negated and cannot be negative
    step = (groups.max(axis=2) - low) / np.float32(top)
    d = half_bytes(step.max(axis=1, keepdims=True) / np.float32(63))
    dmin = half_bytes((-low).max(axis=1, keepdims=True) / np.float32(63))
    d_stored, dmin_stored = half(d, 0), half(dmin, 0)
    scales = np.rint(step * inverse(d_stored)).clip(0, 63).astype(np.uint8)
    minima = np.rint(-low * inverse(dmin_stored)).clip(0, 63).astype(np.uint8)
    step_stored = d_stored * scales.astype(np.float32)  # codes are chosen against what will be read back
    offset = dmin_stored * minima.astype(np.float32)
    codes = np.rint((groups + offset[:, :, None]) * inverse(step_stored)[:, :, None]).clip(0, top).astype(np.uint8)
    return np.concatenate([d, dmin, _pack_scales(scales, minima)], axis=1), codes


def _pack_nibble_groups(codes: np.ndarray) -> np.ndarray:
    pairs = (codes & np.uint8(15)).reshape(-1, 4, 2, 32)
    return (pairs[:, :, 0] | (pairs[:, :, 1] << np.uint8(4))).reshape(-1, 128)


def _pack_q4_k(values: np.ndarray) -> np.ndarray:
    head, codes = _affine_codes(values, 15)
    return np.concatenate([head, _pack_nibble_groups(codes)], axis=1)


def _pack_q5_k(values: np.ndarray) -> np.ndarray:
    head, codes = _affine_codes(values, 31)
    fifth = np.bitwise_or.reduce((codes >> np.uint8(4)) << np.arange(8, dtype=np.uint8)[None, :, None], axis=1)
    return np.concatenate([head, fifth, _pack_nibble_groups(codes)], axis=1)


def _integers_q6_k(blocks: np.ndarray) -> Integers:
    """Bytes: 128 of low nibbles, 64 of upper bit pairs, 16 int8 scales (one per 16 weights), d f16.

    Each half block of 128 weights has 64 nibble bytes (low halves: weights 0-63, high halves: 64-127) and 32 bytes of
    bit pairs (pair k of byte i: weight 32k + i). A weight is (d * scale) * (code - 32).
    """
    q = codes_q6_k(blocks).reshape(-1, _BLOCK).view(np.int8) - np.int8(32)
    return q, half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32), None


def signed_codes(values: np.ndarray, middle: int, top_scale: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of (d * scale) * (code - middle), a signed scale for 16 weights: bytes of d, uint8 [n, 2]; scales from
    -top_scale - 1 to top_scale, int8 [n, 16]; codes from 0 to 2 * middle - 1, uint8 [n, 16, 16]."""
    groups = values.reshape(-1, 16, 16)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(axis=2, keepdims=True), axis=2)[:, :, 0]
    step = extreme / np.float32(-middle)  # signed: the extreme gets code 0 (= -middle)
    d = half_bytes(np.abs(step).max(axis=1, keepdims=True) / np.float32(top_scale))
    scales = np.rint(step * inverse(half(d, 0))).clip(-top_scale - 1, top_scale).astype(np.int8)
    step_stored = half(d, 0) * scales.astype(np.float32)
    codes = np.rint(groups * inverse(step_stored)[:, :, None]).clip(-middle, middle - 1) + middle
    return d, scales, codes.astype(np.uint8)


def _pack_q6_k(values: np.ndarray) -> np.ndarray:
    d, scales, codes = signed_codes(values, 32, 127)
    halves = (codes & np.uint8(15)).reshape(-1, 2, 2, 64)
    low = (halves[:, :, 0] | (halves[:, :, 1] << np.uint8(4))).reshape(-1, 128)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]
    high = np.bitwise_or.reduce((codes >> np.uint8(4)).reshape(-1, 2, 4, 32) << shifts, axis=2).reshape(-1, 64)
    return np.concatenate([low, high, scales.view(np.uint8), d], axis=1)


FORMATS = (
    integer_format("Q4_K", _BLOCK, 144, 12, lambda blocks: _affine(blocks, codes_q4_k(blocks)), _pack_q4_k),
    integer_format("Q5_K", _BLOCK, 176, 13, lambda blocks: _affine(blocks, codes_q5_k(blocks)), _pack_q5_k),
    integer_format("Q6_K", _BLOCK, 210, 14, _integers_q6_k, _pack_q6_k),
)
