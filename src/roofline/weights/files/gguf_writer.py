"""Writes GGUF files, version 3, little-endian: what `weights.files.gguf` reads, and llama.cpp."""

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

import numpy as np

from roofline.common.errors import ConfigError
from roofline.ops import formats
from roofline.weights.files.mapped import TensorInfo
from roofline.weights.files.output import Pieces, write_tensor

ALIGNMENT = 32
_VERSION = 3
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _INT64, _UINT64, _FLOAT64 = 4, 5, 6, 7, 8, 9, 11, 10, 12
_LAYOUT = {_UINT32: "I", _INT32: "i", _FLOAT32: "f", _BOOL: "?", _INT64: "q", _UINT64: "Q", _FLOAT64: "d"}


def header(metadata: Mapping[str, object], tensors: Sequence[TensorInfo]) -> bytes:
    """Everything before the first tensor's bytes, padded to the alignment.

    Args:
        metadata: key -> int, float, bool, str or a list of one of these. Single numbers become uint32 and float32, as
            llama.cpp has them, where these hold the value, else what does; lists of numbers int32 and float32.
        tensors: names as the file has them, shapes as (rows, cols); a tensor's bytes follow in this order.

    Raises ConfigError for a value that the file format has no type for.
    """
    parts = [struct.pack("<4sIQQ", b"GGUF", _VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        kind = _kind(key, value)
        parts += [_text(key), struct.pack("<I", kind), _value(key, kind, value)]
    offset = 0
    for info in tensors:
        dims = struct.pack(f"<I{len(info.shape)}Q", len(info.shape), *reversed(info.shape))
        kind = formats.get(info.format).gguf_type
        if kind < 0:
            raise ConfigError(f"tensor {info.name!r}: GGUF files have no format {info.format}")
        parts += [_text(info.name), dims, struct.pack("<IQ", kind, offset)]
        offset = _aligned(offset + info.nbytes)
    data = b"".join(parts)
    return data.ljust(_aligned(len(data)), b"\0")


def file_bytes(head: bytes, tensors: Sequence[TensorInfo]) -> int:
    """Bytes of a file with this header and these tensors."""
    return len(head) + sum(_aligned(info.nbytes) for info in tensors)


def write_tensors(stream: BinaryIO, tensors: Sequence[TensorInfo], pieces: Callable[[TensorInfo], Pieces]) -> None:
    """The bytes of all tensors after the header. A tensor with another number of bytes is a bug of the caller."""
    for info in tensors:
        write_tensor(stream, info, pieces(info))
        stream.write(b"\0" * (_aligned(info.nbytes) - info.nbytes))


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _kind(key: str, value: object) -> int:
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, int):
        kinds = ((_UINT32, 0, 1 << 32), (_INT32, -(1 << 31), 1 << 31), (_INT64, -(1 << 63), 1 << 63))
        return next((kind for kind, low, high in kinds if low <= value < high), _UINT64)
    if isinstance(value, float):
        return _FLOAT32 if float(np.float32(value)) == value or value != value else _FLOAT64
    if isinstance(value, str):
        return _STRING
    if isinstance(value, list):
        return _ARRAY
    raise ConfigError(f"metadata {key!r}: a GGUF file has no type for {type(value).__name__}")


def _value(key: str, kind: int, value: object) -> bytes:
    if kind == _STRING:
        assert isinstance(value, str)
        return _text(value)
    if kind == _ARRAY:
        assert isinstance(value, list)
        return _array(key, value)
    return struct.pack(f"<{_LAYOUT[kind]}", value)


def _array(key: str, values: list[object]) -> bytes:
    kinds = {type(value) for value in values}
    if kinds <= {str}:
        return struct.pack("<IQ", _STRING, len(values)) + b"".join(_text(str(value)) for value in values)
    if kinds == {bool}:
        return struct.pack(f"<IQ{len(values)}?", _BOOL, len(values), *values)
    if kinds == {int}:
        numbers = np.array(values, np.int64)
        kind = _INT32 if np.array_equal(numbers.astype(np.int32), numbers) else _INT64
        return struct.pack("<IQ", kind, len(values)) + numbers.astype(f"<{_LAYOUT[kind]}").tobytes()
    if kinds <= {int, float}:
        return struct.pack("<IQ", _FLOAT32, len(values)) + np.array(values, "<f4").tobytes()
    raise ConfigError(f"metadata {key!r}: a GGUF file has no type for a list of {', '.join(k.__name__ for k in kinds)}")
