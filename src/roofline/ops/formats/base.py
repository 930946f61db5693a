"""What a weight format is: a row of facts and two functions over blocks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from roofline.common.errors import ConfigError, UnsupportedError

# Blocks handled at once, so that temporaries stay in the cache and small beside the result.
CHUNK_VALUES = 1 << 18
# Where no weight is larger, float16 scales may have few bits left, or none.
SMALL = 1e-3
_TOO_MUCH = 0.25  # a part of small weights, by their root mean square: no format loses so much of larger ones
# Of blocks: q, 8-bit integers [blocks, block]; scale, float32 [blocks, groups of a block]; minimum: the same, None: 0.
Integers = tuple[np.ndarray, np.ndarray, np.ndarray | None]


@dataclass(frozen=True)
class Format:
    """One block layout of weight files.

    Attributes:
        name: the name files use, e.g. ``"Q4_1"``.
        block: weights in a block; blocks never span rows.
        block_bytes: bytes a block takes.
        gguf_type: the number of the format in GGUF files (ggml's `ggml_type`); -1: they do not have it.
        unpack: uint8 [blocks, block_bytes] -> float32 [blocks, block].
        pack: float32 [blocks, block] -> uint8 [blocks, block_bytes]; None: it is read and never written.
        packed_as: the format of ours whose arithmetic and tiles a backend uses for it; "": its own.
        integers: uint8 [blocks, block_bytes] -> the `Integers` of which a weight is scale * q + minimum; None: it is
            made otherwise.
        convert: its blocks -> the bytes that `packed_as` has for the same values, uint8 [blocks, any]; None: by way of
            the float32 values, which must survive it.
        stored: whether files have it; False: only a `packed_as` names it.
    """

    name: str
    block: int
    block_bytes: int
    gguf_type: int
    unpack: Callable[[np.ndarray], np.ndarray]
    pack: Callable[[np.ndarray], np.ndarray] | None
    packed_as: str = ""
    convert: Callable[[np.ndarray], np.ndarray] | None = None
    integers: Callable[[np.ndarray], "Integers"] | None = None
    stored: bool = True

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor of this shape. Raises ConfigError when a row is not a whole number of blocks."""
        if not shape or shape[-1] % self.block:
            raise ConfigError(f"shape {tuple(shape)} cannot be {self.name}: rows must be multiples of {self.block}")
        return math.prod(shape) // self.block * self.block_bytes

    def dequantize(self, raw: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """The float32 values of a tensor.

        raw: uint8 [nbytes], the tensor's bytes in row order; shape: the tensor's shape, (rows, cols) or (cols,). Raises
        ConfigError when `raw` has not the size that `shape` needs.
        """
        if raw.dtype != np.uint8 or raw.size != self.nbytes(shape):
            raise ConfigError(f"{self.name} of shape {tuple(shape)} takes {self.nbytes(shape)} bytes, got {raw.size}")
        blocks = raw.reshape(-1, self.block_bytes)
        out = np.empty((blocks.shape[0], self.block), np.float32)
        step = max(1, CHUNK_VALUES // self.block)
        with np.errstate(invalid="ignore", over="ignore"):  # an infinite scale in the file gives NaN, as it should
            for start in range(0, blocks.shape[0], step):
                out[start : start + step] = self.unpack(blocks[start : start + step])
        return out.reshape(tuple(shape))

    def quantize(self, values: np.ndarray) -> np.ndarray:
        """uint8 [nbytes] of a tensor with any shape whose last dimension is a multiple of `block`.

        Raises UnsupportedError for a format without `pack`.
        """
        if self.pack is None:
            raise UnsupportedError(f"quantising to {self.name}", "its blocks are read here and not made")
        total = self.nbytes(values.shape)
        blocks = np.ascontiguousarray(values, np.float32).reshape(-1, self.block)
        out = np.empty((blocks.shape[0], self.block_bytes), np.uint8)
        step = max(1, CHUNK_VALUES // self.block)
        for start in range(0, blocks.shape[0], step):
            out[start : start + step] = self.pack(blocks[start : start + step])
        assert out.size == total
        return out.reshape(-1)

    def small_squares(self, values: np.ndarray, raw: np.ndarray) -> tuple[float, float]:
        """The sums of squares of what `raw`, made of values, has otherwise than these, and of the values."""
        exact = values.astype(np.float64)
        errors = exact - self.dequantize(raw, values.shape)
        return float(np.square(errors).sum()), float(np.square(exact).sum())


def is_too_small(lost: float, total: float) -> bool:
    """Whether a format's scales do not hold weights of at most `SMALL`, by the sums that `small_squares` gives."""
    return lost > _TOO_MUCH**2 * total


def integer_format(
    name: str,
    block: int,
    block_bytes: int,
    gguf_type: int,
    integers: Callable[[np.ndarray], Integers],
    pack: Callable[[np.ndarray], np.ndarray] | None,
    stored: bool = True,
) -> Format:
    """A format whose weights are scale * q + minimum; integers: as `Format` has it."""

    def unpack(blocks: np.ndarray) -> np.ndarray:
        q, scale, minimum = integers(blocks)
        values = q.reshape(*scale.shape, -1).astype(np.float32) * scale[..., None]
        if minimum is not None:
            values += minimum[..., None]
        return values.reshape(-1, block)

    return Format(
        name=name,
        block=block,
        block_bytes=block_bytes,
        gguf_type=gguf_type,
        unpack=unpack,
        pack=pack,
        integers=integers,
        stored=stored,
    )
