"""Reads checkpoints of 8-bit floats: matrices of e4m3, whose scales lie in other tensors, become one format, E4M3.

Two ways to write them are known (`quantization_config` of config.json): "fp8" of transformers and DeepSeek, a scale for
each 128 x 128 in `NAME_scale_inv`, or one for the matrix in `NAME_scale`; and "compressed-tensors" in its format
"float-quantized", `NAME_scale` for the matrix, for each row, or for each 128 x 128. All scales multiply. How
activations were meant to be rounded (`input_scale`) is left unread: ours have 16 bits.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from roofline.common.errors import UnsupportedError
from roofline.common.fields import refuse, shorten
from roofline.ops import formats
from roofline.ops.formats.float8 import BLOCK, join
from roofline.weights.files.mapped import JsonObject, TensorInfo
from roofline.weights.files.safetensors import SafetensorsModel

STORED = "F8_E4M3"  # as safetensors calls the dtype
FORMAT = "E4M3"
_SCALES = ("_scale_inv", "_scale")
# Of activations and of a cache, as the file's makers chose them.
_UNUSED = re.compile(r".*\.(input_scale|output_scale|q_scale|k_scale|v_scale|activation_scale)")


def check_config(path: Path, quantization: object) -> None:
    """Raises UnsupportedError for a `quantization_config` (or `compression_config`) that is not one of the above."""
    what = f"{path}: quantization_config"
    supported = ("BF16", "F16", "fp8 of e4m3")
    if not isinstance(quantization, Mapping):
        raise UnsupportedError(f"{what} = {shorten(str(quantization))}", "it is no table", supported)
    method = quantization.get("quant_method")
    if method == "fp8":
        block = quantization.get("weight_block_size")
        if block is not None and block != [BLOCK, BLOCK]:
            what = f"{what}: weight_block_size = {shorten(str(block))}"
            raise UnsupportedError(what, "we read blocks of 128 x 128", supported)
        if quantization.get("fmt", "e4m3") != "e4m3":
            raise UnsupportedError(f"{what}: fmt {shorten(str(quantization['fmt']))}", "we read e4m3", supported)
    elif method == "compressed-tensors":
        _check_compressed(what, quantization, supported)
    else:
        raise UnsupportedError(f"{what}: quant_method {shorten(str(method))}", "we do not read it", supported)


def _check_compressed(what: str, quantization: JsonObject, supported: tuple[str, ...]) -> None:
    groups = quantization.get("config_groups")
    if quantization.get("format") != "float-quantized" or not isinstance(groups, Mapping):
        kind = shorten(str(quantization.get("format")))
        raise UnsupportedError(f"{what}: compressed-tensors of format {kind}", "we read float-quantized", supported)
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping) or (weights.get("num_bits"), weights.get("type")) != (8, "float"):
            raise UnsupportedError(f"{what}: weights of {shorten(str(weights))}", "we read floats of 8 bits", supported)
        strategy, block = weights.get("strategy"), weights.get("block_structure")
        if strategy not in ("tensor", "channel", "block") or (block is not None and block != [BLOCK, BLOCK]):
            scales = f"{shorten(str(strategy))} {shorten(str(block))}"
            raise UnsupportedError(f"{what}: scales by {scales}", "we read tensor, channel, 128 x 128", supported)


class Float8Tensors:
    """The tensors of `source` (its folder or file: `path`) with e4m3 matrices in the format E4M3, scales gone.

    Attributes: tensors: name -> TensorInfo. Raises ConfigError where a matrix has no scale or one of another shape, or
    a scale no matrix, UnsupportedError for rows that are no multiple of 128.
    """

    def __init__(self, path: Path, source: SafetensorsModel) -> None:
        self._path, self._source = path, source
        # Of the matrices, by name.
        self._scales = {name: self._scale_of(name) for name, info in source.tensors.items() if info.format == STORED}
        self.tensors: dict[str, TensorInfo] = {}
        used = set(self._scales.values())
        for name, info in source.tensors.items():
            if name in self._scales:
                self.tensors[name] = TensorInfo(name, FORMAT, info.shape, formats.get(FORMAT).nbytes(info.shape))
            elif name not in used and not (self._scales and _UNUSED.fullmatch(name)):
                self.tensors[name] = info

    def read(self, name: str) -> np.ndarray:
        """uint8 [nbytes]; made anew for a matrix of 8-bit floats."""
        if name not in self._scales:
            return self._source.read(name)
        rows, columns = self._source.tensors[name].shape
        info = self._source.tensors[self._scales[name]]
        scale = formats.get(info.format).dequantize(self._source.read(info.name), (math.prod(info.shape),))
        return join(self._source.read(name), _spread(scale.reshape(info.shape), rows, columns // BLOCK))

    def _scale_of(self, name: str) -> str:
        """The name of a matrix's scale, whose dtype and shape are checked."""
        info, field = self._source.tensors[name], f"tensor {shorten(name)!r}"
        if len(info.shape) != 2 or info.shape[1] % BLOCK:
            what = f"{self._path}: {field} of shape {info.shape} in 8-bit floats"
            raise UnsupportedError(what, f"rows are read in groups of {BLOCK}", ("BF16", "F16"))
        scales = [name + end for end in _SCALES if name + end in self._source.tensors]
        if len(scales) != 1:
            refuse(self._path, field, f"{len(scales)} tensors hold its scale: {name}_scale or {name}_scale_inv should")
        scale = self._source.tensors[scales[0]]
        if scale.format not in ("F32", "BF16", "F16") or scale.shape not in _shapes(*info.shape):
            refuse(self._path, f"tensor {shorten(scales[0])!r}", f"{scale.format} of {scale.shape} for {info.shape}")
        return scales[0]


def _shapes(rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
    """The shapes that a matrix's scales may have: one for all, one for each row, one for each 128 x 128."""
    return (), (1,), (1, 1), (rows,), (rows, 1), (-(-rows // BLOCK), columns // BLOCK)


def _spread(scale: np.ndarray, rows: int, groups: int) -> np.ndarray:
    """Scales of any of these shapes as one for each 128 elements of a row: float32 [rows, groups]."""
    if scale.shape == (-(-rows // BLOCK), groups):
        scale = np.repeat(scale, BLOCK, axis=0)[:rows]
    return np.broadcast_to(scale.reshape(-1, scale.shape[-1] if scale.ndim == 2 else 1), (rows, groups))
