"""pytorch_model.bin, as transformers wrote models before safetensors: a pickle, read by torch's reader of weights.

That reader (`weights_only`) builds tensors and containers and refuses everything else, so no code of the file runs. It
needs torch, which serving on CPUs does not.
"""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.extras import named_packages
from roofline.common.fields import refuse, shorten
from roofline.common.files import open_regular
from roofline.common.json_files import read_config_json, read_json_file
from roofline.common.mistaken_files import unreadable
from roofline.weights.files.mapped import JsonObject, TensorInfo

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

SINGLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
_DTYPES = {
    **{"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float64": "F64"},
    **{"int8": "I8", "uint8": "U8", "int16": "I16", "int32": "I32", "int64": "I64", "bool": "BOOL"},
}


class PickledModel:
    """config.json and the tensors of a folder's pytorch_model.bin, or of the files its index names.

    Attributes:
        config: config.json, parsed; config_path: where it is.
        paths: the files that are read, the index among them.
        tensors: name -> TensorInfo over all files, whose format is the dtype as safetensors calls it.

    Raises ConfigError naming file and tensor, UnsupportedError for a pickle of more than tensors, and without torch.
    """

    def __init__(self, folder: Path) -> None:
        self.config_path = folder / "config.json"
        self.config: JsonObject = read_config_json(self.config_path)
        if self.config.get("transformers_weights") is not None:
            refuse(self.config_path, "transformers_weights", "names files of safetensors, and there are none")
        self._tensors: dict[str, Tensor] = {}
        infos: dict[str, TensorInfo] = {}
        files = _files(folder)
        self.paths = (*files, *(() if (folder / SINGLE).exists() else (folder / INDEX,)))
        for path in files:
            for name, tensor in _load(path).items():
                if name in infos:
                    refuse(path, f"tensor {shorten(name)!r}", "is also in another file")
                infos[name], self._tensors[name] = _info(path, name, tensor), tensor
        self.tensors: Mapping[str, TensorInfo] = infos

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether a folder holds such a model."""
        return (folder / SINGLE).exists() or (folder / INDEX).exists()

    def read(self, name: str) -> "np.ndarray":
        """uint8 [nbytes], a view of the mapped file where its elements lie in order. Raises ConfigError."""
        import torch

        if name not in self._tensors:
            raise ConfigError(f"{self.config_path.parent}: there is no tensor {name!r}")
        tensor = self._tensors[name].detach().contiguous()
        start, size = tensor.storage_offset() * tensor.element_size(), tensor.numel() * tensor.element_size()
        return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (size,), (1,)).numpy()


def _files(folder: Path) -> list[Path]:
    if (folder / SINGLE).exists():  # stands before an index, as for transformers
        return [folder / SINGLE]
    placed = read_json_file(folder / INDEX).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(v, str) for v in placed.values()):
        refuse(folder / INDEX, "weight_map", "is not a mapping from tensors to files")
    names = sorted(set(placed.values()))
    for name in names:
        if Path(name).name != name or "\\" in name or not name.endswith(".bin"):  # must not reach outside the folder
            refuse(folder / INDEX, "weight_map", f"{shorten(name)!r} is not the name of a .bin file of this folder")
    return [folder / name for name in names]


def _check_begin(path: Path) -> None:
    """Raises ConfigError for what begins neither as a zip archive nor as a pickle, which torch would call unsafe."""
    with open_regular(path) as stream:
        begin = stream.read(4)
    if begin != b"PK\3\4" and begin[:1] != b"\x80":
        raise unreadable(path, f"{path}: torch has not written this file; take another copy of the model")


def _load(path: Path) -> "Mapping[str, Tensor]":
    open_regular(path).close()  # its errors name the file
    _check_begin(path)
    with named_packages():
        import torch
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's, of damaged files, ask that they be reported to torch
            try:
                loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
                loaded = torch.load(path, map_location="cpu", weights_only=True)  # as torch saved before version 1.6
    except Exception as error:  # torch has no type of its own for damaged files
        if type(error).__name__ == "UnpicklingError":  # what is not imported cannot be used by mistake
            reason = f"it holds more than tensors, which would run code: {shorten(str(error))}"
            raise UnsupportedError(f"{path}: a pickle", reason, ("the same model as safetensors or GGUF",)) from error
        raise ConfigError(f"{path}: cannot be read: {shorten(str(error))}; take another copy of the model") from error
    if not isinstance(loaded, Mapping) or not all(isinstance(name, str) for name in loaded):
        refuse(path, "file", "does not hold a mapping from names to tensors")
    return loaded


def _info(path: Path, name: str, tensor: object) -> TensorInfo:
    import torch

    field = f"tensor {shorten(name)!r}"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:  # type: ignore[attr-defined]
        refuse(path, field, "is no plain tensor")
    assert isinstance(tensor, torch.Tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        refuse(path, field, f"is of {dtype}, which we do not read")
    nbytes = math.prod(tensor.shape) * tensor.element_size()
    if nbytes > tensor.untyped_storage().nbytes():  # one element repeated without end would be copied out
        refuse(path, field, f"is of {tuple(tensor.shape)}, more than the file holds of it")
    return TensorInfo(name, _DTYPES[dtype], tuple(tensor.shape), nbytes)
