"""What a request gives that ends with its prompt: one vector of float32 instead of an answer.

Vectors travel as bytes, float32 in little-endian order, and are made into numbers where they are used. All arithmetic
here is exactly rounded or in a fixed order, so a vector's bits depend on the model and the prompt alone.
"""

import math
import operator
import sys
from array import array
from dataclasses import dataclass
from typing import Literal

from roofline.common.errors import RequestError, UnsupportedError
from roofline.weights import vectors
from roofline.weights.vectors import VectorKind

PoolingKind = VectorKind | Literal["logits"]
KINDS: tuple[PoolingKind, ...] = (*vectors.KINDS, "logits")
NORMAL = 2.0**-126  # the least float32 with all its digits


@dataclass(frozen=True)
class Pooling:
    """kind: "last", the hidden row of the prompt's last token [width]; "mean", the mean of the rows of all its tokens
    [width]; "first", the row of its first token [width], which is the [CLS] of an encoder's texts; "logits", the logits
    of `ids` after the prompt [len(ids)], or all of them [vocab] where there are no ids. Hidden rows are what the
    model's head reads.

    Raises RequestError for another kind, and for ids with a kind that has none.
    """

    kind: PoolingKind = "last"
    ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise _refused(f"{self.kind!r} is none of {', '.join(KINDS)}")
        if self.ids and self.kind != "logits":
            raise _refused(f"ids are for 'logits' alone; {self.kind!r} has {len(self.ids)}")

    @property
    def hidden(self) -> bool:
        """Whether it needs hidden rows."""
        return self.kind != "logits"


def check_able(pooling: Pooling | None, hidden: bool, adapter: str = "", encoder: bool = False) -> None:
    """Raises UnsupportedError where hidden rows are needed of an engine that has none, or with an adapter, and where
    anything else is of an encoder. hidden: whether it has some; encoder: whether its model is one."""
    if encoder and (pooling is None or not pooling.hidden):
        reason = "it reads texts and gives their vectors; it generates none"
        raise UnsupportedError("an answer of an encoder model", reason, ("/v1/embeddings", "/rerank", "LLM.embed"))
    if pooling is not None and pooling.hidden and adapter:
        raise UnsupportedError(
            "embeddings with an adapter", "hidden rows are those of the model itself", ("no adapter",)
        )
    if pooling is not None and pooling.hidden and not hidden:
        reason = "this backend, or a model on several ranks, gives no hidden states"
        raise UnsupportedError("embeddings", reason, ("backend=cpu", "backend=reference", "a score of each pair"))


def vector_bytes(numbers: "array[float]") -> bytes:
    """The bytes of float32 numbers."""
    if sys.byteorder == "big":
        numbers = array("f", numbers)
        numbers.byteswap()
    return numbers.tobytes()


def vector_numbers(vector: bytes) -> "array[float]":
    """The float32 numbers of the bytes."""
    numbers = array("f")
    numbers.frombytes(vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def embedding(vector: bytes, dimensions: int | None = None) -> "array[float]":
    """A pooled vector, cut to its first `dimensions` and scaled to length 1: float32 [dimensions or width].

    A vector of zeros stays one. Raises RequestError for dimensions that it does not have.
    """
    numbers = vector_numbers(vector)
    if dimensions is not None:
        if not 1 <= dimensions <= len(numbers):
            raise RequestError(
                400, "invalid_value", f"dimensions: {dimensions} is not from 1 to {len(numbers)}", param="dimensions"
            )
        numbers = numbers[:dimensions]
    length = math.sqrt(math.fsum(x * x for x in numbers))  # squares of float32 are exact in float64
    return array("f", [x / length for x in numbers]) if length >= NORMAL else numbers


def cosine(first: bytes, second: bytes) -> float:
    """Of two pooled vectors of the same model: the cosine of the angle between them, -1 to 1; 0 for one of zeros."""
    a, b = vector_numbers(first), vector_numbers(second)
    length = math.sqrt(math.fsum(x * x for x in a) * math.fsum(x * x for x in b))
    return max(-1.0, min(1.0, math.fsum(map(operator.mul, a, b)) / length)) if length > 0 else 0.0


def probability(vector: bytes) -> float:
    """Return how likely the first of two ids is, from their logits: 0 to 1."""
    first, second = vector_numbers(vector)
    difference = first - second
    if difference >= 0:
        return 1.0 / (1.0 + math.exp(-difference))
    odds = math.exp(difference)
    return odds / (1.0 + odds)


def _refused(problem: str) -> RequestError:
    return RequestError(400, "invalid_value", f"pooling: {problem}", param="pooling")
