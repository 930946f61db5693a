"""What ops receive while a model is traced: types instead of numbers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from roofline.ops import formats

if TYPE_CHECKING:
    from torch import Tensor

    from roofline.ops.registry import Op

# What a family computes with: numbers, or what stands for them while the family is traced.
Value: TypeAlias = "Tensor | Symbol"

# Bytes an element takes. q8g32 is not here: its rows carry scales and sums beside the integers (see `row_bytes`).
ELEMENT_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "i32": 4, "i8": 1}
FLOAT8 = ("e4m3fn", "e4m3fnuz")  # of a cache: 8 bits, no scale; the second is MI300's
STORES = ("cache", "state")  # what outlives a step: pages of keys and values, slots of recurrent state
Q8_GROUP = 32
Q_BYTES = {"q8g32": 1, "q15g32": 2}  # rows of integers: bytes an element


def kv_head_bytes(dtype: str, head_dim: int) -> int:
    """Bytes that K (or V) of one token and kv head takes in a cache; "int8" has an f32 scale beside its integers."""
    if dtype in FLOAT8:
        return head_dim
    return head_dim + 4 if dtype == "int8" else head_dim * ELEMENT_BYTES[dtype]


@dataclass(frozen=True)
class Type:
    """dtype, the symbol that counts the rows ("tokens", "rows", or None for a store) and the shape of one row.

    dtypes: those of ELEMENT_BYTES; "q8g32" and "q15g32" (rows of one or two int8 digits an element; for each 32 inputs
    an f32 scale, an f32 scaled sum and two int32 half sums); "cache", of (kv heads, head_dim); "state", of the float32
    values that a layer keeps of a sequence.
    """

    dtype: str
    leading: str | None
    trailing: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """Elements in one row."""
        return math.prod(self.trailing)

    @property
    def stored(self) -> bool:
        """Whether it outlives a step."""
        return self.dtype in STORES

    @property
    def row_bytes(self) -> int:
        """Bytes one row takes; 0 for a store, which lies outside the arena."""
        if self.stored:
            return 0
        if self.dtype in Q_BYTES:
            return Q_BYTES[self.dtype] * self.width + self.width // Q8_GROUP * 16
        return self.width * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class WeightType:
    """Shape (rows, columns) or (length,), the formats of its segments, and the bytes that are read of them."""

    shape: tuple[int, ...]
    formats: tuple[str, ...]
    nbytes: int

    @property
    def quantised(self) -> bool:
        """True when all segments are integers by groups, which rows of integers can be multiplied with."""
        return all(formats.get(name).integers is not None for name in self.formats)

    @property
    def mixed(self) -> bool:
        """True when some segments are integers by groups and others floats."""
        return not self.quantised and any(formats.get(name).integers is not None for name in self.formats)


FLOAT_FORMATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class TracedParameter:
    """A weight while tracing."""

    name: str
    type: WeightType


class TraceRecorder(Protocol):
    """Whoever writes a trace down."""

    def record(self, op: "Op", arguments: Mapping[str, object]) -> "Symbol | tuple[Symbol, ...]":
        """Append one call; returns the Symbol (or tuple of Symbols) of its results."""

    def add(self, x: "Symbol", y: Value) -> "Symbol":
        """Append the op `add`."""


@dataclass(frozen=True, eq=False)
class Symbol:
    """A value while tracing: knows its type and who records it."""

    name: str
    type: Type
    recorder: TraceRecorder

    def __add__(self, other: Value) -> "Symbol":
        return self.recorder.add(self, other)

    if TYPE_CHECKING:  # both operands of a sum are of one kind; their types do not say so

        def __radd__(self, other: Tensor) -> "Symbol": ...
