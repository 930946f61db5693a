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
from roofline.common.fields import Fields, refuse, shorten
from roofline.common.json_files import parse_json, read_config_json, read_json_file
from roofline.weights.files.mapped import JsonObject, TensorInfo, as_bytes, map_file
from roofline.weights.files.torch_pickle import PickledModel

MAX_HEADER_BYTES = 100_000_000  # the reference implementation's cap
MAX_DIMS = 8
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_NONE = "this is not a safetensors file; get it again"
_NAMED = "transformers_weights"  # key of config.json: the file or index that is read instead of these

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
            refuse(self.path, "header length", f"the file has only {len(self._data)} bytes (truncated; get it again)")
        length = struct.unpack("<Q", self._data[:8].tobytes())[0]
        if length > MAX_HEADER_BYTES:
            refuse(self.path, "header length", f"{length} bytes are more than the {MAX_HEADER_BYTES} allowed: {_NONE}")
        if length > len(self._data) - 8:
            remaining = len(self._data) - 8
            refuse(
                self.path, "header length", f"{length} bytes, {remaining} are left (truncated or damaged; get it again)"
            )
        text = self._data[8 : 8 + length].tobytes()
        if not text.startswith(b"{"):
            refuse(self.path, "header", f"does not begin with '{{': {_NONE}")
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
            refuse(
                self.path,
                "data_offsets",
                f"cover {end} bytes, the file holds {available} (truncated or damaged; get it again)",
            )


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
        paths: the files that are read, the index among them.
        tensors: name -> TensorInfo over all shards.

    Raises ConfigError naming file and field.
    """

    def __init__(self, path: Path) -> None:
        folder = path if path.is_dir() else path.parent
        self.config_path = folder / "config.json"
        self.config = read_config_json(self.config_path)
        file_name = Fields(self.config_path, self.config).get(_NAMED, str) if path.is_dir() else None
        index = _index_of_folder(folder, file_name) if path.is_dir() else None
        files, placed = (
            _placed(index) if index is not None else ([_single(folder, file_name) if path.is_dir() else path], {})
        )
        self.paths = (*files, *((index,) if index is not None else ()))
        self._home: dict[str, SafetensorsFile] = {}
        for file in (SafetensorsFile(f) for f in files):
            for name in file.tensors:
                # In several files the last one counts, as transformers (5.24) reads them, if the index agrees.
                if name in self._home and placed.get(name) != file.path.name:
                    refuse(file.path, f"tensor {shorten(name)!r}", f"is also in {self._home[name].path.name}")
                self._home[name] = file
        for name, place in placed.items():
            home = self._home[name].path.name if name in self._home else None
            if home != place:
                reason = "is in no file" if home is None else f"the index does not place it in {home}, where it is"
                refuse(index or folder, f"tensor {shorten(name)!r}", reason)
        self.tensors: Mapping[str, TensorInfo] = {name: file.tensors[name] for name, file in self._home.items()}

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether a folder holds such a model under the names that transformers gives it, or under any other name where
        no file of torch's is beside it."""
        if (folder / SINGLE).exists() or (folder / INDEX).exists():
            return True
        return bool(_named_freely(folder)) and not PickledModel.is_in(folder)

    def read(self, name: str) -> np.ndarray:
        """uint8 [nbytes], a view of a mapped file. Raises ConfigError for an unknown name."""
        if name not in self._home:
            raise ConfigError(f"{self.config_path.parent}: there is no tensor {name!r}")
        return self._home[name].read(name)


def _index_of_folder(folder: Path, file_name: str | None) -> Path | None:
    """The index that says which files are read; None where one file is. file_name: what config.json names, as below.

    As transformers (5.24): model.safetensors stands before an index that is there too.
    """
    if file_name is not None:
        return folder / _plain(folder, file_name) if file_name.endswith(".index.json") else None
    has_index = (folder / INDEX).exists() and not (folder / SINGLE).exists()
    return folder / INDEX if has_index else None


def _single(folder: Path, file_name: str | None) -> Path:
    """The one file of weights of a folder without index, whatever it is called."""
    if file_name is not None:
        return folder / _plain(folder, file_name)
    files = [folder / SINGLE] if (folder / SINGLE).exists() else _named_freely(folder)
    if len(files) != 1:
        refuse(folder, "folder", f"holds {len(files)} safetensors files and no {INDEX}")
    return files[0]


def _named_freely(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("adapter_"))


def _plain(folder: Path, file_name: str) -> str:
    """The name, if it is one of a file of the folder. Raises ConfigError."""
    if (
        not file_name.endswith((".safetensors", ".safetensors.index.json"))
        or Path(file_name).name != file_name
        or "\\" in file_name
    ):
        refuse(folder / "config.json", _NAMED, f"{shorten(file_name)!r} is no safetensors file of this folder")
    return file_name


def _placed(index: Path) -> tuple[list[Path], dict[str, str]]:
    """The files that an index names, and the file of every tensor."""
    placed = read_json_file(index).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(v, str) for v in placed.values()):
        refuse(index, "weight_map", "is not a mapping from tensors to files")
    names = sorted(set(placed.values()))
    for name in names:
        # A plain name: an index must not reach outside its folder.
        if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            refuse(index, "weight_map", f"{shorten(name)!r} is not the name of a safetensors file of this folder")
    return [index.parent / name for name in names], placed
