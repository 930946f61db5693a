"""8-bit floats: matrices of e4m3, whose scales lie in other tensors, become one format, E4M3.

As "fp8" of transformers and DeepSeek writes them: a scale for each 128 x 128 in `NAME_scale_inv`, or one for the
matrix in `NAME_scale`. compressed-tensors' "float-quantized" is the same with other shapes of scales
(`compressed.py`). All scales multiply. How activations were meant to be rounded (`input_scale`) is left unread: ours
have 16 bits.
"""

import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from roofline.common.errors import UnsupportedError
from roofline.common.fields import refuse, shorten
from roofline.ops import formats
from roofline.ops.formats.float8 import BLOCK, join
from roofline.weights.quantised.method import FLOATS, PlainFloats, QuantisedMatrix, TensorFiles, check_keys

STORED = "F8_E4M3"  # as safetensors calls the dtype
FORMAT = "E4M3"
_SCALES = ("_scale_inv", "_scale")
# Of activations and of a cache, as the file's makers chose them.
_UNUSED = re.compile(r".*\.(input_scale|output_scale|q_scale|k_scale|v_scale|activation_scale)")
_KEYS: Mapping[str, tuple[object, ...] | None] = {
    "quant_method": ("fp8",),
    "weight_block_size": ([BLOCK, BLOCK],),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "dequantize": (False, True),
    # Of activations, and what is in the file anyway.
    **dict.fromkeys(("activation_scheme", "modules_to_not_convert", "ignored_layers", "kv_cache_scheme")),
    **dict.fromkeys(("scale_fmt", "is_checkpoint_fp8_serialized")),
}


class Float8(PlainFloats):
    """Matrices of e4m3, found by their dtype: every checkpoint may hold some, whatever its configuration says."""

    def parameters(self, files: TensorFiles) -> Iterable[QuantisedMatrix]:
        """Every tensor of e4m3."""
        super().parameters(files)
        return [parameter(files, name) for name, info in files.tensors.items() if info.format == STORED]

    def unread(self, name: str) -> bool:
        """Scales of activations and of a cache."""
        return _UNUSED.fullmatch(name) is not None


def parameter(files: TensorFiles, name: str) -> QuantisedMatrix:
    """A matrix of e4m3; where its rows are no multiple of 128, the same numbers in float32.

    Raises ConfigError where its scale is not there or of another shape, UnsupportedError for what is no matrix.
    """
    shape = files.tensors[name].shape
    if len(shape) != 2 or 0 in shape:
        what = f"{files.path}: tensor {shorten(name)!r} of shape {shape} in 8-bit floats"
        raise UnsupportedError(what, "matrices are read so", ("BF16", "F16"))
    scales = [name + end for end in _SCALES if name + end in files.tensors]
    if len(scales) != 1:
        files.refuse(name, f"{len(scales)} tensors hold its scale: {name}_scale or {name}_scale_inv should")
    scale = files.tensors[scales[0]]
    if scale.format not in FLOATS or scale.shape not in _shapes(*shape):
        refuse(files.path, f"tensor {shorten(scales[0])!r}", f"{scale.format} of {scale.shape} for {shape}")
    parts, matrix = (name, scales[0]), (shape[0], shape[1])
    if not shape[1] % BLOCK:
        return QuantisedMatrix(name, FORMAT, matrix, parts, partial(_bytes, files, name, scales[0]))
    why = f"rows of 8-bit floats that are no multiple of {BLOCK}"
    return QuantisedMatrix(
        name=name, format="F32", shape=matrix, parts=parts, make=partial(_wide, files, name, scales[0]), widened=why
    )


def _bytes(files: TensorFiles, name: str, scale: str) -> np.ndarray:
    rows, columns = files.tensors[name].shape
    return join(files.source.read(name), _spread(files.floats(scale), rows, columns // BLOCK))


def _wide(files: TensorFiles, name: str, scale: str) -> np.ndarray:
    """uint8 of float32 [rows, columns]: the numbers that the format would hold of rows filled up with zeros."""
    rows, columns = files.tensors[name].shape
    groups = -(-columns // BLOCK)
    codes = np.zeros((rows, groups * BLOCK), np.uint8)
    codes[:, :columns] = files.source.read(name).reshape(rows, columns)
    blocks = join(codes, _spread(files.floats(scale), rows, groups))
    values = formats.get(FORMAT).dequantize(blocks, codes.shape)
    return np.ascontiguousarray(values[:, :columns]).view(np.uint8).reshape(-1)


def _shapes(rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
    """The shapes that a matrix's scales may have: one for all, one for each row, one for each 128 x 128."""
    return (), (1,), (1, 1), (rows,), (rows, 1), (-(-rows // BLOCK), -(-columns // BLOCK))


def _spread(scale: np.ndarray, rows: int, groups: int) -> np.ndarray:
    """Scales of any of these shapes as one for each 128 elements of a row: float32 [rows, groups]."""
    if scale.shape == (-(-rows // BLOCK), groups):
        scale = np.repeat(scale, BLOCK, axis=0)[:rows]
    return np.broadcast_to(scale.reshape(-1, scale.shape[-1] if scale.ndim == 2 else 1), (rows, groups))


def method(path: Path, quantization: object) -> Float8:
    """Raises UnsupportedError for a `quantization_config` that this module does not read."""
    check_keys(f"{path}: quantization_config", quantization, _KEYS)
    return Float8()
