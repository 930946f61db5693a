"""Encodes and decodes the columns of MDS samples: the encodings of version 2, except pickled objects and images.

Source: the format of mosaicml-streaming 0.13 (Apache-2.0); each side reads the other's shards.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from math import prod
from typing import TypeVar

import numpy as np

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.names import did_you_mean

V = TypeVar("V")
_SHAPES = ("<u1", "<u2", "<u4", "<u8")  # by the two low bits of the byte before a shape
_KINDS = ("uint", "int", "float")
# By the byte before an array whose dtype is not in the encoding's name: its bits plus 0, 1 or 2 for the kind.
_VALUES = {bits + i: f"{_KINDS[i]}{bits}" for bits in (8, 16, 32, 64) for i in range(3) if bits + i != 10}
_CODES = {name: code for code, name in _VALUES.items()}
_MOST_AXES = 63
_PICTURES = ("pil", "jpeg", "jpeg_array", "jpegarray", "png", "list[pil]", "list[jpeg]", "list[png]")
_REFUSED = dict.fromkeys(_PICTURES, "pictures are not read")
_REFUSED["pkl"] = "unpickling runs whatever code the file holds"


@dataclass(frozen=True)
class Encoding:
    """size: bytes of every value, None if they vary. Both functions raise ConfigError."""

    size: int | None
    encode: Callable[[object], bytes]
    decode: Callable[[bytes], object]


def encoding(name: str) -> Encoding:
    """The encoding of that name, such as "bytes", "int", "ndarray:uint16" or "ndarray:int32:2,3".

    Raises ConfigError when there is none, UnsupportedError for those left out on purpose.
    """
    kind, _, rest = name.partition(":")
    if kind in _REFUSED:
        raise UnsupportedError(f"MDS encoding {name!r}", _REFUSED[kind], ["bytes", "json", "ndarray"])
    if kind == "ndarray":
        return _ndarray(rest)
    if rest or kind not in _PLAIN:
        raise ConfigError(f"there is no MDS encoding {name!r}{did_you_mean(kind, [*_PLAIN, 'ndarray'])}")
    return _PLAIN[kind]


def _encoding(
    name: str,
    size: int | None,
    kind: type[V] | tuple[type[V], ...],
    encode: Callable[[V], bytes],
    decode: Callable[[bytes], object],
) -> Encoding:
    """An encoding of values of one type whose functions check type and size, and turn errors into ConfigError."""

    def checked_encode(value: object) -> bytes:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise ConfigError(f"MDS encoding {name!r} does not take {type(value).__name__}")
        try:
            return encode(value)
        except (OverflowError, ValueError, TypeError) as error:
            raise ConfigError(f"MDS encoding {name!r}: {error}") from error

    def checked_decode(data: bytes) -> object:
        if size is not None and len(data) != size:
            raise ConfigError(f"MDS encoding {name!r}: {len(data)} bytes instead of {size}")
        try:
            return decode(data)
        except (ValueError, InvalidOperation) as error:
            raise ConfigError(f"MDS encoding {name!r}: {error}") from error

    return Encoding(size, checked_encode, checked_decode)


def _number(name: str) -> Encoding:
    dtype = np.dtype(name).newbyteorder("<")

    def encode(value: object) -> bytes:
        stored = np.asarray(value).astype(dtype)
        if dtype.kind in "iu" and int(stored) != value:
            raise ConfigError(f"MDS encoding {name!r} does not hold {value}")
        return stored.tobytes()

    return _encoding(name, dtype.itemsize, (int, float, np.generic), encode, lambda data: np.frombuffer(data, dtype)[0])


def _text(name: str, kind: type) -> Encoding:
    return _encoding(name, None, kind, lambda value: str(value).encode(), lambda data: kind(data.decode()))


_PLAIN: dict[str, Encoding] = {
    "bytes": _encoding("bytes", None, bytes, bytes, bytes),
    "str": _text("str", str),
    "int": _encoding(
        "int",
        8,
        int,
        lambda v: v.to_bytes(8, "little", signed=True),
        lambda d: int.from_bytes(d, "little", signed=True),
    ),
    "str_int": _text("str_int", int),
    "str_float": _text("str_float", float),
    "str_decimal": _text("str_decimal", Decimal),
    "json": _encoding("json", None, object, lambda v: json.dumps(v).encode(), lambda d: json.loads(d.decode())),
    **{name: _number(name) for name in _CODES},
}


def _ndarray(text: str) -> Encoding:
    """text: "", "dtype" or "dtype:2,3"; what is not given here stands before each array's values."""
    name = f"ndarray:{text}" if text else "ndarray"
    dtype_name, _, axes = text.partition(":")
    if dtype_name and dtype_name not in _CODES:
        raise ConfigError(f"MDS encoding {name!r}: {dtype_name!r} is no dtype of it{did_you_mean(dtype_name, _CODES)}")
    try:
        shape = tuple(int(axis) for axis in axes.split(",")) if axes else None
    except ValueError as error:
        raise ConfigError(f"MDS encoding {name!r}: {axes!r} is no shape") from error
    if shape is not None and min(shape) < 1:
        raise ConfigError(f"MDS encoding {name!r}: every axis is at least 1 long")
    size = prod(shape) * np.dtype(dtype_name).itemsize if dtype_name and shape else None

    def encode(value: np.ndarray) -> bytes:
        if value.dtype.name not in _CODES or (dtype_name and value.dtype.name != dtype_name):
            raise ConfigError(f"MDS encoding {name!r} does not take an array of {value.dtype}")
        if shape is not None and value.shape != shape:
            raise ConfigError(f"MDS encoding {name!r} does not take an array of shape {list(value.shape)}")
        if not value.size or not 1 <= value.ndim <= _MOST_AXES:
            raise ConfigError(f"MDS encoding {name!r} takes arrays of 1 to {_MOST_AXES} axes that hold something")
        head = b"" if dtype_name else bytes([_CODES[value.dtype.name]])
        if shape is None:
            width = next(i for i in range(4) if max(value.shape) < 1 << (8 << i))
            head += bytes([value.ndim << 2 | width]) + np.array(value.shape).astype(_SHAPES[width]).tobytes()
        return head + np.ascontiguousarray(value, value.dtype.newbyteorder("<")).tobytes()

    def decode(data: bytes) -> np.ndarray:
        dtype, at = dtype_name, 0
        if not dtype:
            dtype, at = _VALUES.get(data[0] if data else -1, ""), 1
            if not dtype:
                raise ConfigError(f"MDS encoding {name!r}: unknown dtype in a sample")
        axes = shape
        if axes is None:
            if at >= len(data):
                raise ConfigError(f"MDS encoding {name!r}: a sample ends before its shape")
            count, width = data[at] >> 2, data[at] & 3
            stop = at + 1 + (count << width)
            axes = tuple(int(axis) for axis in np.frombuffer(data[at + 1 : stop], _SHAPES[width]))
            at = stop
        stored = np.dtype(dtype).newbyteorder("<")
        if len(data) - at != prod(axes) * stored.itemsize or at > len(data):
            raise ConfigError(f"MDS encoding {name!r}: {len(data)} bytes do not hold an array of {list(axes)} {dtype}")
        return np.frombuffer(data, stored, offset=at).reshape(axes)

    return _encoding(name, size, np.ndarray, encode, decode)
