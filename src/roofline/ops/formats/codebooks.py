"""Weights from codebooks, IQ1_S to IQ3_S, and ternary ones, TQ1_0 and TQ2_0 (layouts of ggml's `ggml-common.h`).

Eight (IQ1, IQ2) or four (IQ3) weights are one entry of a codebook; codebooks.txt has them. Such files are read and not
made: finding good entries is a search. Products are computed with formats of ours that hold the same values
(tables.py); ternary weights are Q2_K with a scale and a minimum of 1.
"""

from functools import cache
from pathlib import Path

import numpy as np

from roofline.ops.formats.base import Format
from roofline.ops.formats.blocks32 import half
from roofline.ops.formats.blocks256_low import bit_pairs, pack_bit_pairs
from roofline.ops.formats.tables import Coded, coded_format, unpack_interleaved

_BLOCK = 256
# Codebook -> the values of its digits, and digits of an entry.
_DIGITS: dict[str, tuple[tuple[int, ...], int]] = {
    "IQ2_XXS": ((8, 25, 43), 8),
    "IQ2_XS": ((8, 25, 43), 8),
    "IQ2_S": ((8, 25, 43), 8),
    "IQ3_XXS": ((4, 12, 20, 28, 36, 44, 52, 62), 4),
    "IQ3_S": ((1, 3, 5, 7, 9, 11, 13, 15), 4),
    "IQ1": ((-1, 0, 1), 8),
}


@cache
def codebook(name: str) -> np.ndarray:
    """int8 [entries, 8 or 4].

    A line of codebooks.txt is a name, then each entry as a hexadecimal number. With n values, its digits in base n, the
    lowest first, say which value each weight has.
    """
    for line in Path(__file__).with_name("codebooks.txt").read_text("ascii").splitlines():
        key, *entries = line.split()
        if key == name:
            values, count = _DIGITS[name]
            numbers = np.array([int(entry, 16) for entry in entries])
            digits = numbers[:, None] // len(values) ** np.arange(count) % len(values)
            return np.array(values, np.int8)[digits]
    raise AssertionError(f"codebooks.txt has no {name}")


def _words(blocks: np.ndarray, start: int, stop: int, dtype: str) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype)


def _signs(bits: np.ndarray) -> np.ndarray:
    """uint8 [n, k] -> int8 [n, 8k]: -1 where a bit is set, the lowest of a byte first."""
    return 1 - 2 * np.unpackbits(bits, axis=1, bitorder="little").view(np.int8)


def _even_signs(index: np.ndarray) -> np.ndarray:
    """Seven bits of signs -> eight, uint8: the last makes the number of negative weights even."""
    low = index.astype(np.uint8)
    parity = np.unpackbits(low[..., None], axis=-1).sum(axis=-1, dtype=np.uint8) & np.uint8(1)
    return low | (parity << np.uint8(7))


def _odd(scales: np.ndarray) -> np.ndarray:
    """2s + 1 as int8."""
    return (2 * scales + 1).astype(np.int8)


def _signed(name: str, entries: np.ndarray, signs: np.ndarray) -> np.ndarray:
    return codebook(name)[entries].reshape(-1, _BLOCK) * _signs(signs)


def _iq2_xxs(blocks: np.ndarray) -> Coded:
    """Bytes: d f16, then for each 32 weights four entries and a word of four 7-bit signs and a 4-bit scale; a weight is
    d * (0.5 + scale) / 4 * entry."""
    words = _words(blocks, 2, 66, "<u4").reshape(-1, 8, 2)
    entries = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    signs = _even_signs(words[:, :, 1:] >> np.arange(0, 28, 7, dtype=np.uint32) & 127).reshape(-1, 32)
    return Coded(half(blocks, 0) / 8, _odd(words[:, :, 1] >> 28), _signed("IQ2_XXS", entries, signs))


def _iq2_xs(blocks: np.ndarray) -> Coded:
    """Bytes: d f16, 32 words of an entry (9 bits) and its signs (7), 8 of 4-bit scales, one for each 16 weights."""
    words = _words(blocks, 2, 66, "<u2")
    values = _signed("IQ2_XS", words & 511, _even_signs(words >> 9))
    return Coded(half(blocks, 0) / 8, _odd(unpack_interleaved(blocks[:, 66:74])), values)


def _iq2_s(blocks: np.ndarray) -> Coded:
    """Bytes: d f16, 32 of entries, 32 of signs, 8 of the entries' upper two bits, 8 of 4-bit scales."""
    upper = (blocks[:, 66:74, None] >> np.arange(0, 8, 2, dtype=np.uint8) & np.uint8(3)).reshape(-1, 32)
    entries = blocks[:, 2:34] | (upper.astype(np.uint16) << 8)
    values = _signed("IQ2_S", entries, blocks[:, 34:66])
    return Coded(half(blocks, 0) / 8, _odd(unpack_interleaved(blocks[:, 74:82])), values)


