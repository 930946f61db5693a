"""Safetensors files and the folders Hugging Face writes (https://github.com/huggingface/safetensors#format).

A file is a uint64 header length, a JSON header, and bytes. It is untrusted until checked: the header is capped, its
offsets must tile the bytes without overlap, hole or end beyond the file, and each range must be what shape and
dtype need.
"""

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from roofline.common.errors import ConfigError
from roofline.common.fields import refuse, shorten
from roofline.common.json_files import parse_json, read_json_file
from roofline.weights.files.mapped import JsonObject, TensorInfo, as_bytes, map_file

MAX_HEADER_BYTES = 100_000_000  # the reference implementation's cap
MAX_DIMS = 8
INDEX = "model.safetensors.index.json"

# Every dtype of the specification -> bits an element takes.
_DTYPE_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64},
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8},
    **{"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64},
}


class SafetensorsFile:
    """One opened, fully checked file.

    Attributes:
        path.
        tensors: name -> TensorInfo, whose format is the file's dtype (also those we cannot compute with).

    Raises ConfigError naming file and field for anything malformed.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._data = as_bytes(map_file(self.path))
        header, self._data_start = self._header()
        self.tensors: dict[str, TensorInfo] = {}
        self._begins: dict[str, int] = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            self.tensors[name], self._begins[name] = _entry(self.path, name, entry)
        self._check_places()

    def read(self, name: str) -> np.ndarray:
        """uint8 [nbytes], a view of the mapped file. Raises ConfigError for an unknown name."""
        if name not in self.tensors:
            raise ConfigError(f"{self.path}: there is no tensor {name!r}")
        start = self._data_start + self._begins[name]
        return self._data[start : start + self.tensors[name].nbytes]

    def _header(self) -> tuple[JsonObject, int]:
        if len(self._data) < 8:
            refuse(self.path, "header length", f"the file has only {len(self._data)} bytes")
        length = struct.unpack("<Q", self._data[:8].tobytes())[0]
        if length > MAX_HEADER_BYTES:
            refuse(self.path, "header length", f"{length} bytes are more than the {MAX_HEADER_BYTES} allowed")
        if length > len(self._data) - 8:
            refuse(self.path, "header length", f"{length} bytes, {len(self._data) - 8} are left (truncated or damaged)")
        text = self._data[8 : 8 + length].tobytes()
        if not text.startswith(b"{"):
            refuse(self.path, "header", "does not begin with '{'; this is not a safetensors file")
        header = parse_json(self.path, "header", text)
        assert isinstance(header, dict), "it begins with a brace"
        return header, 8 + length

    def _check_places(self) -> None:
        """The tensors tile the data: no overlap, no hole, nothing beyond the end, nothing left over."""
        end = 0
        for name in sorted(self.tensors, key=lambda n: (self._begins[n], self.tensors[n].nbytes)):
            begin, field = self._begins[name], f"tensor {shorten(name)!r}"
            if begin != end:
                refuse(self.path, field, f"begins at byte {begin}: {'overlap' if begin < end else 'hole'}, not {end}")
            end = begin + self.tensors[name].nbytes
        available = len(self._data) - self._data_start
        if end != available:
            refuse(self.path, "data_offsets", f"cover {end} bytes, the file holds {available} (truncated or damaged)")


def _entry(path: Path, name: str, entry: object) -> tuple[TensorInfo, int]:
    """A tensor of the header and where it begins in the data."""
    field = f"tensor {shorten(name)!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        refuse(path, field, "needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        refuse(path, f"{field}: dtype", f"{shorten(str(dtype))!r} is unknown")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(_is_count(d) for d in shape):
        refuse(path, f"{field}: shape", f"is not a list of at most {MAX_DIMS} sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(d) for d in offsets):
        refuse(path, f"{field}: data_offsets", "is not a pair of positions")
    bits = _DTYPE_BITS[dtype]
    for dim in shape:
        bits *= dim
    begin, end = offsets
    if end - begin != bits // 8 or bits % 8:
        refuse(path, f"{field}: data_offsets", f"hold {end - begin} bytes, {dtype} of {shape} takes {bits / 8:g}")
    return TensorInfo(name, dtype, tuple(shape), end - begin), begin


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


class SafetensorsModel:
    """config.json and the tensors of one file or of all shards.

    Args:
        path: a folder, or one .safetensors file with config.json beside it.

    Attributes:
        config: config.json, parsed; config_path: where it is.
        tensors: name -> TensorInfo over all shards.

    Raises ConfigError naming file and field.
    """

    def __init__(self, path: Path) -> None:
        folder = path if path.is_dir() else path.parent
        self.config_path = folder / "config.json"
        self.config = read_json_file(self.config_path)
        files, placed = _files_of_folder(folder) if path.is_dir() else ([path], None)
        self._home: dict[str, SafetensorsFile] = {}
        for file in (SafetensorsFile(f) for f in files):
            for name in file.tensors:
                field = f"tensor {shorten(name)!r}"
                if name in self._home:
                    refuse(file.path, field, f"is also in {self._home[name].path.name}")
                if placed is not None and placed.get(name) != file.path.name:
                    refuse(folder / INDEX, field, f"the index does not place it in {file.path.name}, where it is")
                self._home[name] = file
        for name in placed or ():
            if name not in self._home:
                refuse(folder / INDEX, f"tensor {shorten(name)!r}", "is in no file")
        self.tensors: Mapping[str, TensorInfo] = {name: file.tensors[name] for name, file in self._home.items()}

    def read(self, name: str) -> np.ndarray:
        """uint8 [nbytes], a view of a mapped file. Raises ConfigError for an unknown name."""
        if name not in self._home:
            raise ConfigError(f"{self.config_path.parent}: there is no tensor {name!r}")
        return self._home[name].read(name)


def _files_of_folder(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The folder's weight files and, when an index names them, the file of every tensor."""
    index = folder / INDEX
    if not index.exists():
        single = folder / "model.safetensors"
        files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
        if len(files) != 1:
            refuse(folder, "folder", f"holds {len(files)} safetensors files and no {INDEX}")
        return files, None
    placed = read_json_file(index).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(v, str) for v in placed.values()):
        refuse(index, "weight_map", "is not a mapping from tensors to files")
    names = sorted(set(placed.values()))
    for name in names:
        # A plain name: an index must not reach outside its folder.
        if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            refuse(index, "weight_map", f"{shorten(name)!r} is not the name of a safetensors file of this folder")
    return [folder / name for name in names], placed
