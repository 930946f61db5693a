"""Formats without blocks: F32, F16, BF16, all little-endian."""

import numpy as np

from roofline.ops.formats.base import Format
from roofline.ops.formats.blocks32 import half_bytes


def _unpack_f32(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks).view("<f4")


def _pack_f32(values: np.ndarray) -> np.ndarray:
    return values.astype("<f4", copy=False).view(np.uint8)


def _unpack_f16(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _unpack_bf16(blocks: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_bf16(values: np.ndarray) -> np.ndarray:
    """The upper halves (uint16) of float32 values, rounded to nearest even; NaN stays NaN (made quiet)."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    # No carry out of bit 31: the largest number that is not NaN is infinity, whose lower half is zero.
    rounded = bits + np.where(nan, 0, np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))).astype(np.uint32)
    return np.where(nan, (bits >> np.uint32(16)) | np.uint32(0x40), rounded >> np.uint32(16)).astype(np.uint16)


def _pack_bf16(values: np.ndarray) -> np.ndarray:
    return round_bf16(values).astype("<u2").view(np.uint8)


FORMATS = (
    Format(name="F32", block=1, block_bytes=4, gguf_type=0, unpack=_unpack_f32, pack=_pack_f32),
    Format(name="F16", block=1, block_bytes=2, gguf_type=1, unpack=_unpack_f16, pack=half_bytes),
    Format(name="BF16", block=1, block_bytes=2, gguf_type=30, unpack=_unpack_bf16, pack=_pack_bf16),
)