def _iq3_xxs(blocks: np.ndarray) -> Coded:
    """Bytes: d f16, 64 of entries, 8 words of four 7-bit signs and a 4-bit scale; d * (0.5 + scale) / 2 * entry."""
    words = _words(blocks, 66, 98, "<u4")
    signs = _even_signs(words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127).reshape(-1, 32)
    return Coded(half(blocks, 0) / 4, _odd(words >> 28), _signed("IQ3_XXS", blocks[:, 2:66], signs))


def _iq3_s(blocks: np.ndarray) -> Coded:
    """Bytes: d f16, 64 of entries, 8 of ninth bits, 32 of signs, 4 of 4-bit scales; d * (1 + 2 * scale) * entry."""
    ninth = np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little").astype(np.uint16)
    values = _signed("IQ3_S", blocks[:, 2:66] | (ninth << 8), blocks[:, 74:106])
    return Coded(half(blocks, 0), _odd(unpack_interleaved(blocks[:, 106:110])), values)


def _shifted(entries: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """Eight times the weights of IQ1, int8 [n, 256]: an entry's, and an eighth more, or less where `negative`.

    entries, negative: [n, 32].
    """
    return (codebook("IQ1")[entries] * np.int8(8) + np.where(negative, -1, 1).astype(np.int8)[..., None]).reshape(
        -1, _BLOCK
    )


def _iq1_s(blocks: np.ndarray) -> Coded:
    """Bytes: d f16, 32 of entries, 8 words of four times 3 upper bits, a 3-bit scale and a sign of the shift."""
    words = _words(blocks, 34, 50, "<u2")
    upper = (words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 32)
    negative = np.repeat(words >> 15 == 1, 4, axis=1)
    values = _shifted(blocks[:, 2:34] | (upper << 8), negative)
    return Coded(half(blocks, 0) / 8, _odd(words >> 12 & 7), values)


def _iq1_m(blocks: np.ndarray) -> Coded:
    """Bytes: 32 of entries, 16 of nibbles (3 upper bits and the shift's sign), 4 words of four 3-bit scales whose upper
    four bits together are d f16."""
    words = _words(blocks, 48, 56, "<u2")
    d = np.bitwise_or.reduce((words >> 12) << np.arange(0, 16, 4, dtype=np.uint16), axis=1, keepdims=True)
    scales = (words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 16)
    high = unpack_interleaved(blocks[:, 32:48])
    values = _shifted(blocks[:, :32] | ((high & 7).astype(np.uint16) << 8), high & 8 != 0)
    return Coded(half(np.ascontiguousarray(d).view(np.uint8), 0) / 8, _odd(scales), values)


def _ternary_digits(packed: np.ndarray, count: int) -> np.ndarray:
    """uint8 [n, k] -> [n, count * k]: so many base-3 digits of each byte, the highest first.

    All first digits come before all second ones. A byte b stands for the fraction b / 256.
    """
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]
    return ((packed[:, None, :] * powers).astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(packed), -1)


def _codes_tq1_0(blocks: np.ndarray) -> np.ndarray:
    """Bytes: 48 of five digits (of 32 bytes, then of 16), 4 of four digits, d f16."""
    parts = (blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)
    return np.concatenate([_ternary_digits(*part) for part in parts], axis=1)


def _codes_tq2_0(blocks: np.ndarray) -> np.ndarray:
    """Bytes: 64 of bit pairs as in Q2_K, d f16."""
    return bit_pairs(blocks[:, :64])


def _ternary(name: str, block_bytes: int, gguf_type: int) -> Format:
    """A weight is d * (code - 1): in Q2_K, d * code - d, which is exact."""
    codes = _codes_tq1_0 if name == "TQ1_0" else _codes_tq2_0

    def unpack(blocks: np.ndarray) -> np.ndarray:
        return half(blocks, block_bytes - 2) * (codes(blocks).view(np.int8) - np.int8(1)).astype(np.float32)

    def convert(blocks: np.ndarray) -> np.ndarray:
        scales = np.full((len(blocks), 16), 0x11, np.uint8)
        d = blocks[:, block_bytes - 2 :]
        return np.concatenate([scales, pack_bit_pairs(codes(blocks)), d, d], axis=1)

    return Format(
        name=name,
        block=_BLOCK,
        block_bytes=block_bytes,
        gguf_type=gguf_type,
        unpack=unpack,
        pack=None,
        packed_as="Q2_K",
        convert=convert,
    )


FORMATS = (
    coded_format("IQ2_XXS", 66, 16, _iq2_xxs, "IQ2_T32"),
    coded_format("IQ2_XS", 74, 17, _iq2_xs, "IQ2_T16"),
    coded_format("IQ2_S", 82, 22, _iq2_s, "IQ2_T16"),
    coded_format("IQ3_XXS", 98, 18, _iq3_xxs, "IQ3_XXS_T32"),
    coded_format("IQ3_S", 110, 21, _iq3_s, "IQ3_S_T32"),
    coded_format("IQ1_S", 50, 19, _iq1_s, "IQ2_T32"),
    coded_format("IQ1_M", 56, 29, _iq1_m, "IQ2_T16"),
    _ternary("TQ1_0", 54, 34),
    _ternary("TQ2_0", 66, 35),
)
