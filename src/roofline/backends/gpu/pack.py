"""Weights of a file as the GPU kernels read them: planes of codes and their scales, nothing rounded, nothing widened.

A quantised matrix [rows, columns] becomes
    words int32 [columns / 32, rows, n]: the low 4 bits (8 for 8-bit codes) of 32 codes: what a tile of rows reads of
        them lies side by side;
    high int32 [groups, rows]: a group's fifth bits (32 codes), or fifth and sixth (16 codes);
    scale, minimum [groups, rows]: float16; or int8 with a float16 beside it for every 256 columns (K-quants).
value = scale * (code - zero) + minimum.

8-bit codes lie in order, the first in the lowest bits; the others as `order` and `high_order` say. Both halves of a
word hold codes of one pair at the same place, so one shift and one instruction of logic make two 16-bit floats of them.
Word q has what lane q of four holds of a matrix instruction's operand, so codes are unpacked where they are multiplied
(kernels/linear_whole.py). Any other order is as right, and sends every code through shared memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np

from roofline.common.errors import UnsupportedError
from roofline.ops import formats
from roofline.ops.formats import blocks256
from roofline.program import target

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SUPER = 256  # columns that share the upper scale of a K-quant
CHUNK = 32  # codes that words hold together
ORDER = 2  # version of what words hold where: one more with every change, for who keeps them


@dataclass(frozen=True)
class KernelLayout:
    """What a kernel must know of a format. zero: code of the value `minimum`.

    two_level: scales are int8 times a float16 for each 256 columns.
    """

    bits: int
    group: int
    zero: int
    two_level: bool
    has_minimum: bool


LAYOUTS = {
    "Q4_0": KernelLayout(4, 32, 8, False, False),
    "Q4_1": KernelLayout(4, 32, 0, False, True),
    "Q8_0": KernelLayout(8, 32, 128, False, False),
    "Q4_K": KernelLayout(4, 32, 0, True, True),
    "Q5_K": KernelLayout(5, 32, 0, True, True),
    "Q6_K": KernelLayout(6, 16, 32, True, False),
}


STAND_INS = target.STAND_INS["device"]  # format -> the one of LAYOUTS that a matrix of it has in memory


@dataclass(frozen=True)
class Parts:
    """Codes uint8 [rows, columns] and scales by group, float16 or int8 [rows, groups], with their float16
    [rows, columns / 256] for each 256 columns where the format has two levels."""

    codes: np.ndarray
    scale: np.ndarray
    minimum: np.ndarray | None = None
    super_scale: np.ndarray | None = None
    super_minimum: np.ndarray | None = None


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


Array = TypeVar("Array", bound=_Sized)


@dataclass(frozen=True)
class Packed(Generic[Array]):
    """The arrays above, of numpy or, on a device, of torch; what a format does not have is None."""

    layout: KernelLayout
    rows: int
    columns: int
    words: Array
    high: Array | None
    scale: Array
    minimum: Array | None
    super_scale: Array | None
    super_minimum: Array | None

    @property
    def arrays(self) -> tuple[Array | None, ...]:
        """words, high, scale, minimum, super_scale, super_minimum."""
        return self.words, self.high, self.scale, self.minimum, self.super_scale, self.super_minimum

    @property
    def nbytes(self) -> int:
        """Bytes on the device: what a product with it reads."""
        return sum(array.nbytes for array in self.arrays if array is not None)

    def pointers(self) -> tuple[Array, ...]:
        """`arrays` as arguments of a kernel: `words` in the place of each that the format does not have."""
        return tuple(self.words if array is None else array for array in self.arrays)

    def to(self: "Packed[np.ndarray]", device: "torch.device | str") -> "Packed[Tensor]":
        """Numpy's arrays copied to a device."""
        import torch

        arrays = [None if array is None else torch.from_numpy(array).to(device) for array in self.arrays]
        names = ("words", "high", "scale", "minimum", "super_scale", "super_minimum")  # the order of `arrays`
        return Packed(self.layout, self.rows, self.columns, **dict(zip(names, arrays, strict=True)))  # type: ignore[arg-type]


def pack(raw: np.ndarray, name: str, rows: int, columns: int) -> Packed[np.ndarray]:
    """A matrix from its bytes in the file (uint8). Raises UnsupportedError for a format without a layout here."""
    if name not in LAYOUTS:
        raise UnsupportedError(f"format {name} on a GPU", "its kernels do not read it", [*sorted(LAYOUTS), "E4M3"])
    layout = LAYOUTS[name]
    parts = _PARTS[name](raw.reshape(rows, -1))
    low_bits = 8 if layout.bits == 8 else 4
    more = layout.bits - low_bits
    low, upper = (parts.codes.reshape(rows, -1, n).swapaxes(0, 1) for n in (CHUNK, layout.group))  # [groups, rows, n]
    return Packed(
        layout=layout,
        rows=rows,
        columns=columns,
        words=_plane((low & ((1 << low_bits) - 1))[:, :, order(low_bits)], low_bits),
        high=_plane((upper >> low_bits)[:, :, high_order(layout.group)], more)[:, :, 0] if more else None,
        scale=np.ascontiguousarray(parts.scale.T),
        minimum=_turned(parts.minimum),
        super_scale=_turned(parts.super_scale),
        super_minimum=_turned(parts.super_minimum),
    )


