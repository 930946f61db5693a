"""Formats whose 4-bit codes stand for the values of a table: IQ4_NL, IQ4_XS, MXFP4 (layouts of ggml's `ggml-common.h`),
and five of ours for weights from codebooks.

Ours, *_T32 and *_T16, are in no file. A block of 256 weights is a scale f32, a signed byte for each 32 or 16 weights
and nibbles as in Q4_0; a weight is (scale * byte) * table[code]. Blocks of files are turned into them where a format
names one as `packed_as`. Every value stays what it was: scale * byte is exact, and the one product left is rounded as
the file's definition rounds it. `TABLES` are the tables of native/formats.h.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from roofline.ops.formats.base import Format, Integers, integer_format
from roofline.ops.formats.blocks32 import half, half_bytes, inverse, pack_nibbles, unpack_nibbles

_BLOCK = 256
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values of the 4-bit float
_IQ3_XXS = (4, 12, 20, 28, 36, 44, 52, 62)
_IQ3_S = (1, 3, 5, 7, 9, 11, 13, 15)
TABLES: dict[str, tuple[int, ...]] = {
    "IQ4_NL": _IQ4,
    "MXFP4": _E2M1,
    "IQ4_T32": _IQ4,
    "IQ3_XXS_T32": (*_IQ3_XXS, *(-value for value in _IQ3_XXS)),
    "IQ3_S_T32": (*_IQ3_S, *(-value for value in _IQ3_S)),
    "IQ2_T32": (-43, -25, -9, -8, -7, -1, 0, 1, 7, 8, 9, 25, 43, 0, 0, 0),
    "IQ2_T16": (-43, -25, -9, -8, -7, -1, 0, 1, 7, 8, 9, 25, 43, 0, 0, 0),
}


@dataclass(frozen=True)
class Coded:
    """Blocks as what one of our formats holds.

    scale: float32 [n, 1]; factors: int8 [n, 8 or 16]; values: int8 [n, 256], each in the format's table.
    """

    scale: np.ndarray
    factors: np.ndarray
    values: np.ndarray

    def integers(self) -> Integers:
        """The same as `Integers`."""
        return self.values, self.scale * self.factors.astype(np.float32), None

    def blocks(self, name: str) -> np.ndarray:
        """uint8 [n, bytes of a block] of the format of ours of that name."""
        codes = _code_of(TABLES[name])[self.values.view(np.uint8)]
        scale = np.ascontiguousarray(self.scale, "<f4").view(np.uint8)
        nibbles = pack_nibbles(codes.reshape(-1, 32)).reshape(-1, 128)
        return np.concatenate([scale.reshape(-1, 4), self.factors.view(np.uint8), nibbles], axis=1)


def _code_of(table: tuple[int, ...]) -> np.ndarray:
    """uint8 [256]: the code of each int8 value, by its bits."""
    codes = np.zeros(256, np.uint8)
    for code in reversed(range(16)):  # where a value appears twice, its first code
        codes[table[code] & 255] = code
    return codes


def coded_format(
    name: str,
    block_bytes: int,
    gguf_type: int,
    coded: Callable[[np.ndarray], Coded],
    packed_as: str,
    pack: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Format:
    """A format of files with 256 weights a block that is multiplied as one of ours."""

    def unpack(blocks: np.ndarray) -> np.ndarray:
        q, scale, _ = coded(blocks).integers()
        return (q.reshape(*scale.shape, -1).astype(np.float32) * scale[..., None]).reshape(-1, _BLOCK)

    def convert(blocks: np.ndarray) -> np.ndarray:
        return coded(blocks).blocks(packed_as)

    return Format(
        name=name,
        block=_BLOCK,
        block_bytes=block_bytes,
        gguf_type=gguf_type,
        unpack=unpack,
        pack=pack,
        packed_as=packed_as,
        convert=convert,
    )


def _ours(name: str, factors: int) -> Format:
    table = np.array(TABLES[name], np.int8)

    def integers(blocks: np.ndarray) -> Integers:
        scale = np.ascontiguousarray(blocks[:, :4]).view("<f4")
        values = table[unpack_nibbles(blocks[:, 4 + factors :].reshape(-1, 16))].reshape(-1, _BLOCK)
        return values, scale * blocks[:, 4 : 4 + factors].view(np.int8).astype(np.float32), None

    return integer_format(name, _BLOCK, 4 + factors + 128, -1, integers, None, stored=False)


def _integers_iq4_nl(blocks: np.ndarray) -> Integers:
    """Bytes: scale f16, 16 of nibbles."""
    return np.array(_IQ4, np.int8)[unpack_nibbles(blocks[:, 2:])], half(blocks, 0), None


def _nearest_iq4(scaled: np.ndarray) -> np.ndarray:
    """The codes of the nearest values of the table, which ascends."""
    table = np.array(_IQ4, np.float32)
    return np.searchsorted((table[:-1] + table[1:]) / np.float32(2), scaled).astype(np.uint8)


def _pack_iq4_nl(values: np.ndarray) -> np.ndarray:
    extreme = np.take_along_axis(values, np.abs(values).argmax(axis=1, keepdims=True), axis=1)
    scale = half_bytes(extreme / np.float32(-127))  # signed: the extreme gets code 0
    codes = _nearest_iq4(values * inverse(half(scale, 0)))
    return np.concatenate([scale, pack_nibbles(codes)], axis=1)


def _exponents(codes: np.ndarray) -> np.ndarray:
    """float32 of E8M0 scales for doubled values: 2^(code - 128)."""
    return np.ldexp(np.float32(1), codes.astype(np.int32) - 128).astype(np.float32)


def _integers_mxfp4(blocks: np.ndarray) -> Integers:
    """Bytes: a power of two (E8M0), 16 of nibbles that are 4-bit floats (E2M1).

    Scales reach from 2^-128 to 2^127, beyond float16. Kernels flush the two below 2^-126 to zero.
    """
    return np.array(_E2M1, np.int8)[unpack_nibbles(blocks[:, 1:])], _exponents(blocks[:, :1]), None


def _pack_mxfp4(values: np.ndarray) -> np.ndarray:
    """The scale puts the largest magnitude of a block at the largest exponent of E2M1; codes are the nearest."""
    amax = np.abs(values).max(axis=1, keepdims=True)
    _, exponent = np.frexp(amax)
    scale = np.where(amax > 0, (exponent - 1 - 2 + 127).clip(0, 254), 0).astype(np.uint8)
    table = np.array(_E2M1, np.float32)
    distance = np.abs(_exponents(scale)[:, :, None] * table - values[:, :, None])  # [n, 32, 16]
    return np.concatenate([scale, pack_nibbles(distance.argmin(axis=2).astype(np.uint8))], axis=1)


def _coded_iq4_xs(blocks: np.ndarray) -> Coded:
    """Bytes: d f16, 2 of upper scale bits (two a group), 4 of lower scale bits (four a group), 128 of nibbles, 16 for
    each group of 32; a weight is (d * (scale - 32)) * table[code]."""
    low = unpack_interleaved(blocks[:, 4:8])
    upper = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    factors = (low | ((upper & 3).astype(np.uint8) << np.uint8(4))).view(np.int8) - np.int8(32)
    values = np.array(_IQ4, np.int8)[unpack_nibbles(blocks[:, 8:].reshape(-1, 16))]
    return Coded(half(blocks, 0), factors, values.reshape(-1, _BLOCK))


def unpack_interleaved(packed: np.ndarray) -> np.ndarray:
    """[n, k] bytes -> [n, 2k]: each byte's low half, then its high half."""
    return np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=2).reshape(len(packed), -1)


