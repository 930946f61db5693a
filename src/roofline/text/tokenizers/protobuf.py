"""Reads messages of Protocol Buffers, as far as SentencePiece's models need it: fields by number, in the file's order.

Nothing is copied and nothing recursed into: what is inside a field is read by whoever asks for it.
"""

import struct
from collections.abc import Iterator

from roofline.common.fields import refuse

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SIZES = {_FIXED64: 8, _FIXED32: 4}
MAX_VARINT = 10  # bytes of a number of 64 bits

Value = int | memoryview  # a number, or the bytes of a string, a message or a float


def message(path: str, name: str, data: memoryview) -> Iterator[tuple[int, Value]]:
    """(number, value) of each field. Raises ConfigError naming file and message for bytes that are none."""
    at = 0
    while at < len(data):
        key, at = _varint(path, name, data, at)
        number, wire = key >> 3, key & 7
        if number == 0:
            refuse(path, name, f"is no message of Protocol Buffers: its byte {at - 1} begins no field")
        if wire == _VARINT:
            value, at = _varint(path, name, data, at)
            yield number, value
            continue
        if wire == _BYTES:
            size, at = _varint(path, name, data, at)
        elif wire in _SIZES:
            size = _SIZES[wire]
        else:
            refuse(path, name, f"is no message of Protocol Buffers: field {number} is of kind {wire}")
        if size > len(data) - at:
            refuse(path, name, f"is cut off: field {number} has {size} bytes of which {len(data) - at} are there")
        yield number, data[at : at + size]
        at += size


def _varint(path: str, name: str, data: memoryview, at: int) -> tuple[int, int]:
    """A number written in groups of seven bits, and where it ends."""
    value = 0
    for place in range(at, min(at + MAX_VARINT, len(data))):
        value |= (data[place] & 0x7F) << 7 * (place - at)
        if data[place] < 0x80:
            return value, place + 1
    refuse(path, name, "is cut off, or no message of Protocol Buffers: a number does not end")


def whole(path: str, name: str, value: Value) -> int:
    """A whole number, whose sign is in its 64th bit."""
    if not isinstance(value, int):
        refuse(path, name, "is not a whole number")
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def flag(path: str, name: str, value: Value) -> bool:
    """True or false."""
    return whole(path, name, value) != 0


def decimal(path: str, name: str, value: Value) -> float:
    """A float of 32 bits."""
    if isinstance(value, int) or len(value) != 4:
        refuse(path, name, "is not a number of 32 bits")
    (number,) = struct.unpack("<f", value)
    if not abs(number) < 1e38:
        refuse(path, name, "is not a finite number")
    return float(number)


def binary(path: str, name: str, value: Value) -> memoryview:
    """Bytes, or a message inside."""
    if isinstance(value, int):
        refuse(path, name, "is a number where text or a message stands")
    return value


def text(path: str, name: str, value: Value) -> str:
    """A string."""
    try:
        return str(binary(path, name, value), "utf-8")
    except UnicodeDecodeError as error:
        refuse(path, name, f"is not UTF-8: {error.reason}")
