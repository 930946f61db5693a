"""GGUF files, versions 2 and 3, little-endian (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

A file is untrusted until it is checked: every count is compared with the bytes that remain before anything of that size
is allocated, sizes are computed in Python's integers, which do not overflow, and every error names file and field.
"""

import struct
from collections import UserDict
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.fields import refuse, shorten
from roofline.ops.formats import FORMATS, readable
from roofline.weights.files.gguf_strings import StringArray, find_strings
from roofline.weights.files.mapped import TensorInfo, as_bytes, map_file

MAX_KEY_BYTES = 65_535  # the specification's own limit
MAX_STRING_BYTES = 1 << 26
MAX_ELEMENTS = 1 << 24  # of all arrays of a file together
MAX_ARRAY_DEPTH = 4
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4

_BOOL, _STRING, _ARRAY = 7, 8, 9
# Value type number -> layout of the scalar, as struct and numpy spell it.
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", _BOOL: "<B", 10: "<Q", 11: "<q", 12: "<d"}
_TOO_MANY = "cannot fit in a file of {} bytes (it is truncated or damaged; get it again)"
_MIN_KEY_VALUE = 8 + 1 + 4 + 1
_MIN_TENSOR = 8 + 1 + 4 + 8 + 4 + 8

# Types that ggml knows and we do not read, for an error that names them.
_FOREIGN = {
    **{9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4", 41: "Q1_0"},
}


class GgufMetadata(UserDict[str, object]):
    """Key -> value as plain Python: int, float, bool, str, list. Arrays are decoded at first use and then kept."""

    def __init__(self, path: Path, values: dict[str, object]) -> None:
        self._path, self.data = path, values  # UserDict's own initialiser would decode all

    def __getitem__(self, key: str) -> object:
        value = self.data[key]
        if isinstance(value, StringArray | np.ndarray):
            value = self.data[key] = _decoded(self._path, shorten(key), value)
        return value


class GGUFFile:
    """An opened, fully checked GGUF file.

    Attributes:
        path, version, metadata, alignment.
        tensors: the file's own names -> TensorInfo; shapes are (rows, cols), the reverse of ggml's `ne`.

    Raises ConfigError naming file and field for anything malformed, UnsupportedError for tensor types we do not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._data = as_bytes(map_file(self.path))
        cursor = _Cursor(self.path, self._data)
        self.version, tensor_count, value_count = _read_head(cursor)
        self.metadata = GgufMetadata(self.path, _read_values(cursor, value_count))
        self.alignment = _alignment(self.path, self.metadata)
        self.tensors, offsets = _read_tensors(cursor, tensor_count)
        data_start = -(-cursor.position // self.alignment) * self.alignment
        _check_places(self.path, self.tensors, offsets, self.alignment, len(self._data) - data_start)
        self._places = {name: data_start + offset for name, offset in offsets.items()}

    def read(self, name: str) -> np.ndarray:
        """uint8 [nbytes], a view of the mapped file. Raises ConfigError for an unknown name."""
        if name not in self.tensors:
            raise ConfigError(f"{self.path}: there is no tensor {name!r}")
        start = self._places[name]
        return self._data[start : start + self.tensors[name].nbytes]


class _Cursor:
    """A position in the file; reading past the end raises ConfigError."""

    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.path, self.data, self.buffer = path, data, data.data
        self.size, self.position = len(data), 0
        self.elements_left = MAX_ELEMENTS

    @property
    def remaining(self) -> int:
        return self.size - self.position

    def take(self, count: int, field: str) -> int:
        """Move past `count` bytes; returns the position where they begin."""
        if count > self.remaining:
            refuse(
                self.path,
                field,
                f"needs {count} bytes, {self.remaining} are left (the file is truncated or damaged; get it again)",
            )
        start = self.position
        self.position = start + count
        return start

    def number(self, layout: str, field: str) -> Any:
        return struct.unpack_from(layout, self.buffer, self.take(struct.calcsize(layout), field))[0]

    def text(self, field: str, limit: int = MAX_STRING_BYTES) -> str:
        length = self.number("<Q", field)
        if length > limit:
            refuse(self.path, field, f"a string of {length} bytes is longer than the {limit} allowed")
        start = self.take(length, field)
        try:
            return bytes(self.buffer[start : start + length]).decode("utf-8")
        except UnicodeDecodeError:
            refuse(self.path, field, "is not UTF-8")


def _read_head(cursor: _Cursor) -> tuple[int, int, int]:
    """(version, tensor count, key-value count)."""
    if bytes(cursor.buffer[:4]) != b"GGUF":
        refuse(
            cursor.path, "magic", "this is not a GGUF file; name one, whose first four bytes are GGUF, or get it again"
        )
    cursor.take(4, "magic")
    version = cursor.number("<I", "version")
    if version not in (2, 3):
        hint = " (a big-endian file)" if version in (2 << 24, 3 << 24) else ""
        refuse(cursor.path, "version", f"{version}{hint} is not 2 or 3")
    tensor_count = cursor.number("<Q", "tensor_count")
    value_count = cursor.number("<Q", "metadata_kv_count")
    if value_count > cursor.remaining // _MIN_KEY_VALUE:
        refuse(cursor.path, "metadata_kv_count", f"{value_count} entries {_TOO_MANY.format(cursor.size)}")
    if tensor_count > cursor.remaining // _MIN_TENSOR:
        refuse(cursor.path, "tensor_count", f"{tensor_count} tensors {_TOO_MANY.format(cursor.size)}")
    return version, tensor_count, value_count


def _read_name(cursor: _Cursor, owner: str, noun: str, index: int, earlier: Container[str]) -> tuple[str, str]:
    """A key of the metadata or a tensor's name, and what errors call its entry."""
    name = cursor.text(f"{owner} {noun} {index}", MAX_KEY_BYTES)
    field = f"{owner} {shorten(name)!r}"
    if not name:
        refuse(cursor.path, f"{owner} {noun} {index}", "is empty")
    if name in earlier:
        refuse(cursor.path, field, f"the {noun} appears twice")
    return name, field


def _read_values(cursor: _Cursor, count: int) -> dict[str, object]:
    values: dict[str, object] = {}
    for index in range(count):
        key, field = _read_name(cursor, "metadata", "key", index, values)
        values[key] = _read_value(cursor, cursor.number("<I", field), field, 0)
    return values


def _read_value(cursor: _Cursor, kind: int, field: str, depth: int) -> object:
    if kind == _STRING:
        return cursor.text(field)
    if kind == _ARRAY:
        return _read_array(cursor, field, depth + 1)
    if kind not in _SCALARS:
        refuse(cursor.path, field, f"value type {kind} is unknown")
    value = cursor.number(_SCALARS[kind], field)
    if kind == _BOOL:
        if value > 1:
            refuse(cursor.path, field, f"{value} is not a boolean")
        return bool(value)
    return value


def _read_array(cursor: _Cursor, field: str, depth: int) -> StringArray | np.ndarray | list[object]:
    """A StringArray, a numpy array (both decoded at first use), or a list for arrays of arrays."""
    if depth > MAX_ARRAY_DEPTH:
        refuse(cursor.path, field, f"arrays are nested deeper than {MAX_ARRAY_DEPTH}")
    kind = cursor.number("<I", field)
    count = cursor.number("<Q", field)
    if kind not in (_STRING, _ARRAY) and kind not in _SCALARS:
        refuse(cursor.path, field, f"array element type {kind} is unknown")
    smallest = {_STRING: 8, _ARRAY: 12}.get(kind) or np.dtype(_SCALARS[kind]).itemsize
    if count > cursor.remaining // smallest:
        refuse(cursor.path, field, f"{count} elements cannot fit in the {cursor.remaining} bytes left")
    if count > cursor.elements_left:
        refuse(cursor.path, field, f"{count} elements are more than the {MAX_ELEMENTS} allowed in a file")
    cursor.elements_left -= count
    if kind == _ARRAY:
        return [_decoded(cursor.path, field, _read_array(cursor, field, depth + 1)) for _ in range(count)]
    if kind == _STRING:
        strings = find_strings(cursor.data, cursor.position, count)
        if strings is None:
            refuse(cursor.path, field, "a string of the array runs past the end of the file")
        cursor.position = strings.end
        return strings
    start = cursor.take(count * smallest, field)
    numbers = cursor.data[start : start + count * smallest]
    if kind != _BOOL:
        return numbers.view(_SCALARS[kind])
    if count and numbers.max() > 1:
        refuse(cursor.path, field, "an element is not a boolean")
    return numbers.view(np.bool_)


def _decoded(path: Path, field: str, value: StringArray | np.ndarray | list[object]) -> list[object]:
    """An array as a list."""
    if isinstance(value, StringArray):
        try:
            return [*value.decode()]
        except UnicodeDecodeError:
            refuse(path, field, "a string of the array is not UTF-8")
    return value.tolist() if isinstance(value, np.ndarray) else value


def _alignment(path: Path, metadata: GgufMetadata) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or isinstance(value, bool) or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
        refuse(path, "general.alignment", f"{value!r} is not a power of two from 8 to {MAX_ALIGNMENT}")
    return value


def _read_tensors(cursor: _Cursor, count: int) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    """The tensor table: infos and offsets (from the start of the data), by name, in the file's order."""
    tensors: dict[str, TensorInfo] = {}
    offsets: dict[str, int] = {}
    for index in range(count):
        name, field = _read_name(cursor, "tensor", "name", index, tensors)
        dims = cursor.number("<I", field)
        if not 1 <= dims <= MAX_DIMS:
            refuse(cursor.path, field, f"{dims} dimensions are not 1 to {MAX_DIMS}")
        extents = struct.unpack_from(f"<{dims}Q", cursor.buffer, cursor.take(8 * dims, field))
        kind = cursor.number("<I", field)
        offsets[name] = cursor.number("<Q", field)
        tensors[name] = _tensor_info(cursor, name, field, tuple(reversed(extents)), kind)
    return tensors, offsets


def _tensor_info(cursor: _Cursor, name: str, field: str, shape: tuple[int, ...], kind: int) -> TensorInfo:
    if kind in _FOREIGN and all(form.gguf_type != kind for form in FORMATS.values()):
        raise UnsupportedError(f"{cursor.path}: {field}: type {_FOREIGN[kind]}", "we do not read it", readable())
    form = next((form for form in FORMATS.values() if form.gguf_type == kind), None)
    if form is None:
        refuse(cursor.path, field, f"type {kind} is unknown")
    if 0 in shape:
        refuse(cursor.path, field, f"a dimension of {shape} is 0")
    if shape[-1] % form.block:
        refuse(cursor.path, field, f"rows of {shape[-1]} are not whole blocks of {form.block} ({form.name})")
    nbytes = form.nbytes(shape)  # Python's integers: no overflow, however large the dimensions
    if nbytes > cursor.size:
        refuse(cursor.path, field, f"{form.name} of shape {shape} takes {nbytes} bytes, the file has {cursor.size}")
    return TensorInfo(name, form.name, shape, nbytes)


def _check_places(
    path: Path, tensors: Mapping[str, TensorInfo], offsets: Mapping[str, int], alignment: int, data_bytes: int
) -> None:
    """Every tensor is aligned, inside the file, and alone in its bytes."""
    end, previous = 0, ""
    for name in sorted(tensors, key=offsets.__getitem__):
        field, offset = f"tensor {shorten(name)!r}", offsets[name]
        if offset % alignment:
            refuse(path, field, f"offset {offset} is not a multiple of the alignment {alignment}")
        if offset + tensors[name].nbytes > data_bytes:
            stop = offset + tensors[name].nbytes
            refuse(path, field, f"ends at byte {stop} of {max(data_bytes, 0)} bytes of data (truncated or damaged)")
        if offset < end:
            refuse(path, field, f"overlaps tensor {shorten(previous)!r}")
        end, previous = offset + tensors[name].nbytes, name