def _pack_iq4_xs(values: np.ndarray) -> np.ndarray:
    groups = values.reshape(-1, 8, 32)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(axis=2, keepdims=True), axis=2)[:, :, 0]
    step = extreme / np.float32(-127)
    d = half_bytes(np.abs(step).max(axis=1, keepdims=True) / np.float32(31))
    scales = np.rint(step * inverse(half(d, 0))).clip(-32, 31)
    codes = _nearest_iq4(groups * inverse(half(d, 0) * scales.astype(np.float32))[:, :, None])
    stored = (scales + 32).astype(np.uint8)
    low = (stored[:, ::2] & np.uint8(15)) | ((stored[:, 1::2] & np.uint8(15)) << np.uint8(4))
    upper = np.bitwise_or.reduce((stored >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16), axis=1)
    upper_bytes = upper.astype("<u2").view(np.uint8).reshape(-1, 2)
    return np.concatenate([d, upper_bytes, low, pack_nibbles(codes.reshape(-1, 32)).reshape(-1, 128)], axis=1)


FORMATS = (
    integer_format("IQ4_NL", 32, 18, 20, _integers_iq4_nl, _pack_iq4_nl),
    integer_format("MXFP4", 32, 17, 39, _integers_mxfp4, _pack_mxfp4),
    *(_ours(name, 16 if name.endswith("_T16") else 8) for name in TABLES if "_T" in name),
    coded_format("IQ4_XS", 136, 23, _coded_iq4_xs, "IQ4_T32", _pack_iq4_xs),
)
