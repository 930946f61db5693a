"""Integer codes with scales and zero points, however a method packs them, as the bytes of a format.

A weight is scale * (code - zero). In Q4_0 and Q8_0 the zero is 8 and 128 and scales are float16; INT4 has zeros and
float32 scales, INT8 the latter. What has no 32 neighbouring inputs of one scale becomes float32: codes and zeros have
at most 8 bits and scales of 16-bit checkpoints 11, so that product is exact.
"""

from dataclasses import dataclass

import numpy as np

from roofline.ops.formats import scaled
from roofline.ops.formats.blocks32 import pack_nibbles

GROUP = scaled.BLOCK
_ROWS = 256  # widened at a time


@dataclass(frozen=True)
class Codes:
    """code: uint8 [rows, columns]; scale: float32 [rows, groups]; zero: uint8, the same, None: half of the codes."""

    code: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None


@dataclass(frozen=True)
class CodeLayout:
    """How the codes of a matrix lie, as can be known without reading them.

    Attributes:
        shape: (rows, columns); bits: 4 or 8.
        has_zeros: there are zero points beside the scales.
        scale_dtype: of the file.
        group_of: int64 [columns], which scale of a row is an input's.
    """

    shape: tuple[int, int]
    bits: int
    has_zeros: bool
    scale_dtype: str
    group_of: np.ndarray

    @property
    def widened(self) -> str:
        """Why no format of integers holds it, "" where one does."""
        columns = self.shape[1]
        if columns % GROUP or (self.group_of.reshape(-1, GROUP) != self.group_of[::GROUP, None]).any():
            return "the scale changes within 32 neighbouring inputs"
        return "8-bit codes with zero points" if self.bits == 8 and self.has_zeros else ""

    @property
    def format(self) -> str:
        """The name of the format."""
        if self.widened:
            return "F32"
        half = self.scale_dtype == "F16" and not self.has_zeros
        return {4: "Q4_0" if half else "INT4", 8: "Q8_0" if half else "INT8"}[self.bits]

    def bytes_of(self, codes: Codes) -> np.ndarray:
        """uint8, row after row, in `format`."""
        if self.widened:
            return self._wide(codes).view(np.uint8).reshape(-1)
        scale = codes.scale[:, self.group_of[::GROUP]]  # [rows, columns / 32]
        if self.format == "INT4":
            zero = np.uint8(8) if codes.zero is None else codes.zero[:, self.group_of[::GROUP]]
            return scaled.join_int4(codes.code, scale, np.broadcast_to(zero, scale.shape))
        if self.format == "INT8":
            return scaled.join_int8((codes.code ^ np.uint8(128)).view(np.int8), scale)
        values = pack_nibbles(codes.code.reshape(-1, GROUP)) if self.bits == 4 else codes.code ^ np.uint8(128)
        values = values.reshape(*scale.shape, -1)
        out = np.empty((*scale.shape, 2 + values.shape[2]), np.uint8)
        out[:, :, :2] = np.ascontiguousarray(scale, "<f2").view(np.uint8).reshape(*scale.shape, 2)
        out[:, :, 2:] = values
        return out.reshape(-1)

    def _wide(self, codes: Codes) -> np.ndarray:
        """float32 [rows, columns]."""
        out = np.empty(self.shape, "<f4")
        for start in range(0, self.shape[0], _ROWS):
            rows = slice(start, start + _ROWS)
            zero = np.float32(1 << (self.bits - 1)) if codes.zero is None else codes.zero[rows][:, self.group_of]
            out[rows] = (codes.code[rows].astype(np.float32) - zero) * codes.scale[rows][:, self.group_of]
        return out


def nibbles(words: np.ndarray) -> np.ndarray:
    """The codes of words of eight, the lowest first: uint32 [..., n] -> uint8 [..., 8 n]."""
    packed = np.ascontiguousarray(words, "<u4").view(np.uint8)
    out = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, np.uint8(15), out=out[..., 0])
    np.right_shift(packed, np.uint8(4), out=out[..., 1])
    return out.reshape(*packed.shape[:-1], -1)


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """The same for 4 or 8 bits: uint32 [..., n] -> uint8 [..., 32 n / bits]."""
    return nibbles(words) if bits == 4 else np.ascontiguousarray(words, "<u4").view(np.uint8)


def even_groups(columns: int, groups: int) -> np.ndarray:
    """int64 [columns]: so many groups of neighbours, all of one size. groups divides columns."""
    return np.arange(columns) // (columns // groups)
