"""How a column of an MDS sample is written: the encodings of MosaicML's format, version 2, without code and pictures.

Source: the format of mosaicml-streaming 0.13 (Apache-2.0), whose shards these read and whose readers read ours.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from math import prod
from typing import Any

import numpy as np

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.names import did_you_mean

_SHAPES = ("<u1", "<u2", "<u4", "<u8")  # by the two low bits of the byte before a shape
_VALUES = {  # by the byte before values whose dtype is not in the encoding's name
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
_CODES = {name: code for code, name in _VALUES.items()}
_MOST_AXES = 63
_REFUSED = {
    "pkl": "unpickling runs whatever code the file holds",
    "pil": "pictures are not read",
    "jpeg": "pictures are not read",
    "jpeg_array": "pictures are not read",
    "png": "pictures are not read",
    "list[jpeg]": "pictures are not read",
    "list[png]": "pictures are not read",
}


@dataclass(frozen=True)
class Encoding:
    """size: bytes of every value; None: each value says its own. Both functions raise ConfigError."""

    size: int | None
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


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


def _wrapped(name: str, size: int | None, kind: type | tuple[type, ...], encode: Any, decode: Any) -> Encoding:
    def encoded(value: Any) -> bytes:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise ConfigError(f"MDS encoding {name!r} does not take {type(value).__name__}")
        try:
            return bytes(encode(value))
        except (OverflowError, ValueError, TypeError) as error:
            raise ConfigError(f"MDS encoding {name!r}: {error}") from error

    def decoded(data: bytes) -> Any:
        if size is not None and len(data) != size:
            raise ConfigError(f"MDS encoding {name!r}: {len(data)} bytes instead of {size}")
        try:
            return decode(data)
        except (ValueError, InvalidOperation) as error:
            raise ConfigError(f"MDS encoding {name!r}: {error}") from error

    return Encoding(size, encoded, decoded)


def _number(name: str) -> Encoding:
    dtype = np.dtype(name).newbyteorder("<")
    kinds = (int, float, np.generic)

    def encode(value: Any) -> bytes:
        stored = np.asarray(value).astype(dtype)
        if dtype.kind in "iu" and int(stored) != value:
            raise ConfigError(f"MDS encoding {name!r} does not hold {value}")
        return stored.tobytes()

    return _wrapped(name, dtype.itemsize, kinds, encode, lambda data: np.frombuffer(data, dtype)[0])


def _text(name: str, kind: type) -> Encoding:
    return _wrapped(name, None, kind, lambda value: str(value).encode(), lambda data: kind(data.decode()))


_PLAIN: dict[str, Encoding] = {
    "bytes": _wrapped("bytes", None, bytes, bytes, bytes),
    "str": _text("str", str),
    "int": _wrapped(
        "int",
        8,
        int,
        lambda v: v.to_bytes(8, "little", signed=True),
        lambda d: int.from_bytes(d, "little", signed=True),
    ),
    "str_int": _text("str_int", int),
    "str_float": _text("str_float", float),
    "str_decimal": _text("str_decimal", Decimal),
    "json": _wrapped("json", None, object, lambda v: json.dumps(v).encode(), lambda d: json.loads(d.decode())),
    **{name: _number(name) for name in _CODES},
}


def _ndarray(text: str) -> Encoding:
    """text: "" or "dtype" or "dtype:2,3": what is not said here stands before each array's values."""
    name = f"ndarray:{text}" if text else "ndarray"
    said, _, axes = text.partition(":")
    if said and said not in _CODES:
        raise ConfigError(f"MDS encoding {name!r}: {said!r} is no dtype of it{did_you_mean(said, _CODES)}")
    try:
        shape = tuple(int(axis) for axis in axes.split(",")) if axes else None
    except ValueError as error:
        raise ConfigError(f"MDS encoding {name!r}: {axes!r} is no shape") from error
    if shape is not None and min(shape) < 1:
        raise ConfigError(f"MDS encoding {name!r}: every axis is at least 1 long")
    size = prod(shape) * np.dtype(said).itemsize if said and shape else None

    def encode(value: Any) -> bytes:
        if value.dtype.name not in _CODES or (said and value.dtype.name != said):
            raise ConfigError(f"MDS encoding {name!r} does not take an array of {value.dtype}")
        if shape is not None and value.shape != shape:
            raise ConfigError(f"MDS encoding {name!r} does not take an array of shape {list(value.shape)}")
        if not value.size or not 1 <= value.ndim <= _MOST_AXES:
            raise ConfigError(f"MDS encoding {name!r} takes arrays of 1 to {_MOST_AXES} axes that hold something")
        head = b"" if said else bytes([_CODES[value.dtype.name]])
        if shape is None:
            width = next(i for i in range(4) if max(value.shape) < 1 << (8 << i))
            head += bytes([value.ndim << 2 | width]) + np.array(value.shape).astype(_SHAPES[width]).tobytes()
        return head + np.ascontiguousarray(value, value.dtype.newbyteorder("<")).tobytes()

    def decode(data: bytes) -> np.ndarray:
        dtype, at = said, 0
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
        whole = np.dtype(dtype).newbyteorder("<")
        if len(data) - at != prod(axes) * whole.itemsize or at > len(data):
            raise ConfigError(f"MDS encoding {name!r}: {len(data)} bytes do not hold an array of {list(axes)} {dtype}")
        return np.frombuffer(data, whole, offset=at).reshape(axes)

    return _wrapped(name, size, np.ndarray, encode, decode)
