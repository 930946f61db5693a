"""NF4: bitsandbytes' 4-bit floats (Dettmers et al. 2023), 64 of a row with one float32 scale, the largest magnitude.

A weight is scale * value, rounded once to float32: what the library computes before it rounds to a model's 16 bits.
"""

import numpy as np

from roofline.ops.formats.base import Format
from roofline.ops.formats.blocks32 import inverse

BLOCK = 64
# The mean quantiles of a normal distribution, as the library stores them (`quant_map`), float32 [16].
VALUES = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
_MIDDLES = (VALUES[:-1] + VALUES[1:]) / np.float32(2)


def join(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """A matrix's bytes. codes: uint8 [rows, columns / 2], the first of two in the high nibble; scale: float32
    [rows, columns / 64]."""
    out = np.empty((*scale.shape, 4 + BLOCK // 2), np.uint8)
    out[:, :, :4] = np.ascontiguousarray(scale, "<f4").view(np.uint8).reshape(*scale.shape, 4)
    out[:, :, 4:] = codes.reshape(*scale.shape, BLOCK // 2)
    return out.reshape(-1)


def _unpack(blocks: np.ndarray) -> np.ndarray:
    """Bytes: scale f32, 32 bytes of two codes each."""
    codes = np.stack([blocks[:, 4:] >> np.uint8(4), blocks[:, 4:] & np.uint8(15)], axis=2).reshape(-1, BLOCK)
    return VALUES[codes] * np.ascontiguousarray(blocks[:, :4]).view("<f4")


def _pack(values: np.ndarray) -> np.ndarray:
    """The nearest value of each; a tie goes to the lower."""
    scale = np.abs(values).max(axis=1, keepdims=True)
    codes = np.searchsorted(_MIDDLES, values * inverse(scale)).astype(np.uint8)
    pairs = codes[:, ::2] << np.uint8(4) | codes[:, 1::2]
    return join(pairs, scale).reshape(-1, 4 + BLOCK // 2)


FORMATS = (Format(name="NF4", block=BLOCK, block_bytes=4 + BLOCK // 2, gguf_type=-1, unpack=_unpack, pack=_pack),)