def _turned(part: np.ndarray | None) -> np.ndarray | None:
    return None if part is None else np.ascontiguousarray(part.T)


def stand_in(raw: np.ndarray, name: str) -> np.ndarray:
    """A matrix's bytes (uint8) in the format that stands in for its own, the very same where that is its own.

    Raises UnsupportedError where float16 cannot hold a scale.
    """
    if name not in STAND_INS:
        return raw
    form = formats.get(name)
    assert form.integers is not None, "formats of groups stand in for such formats"
    q, scale, _ = form.integers(raw.reshape(-1, form.block_bytes))
    with np.errstate(over="ignore"):
        half = scale.astype("<f2")
    if not np.array_equal(half.astype(np.float32), scale):
        reason = "its kernels read it with scales that float16 holds exactly, and some of these are not"
        raise UnsupportedError(f"format {name} on a GPU", reason, [*sorted(LAYOUTS), "E4M3"])
    return np.concatenate([half.view(np.uint8).reshape(-1, 2), q.astype(np.int8).view(np.uint8)], axis=1).reshape(-1)


def order(bits: int) -> np.ndarray:
    """Which of 32 codes lies in which place, int [32]; places: so many bits (4 or 8), word by word from the lowest."""
    if bits == 8:
        return np.arange(CHUNK)
    return _lanes(CHUNK).transpose(1, 0, 2).reshape(-1)


def high_order(group: int) -> np.ndarray:
    """The same of `high`, whose places are one bit for groups of 32 and two for groups of 16; int [group]."""
    return _lanes(group).reshape(-1)


def _lanes(group: int) -> np.ndarray:
    """The codes of a group by half of a word, lane and place in the half: a lane has 4 of each 16, by twos."""
    half, lane, place = np.arange(2)[:, None, None], np.arange(4)[:, None], np.arange(group // 8)
    return place // 2 * 16 + 4 * lane + place % 2 * 2 + half


def _plane(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes of so many bits, uint8 [groups, rows, group], side by side in int32 [groups, rows, group * bits / 32]."""
    per = 32 // bits
    words = np.zeros((*codes.shape[:2], codes.shape[2] // per), np.uint32)
    for j in range(per):
        words |= codes[:, :, j::per].astype(np.uint32) << np.uint32(bits * j)
    return words.view(np.int32)


def _blocks(raw: np.ndarray, size: int) -> np.ndarray:
    """uint8 [rows, bytes] -> [rows, blocks, size]."""
    return raw.reshape(raw.shape[0], -1, size)


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at a byte offset of each block, [rows, blocks]."""
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)[:, :, 0]


def _rows(codes: np.ndarray) -> np.ndarray:
    return codes.reshape(codes.shape[0], -1)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[..., n] bytes -> [..., 2n]: all low halves, then all high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _q4_0(raw: np.ndarray) -> Parts:
    blocks = _blocks(raw, 18)
    return Parts(_rows(_nibbles(blocks[:, :, 2:])), _half(blocks, 0))


def _q4_1(raw: np.ndarray) -> Parts:
    blocks = _blocks(raw, 20)
    return Parts(_rows(_nibbles(blocks[:, :, 4:])), _half(blocks, 0), _half(blocks, 2))


def _q8_0(raw: np.ndarray) -> Parts:
    blocks = _blocks(raw, 34)
    return Parts(_rows(blocks[:, :, 2:] ^ 128), _half(blocks, 0))  # signed bytes as offset codes


def _affine(raw: np.ndarray, size: int, codes: Callable[[np.ndarray], np.ndarray]) -> Parts:
    """Q4_K and Q5_K, whose blocks begin alike."""
    blocks = _blocks(raw, size)
    flat = blocks.reshape(-1, size)
    scale, minimum = (part.view(np.int8).reshape(len(raw), -1) for part in blocks256.affine_scales(flat[:, 4:16]))
    return Parts(codes(flat).reshape(len(raw), -1), scale, minimum, _half(blocks, 0), _half(blocks, 2))


def _q6_k(raw: np.ndarray) -> Parts:
    blocks = _blocks(raw, 210)
    codes = blocks256.codes_q6_k(blocks.reshape(-1, 210))
    scale = np.ascontiguousarray(blocks[:, :, 192:208]).view(np.int8)
    return Parts(codes.reshape(len(raw), -1), _rows(scale), None, _half(blocks, 208))


_PARTS: dict[str, Callable[[np.ndarray], Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": partial(_affine, size=144, codes=blocks256.codes_q4_k),
    "Q5_K": partial(_affine, size=176, codes=blocks256.codes_q5_k),
    "Q6_K": _q6_k,
}
