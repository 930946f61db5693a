"""E4M3: 8-bit floats of OCP's flavour (e4m3fn), 128 of a row with one float32 scale; a weight is scale * value.

What checkpoints of 8-bit floats are read as (`weights/quantised/float8.py`), whether they have a scale for each
matrix, row or block. Values: sign, 4 bits of exponent (bias 7), 3 of mantissa; largest 448, no infinity, NaN is all
ones.
"""

import numpy as np

from roofline.ops.formats.base import Format
from roofline.ops.formats.blocks32 import inverse

BLOCK = 128
LARGEST = 448.0
NAN = 0x7F


def _magnitudes() -> np.ndarray:
    """float32 [128]: the value of each code without its sign."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, (code & 7).astype(np.float64)
    values = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    values[NAN] = np.nan
    return values.astype(np.float32)


_MAGNITUDES = _magnitudes()
_VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_MIDDLES = (_MAGNITUDES[:126] + _MAGNITUDES[1:127]) / np.float32(2)  # exact: where one code gives way to the next


def split(raw: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The codes uint8 [rows, columns] and scales float32 [rows, columns / 128] of a matrix's bytes."""
    blocks = raw.reshape(rows, -1, BLOCK + 4)
    scale = np.ascontiguousarray(blocks[:, :, :4]).view("<f4")[:, :, 0]
    return np.ascontiguousarray(blocks[:, :, 4:]).reshape(rows, -1), scale


def join(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """A matrix's bytes, uint8: the inverse of `split`."""
    out = np.empty((*scale.shape, BLOCK + 4), np.uint8)
    out[:, :, :4] = np.ascontiguousarray(scale, "<f4").view(np.uint8).reshape(*scale.shape, 4)
    out[:, :, 4:] = codes.reshape(*scale.shape, BLOCK)
    return out.reshape(-1)


def _unpack(blocks: np.ndarray) -> np.ndarray:
    """Bytes: scale f32, 128 codes."""
    return _VALUES[blocks[:, 4:]] * np.ascontiguousarray(blocks[:, :4]).view("<f4")


def _pack(values: np.ndarray) -> np.ndarray:
    """The largest of a block becomes 448; the others the nearest, ties to the even code."""
    amax = np.abs(values).max(axis=1, keepdims=True)
    scale = (amax / np.float32(LARGEST)).astype(np.float32)
    scaled = np.abs(values) * inverse(scale)
    codes = np.searchsorted(_MIDDLES, scaled)
    tie = _MIDDLES[np.minimum(codes, 125)] == scaled
    codes = np.where(np.isnan(scaled), NAN, codes + (tie & (codes % 2 == 1)))
    signed = codes.astype(np.uint8) | np.where(np.signbit(values), np.uint8(128), np.uint8(0))
    return np.concatenate([scale.view(np.uint8).reshape(-1, 4), signed], axis=1)


FORMATS = (Format(name="E4M3", block=BLOCK, block_bytes=BLOCK + 4, gguf_type=-1, unpack=_unpack, pack=_pack),)
