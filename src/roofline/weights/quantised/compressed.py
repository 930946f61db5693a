"""compressed-tensors, as LLM Compressor writes it: integers of 4 and 8 bits, and 8-bit floats.

Of `NAME.weight`, by its format: "pack-quantized" has `weight_packed` int32 [rows, columns * bits / 32], whose codes
are offset by half their range, and `weight_shape`; "int-quantized" has `weight` int8 [rows, columns];
"float-quantized" has `weight` e4m3 (`float8.py`). Scales lie in `weight_scale`: one for the matrix, a row, a group of
neighbours; zero points in `weight_zero_point`, packed along the rows where the codes are, unless there is one for the
matrix; groups that are out of order in `weight_g_idx`. A weight is scale * (code - zero): the product itself, which
float32 holds exactly, where the library rounds it to the scales' dtype. How activations and a cache were meant to be
rounded is left unread: ours are rounded in our own way, which is declared.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from roofline.common.errors import UnsupportedError
from roofline.common.fields import shorten
from roofline.ops.formats.float8 import BLOCK
from roofline.weights.quantised import float8
from roofline.weights.quantised.integers import CodeLayout, Codes, even_groups, unpacked
from roofline.weights.quantised.method import FLOATS, READ, QuantisedMatrix, TensorFiles, check_keys

_FORMATS = ("int-quantized", "pack-quantized", "float-quantized", "naive-quantized")
_FORMATS_OF = {
    "int": ("int-quantized", "pack-quantized", "naive-quantized"),
    "float": ("float-quantized", "naive-quantized"),
}
_KEYS: Mapping[str, tuple[object, ...] | None] = {
    "quant_method": ("compressed-tensors",),
    "format": (*_FORMATS, "mixed-precision"),
    "config_groups": None,  # each is checked
    "quantization_status": ("compressed", "frozen"),
    "sparsity_config": ({},),
    "transform_config": ({},),
    # What is in the file anyway, and of activations and a cache.
    **dict.fromkeys(("ignore", "global_compression_ratio", "version", "kv_cache_scheme")),
}
_ONE = (), (1,), (1, 1)  # shapes of the scale of a whole matrix
_GROUP_KEYS: Mapping[str, tuple[object, ...] | None] = {
    "format": _FORMATS,
    "weights": None,  # checked
    **dict.fromkeys(("targets", "input_activations", "output_activations")),
}
_WEIGHT_KEYS: Mapping[str, tuple[object, ...] | None] = {
    "num_bits": (4, 8),
    "type": ("int", "float"),
    "symmetric": (True, False),
    "strategy": ("tensor", "channel", "group", "block"),
    "group_size": None,  # checked below
    "block_structure": ([BLOCK, BLOCK], "128x128"),
    "dynamic": (False,),
    # How the codes were found; the order of groups is in a tensor.
    **dict.fromkeys(("actorder", "scale_dtype", "zp_dtype", "observer", "observer_kwargs")),
}


@dataclass(frozen=True)
class Scheme:
    """How a config group stores weights. group: inputs that share a scale, 0: all of a row."""

    bits: int
    floats: bool
    symmetric: bool
    group: int


@dataclass(frozen=True)
class Compressed:
    """A checked configuration."""

    schemes: tuple[Scheme, ...]

    def parameters(self, files: TensorFiles) -> Iterable[QuantisedMatrix]:
        """Every matrix of codes or 8-bit floats, found by its tensors."""
        for name, info in files.tensors.items():
            if info.format == float8.STORED:
                if not any(scheme.floats for scheme in self.schemes):
                    files.refuse(name, "is of 8-bit floats, which no config group has")
                yield float8.parameter(files, name)
            elif name.endswith(".weight_packed") or (info.format == "I8" and name.endswith(".weight")):
                yield self._integers(files, name.removesuffix("_packed"))

    def unread(self, name: str) -> bool:
        """Scales and zero points of activations and of a cache."""
        return float8.Float8().unread(name) or name.endswith((".input_zero_point", ".output_zero_point"))

    def _integers(self, files: TensorFiles, name: str) -> QuantisedMatrix:
        packed = f"{name}_packed" in files.tensors
        (rows, columns), bits = _packed_shape(files, name) if packed else _plain_shape(files, name)
        symmetric = f"{name}_zero_point" not in files.tensors
        scales = files.need(f"{name}_scale", FLOATS, of=name)
        if scales.shape in (*_ONE, (rows,)):
            count = 1
        elif len(scales.shape) == 2 and scales.shape[0] == rows and scales.shape[1] and not columns % scales.shape[1]:
            count = scales.shape[1]
        else:
            files.refuse(scales.name, f"is of {scales.shape} for a matrix of {(rows, columns)}")
        scheme = Scheme(bits, False, symmetric, columns // count if count > 1 else 0)
        if scheme not in self.schemes and Scheme(bits, False, symmetric, columns // count) not in self.schemes:
            has = f"{bits} bits, symmetric {symmetric}, group {scheme.group}"
            files.refuse(name, f"is of {has}, which no config group of quantization_config has")
        parts = [f"{name}_packed" if packed else name, scales.name]
        if packed:
            parts.append(f"{name}_shape")
        group_of = even_groups(columns, count)
        if f"{name}_g_idx" in files.tensors:
            parts.append(f"{name}_g_idx")
            group_of = _group_of(files, f"{name}_g_idx", columns, count)
        if not symmetric:
            parts.append(f"{name}_zero_point")
            one = scales.shape in _ONE  # of a matrix it is not packed
            shape = (-(-rows * bits // 32), count) if packed and not one else (rows, count)
            shapes = _ONE if one else (shape,) if packed else (shape, (rows,))
            files.need(parts[-1], ("I32",) if packed and not one else ("I8",), *shapes, of=name)
        layout = CodeLayout((rows, columns), bits, not symmetric, scales.format, group_of)
        make = partial(_bytes, files, name, packed, layout)
        return QuantisedMatrix(
            name=name, format=layout.format, shape=layout.shape, parts=tuple(parts), make=make, widened=layout.widened
        )


def _packed_shape(files: TensorFiles, name: str) -> tuple[tuple[int, int], int]:
    """The shape of a matrix of packed codes, and their bits."""
    files.need(f"{name}_shape", ("I64", "I32"), (2,), of=f"{name}_packed")
    rows, columns = (int(size) for size in files.array(f"{name}_shape"))
    words = files.need(f"{name}_packed", ("I32",), of=name).shape
    for bits in (4, 8):
        if columns > 0 and rows > 0 and words == (rows, columns * bits // 32) and not columns * bits % 32:
            return (rows, columns), bits
    files.refuse(f"{name}_packed", f"is of {words} for a matrix of {(rows, columns)}; we read codes of 4 and 8 bits")


def _plain_shape(files: TensorFiles, name: str) -> tuple[tuple[int, int], int]:
    shape = files.tensors[name].shape
    if len(shape) != 2 or 0 in shape:
        files.refuse(name, f"is int8 of {shape}, not a matrix")
    return (shape[0], shape[1]), 8


def _group_of(files: TensorFiles, name: str, columns: int, count: int) -> np.ndarray:
    files.need(name, ("I32",), (columns,), of=name.removesuffix("_g_idx"))
    group_of = files.array(name).astype(np.int64)
    if group_of.max() >= count:  # -1, "not written", is the largest there is
        files.refuse(name, f"has a group that is not one of the {count} there are scales of")
    return group_of


def _bytes(files: TensorFiles, name: str, packed: bool, layout: CodeLayout) -> np.ndarray:
    rows, bits, zero = layout.shape[0], layout.bits, None
    code = unpacked(files.array(f"{name}_packed"), bits) if packed else _offset(files.array(name))
    if layout.has_zeros:
        stored = files.array(f"{name}_zero_point")
        is_packed = files.tensors[f"{name}_zero_point"].format == "I32"
        zero = _by_row(unpacked(stored.T, bits)[:, :rows].T if is_packed else _offset(stored, bits), rows)
    return layout.bytes_of(Codes(code, _by_row(files.floats(f"{name}_scale"), rows), zero))


def _by_row(values: np.ndarray, rows: int) -> np.ndarray:
    """Scales or zero points of a matrix, its rows or their groups as [rows, groups]."""
    groups = values.shape[1] if values.ndim == 2 else 1
    return np.broadcast_to(values.reshape(-1, groups), (rows, groups))


def _offset(values: np.ndarray, bits: int = 8) -> np.ndarray:
    """int8 as codes of 0 to 255; of fewer bits from half their range below 0 on."""
    return values.view(np.uint8) + np.uint8(1 << (bits - 1))


def method(path: Path, quantization: object) -> Compressed:
    """Raises UnsupportedError for a `quantization_config` that this module does not read."""
    what = f"{path}: quantization_config"
    table = check_keys(what, quantization, _KEYS)
    groups = table.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise UnsupportedError(f"{what} without config_groups", "nothing else says how weights are stored", READ)
    form = table.get("format")
    return Compressed(tuple(_scheme(f"{what}: config_groups {shorten(str(k))}", g, form) for k, g in groups.items()))


def _scheme(what: str, group: object, form: object) -> Scheme:
    """form: of all groups, where the group has no format of its own."""
    table = check_keys(what, group, _GROUP_KEYS)
    form = table.get("format") or form
    weights = check_keys(f"{what}: weights", table.get("weights"), _WEIGHT_KEYS)
    bits, kind, size = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    symmetric, strategy = weights.get("symmetric") is not False, weights.get("strategy")
    if bits is None or kind is None or strategy is None:
        raise UnsupportedError(f"{what}: weights without num_bits, type or strategy", "we do not guess them", READ)
    floats = kind == "float"
    if form not in _FORMATS_OF[str(kind)]:
        reason = f"weights of type {kind} are read in {', '.join(_FORMATS_OF[str(kind)])}"
        raise UnsupportedError(f"{what}: format {shorten(str(form))}", reason, READ)
    if floats and (bits != 8 or strategy == "group" or not symmetric):
        reason = "8-bit floats are read with scales by tensor, channel or 128 x 128"
        raise UnsupportedError(f"{what}: floats of {bits} bits by {strategy}", reason, READ)
    if not floats and strategy == "block":
        raise UnsupportedError(f"{what}: integers by block", "we read tensor, channel and group", READ)
    if strategy == "group" and (type(size) is not int or not 1 <= size <= 1 << 20):
        raise UnsupportedError(f"{what}: group_size {shorten(str(size))}", "we read sizes of groups", READ)
    return Scheme(int(str(bits)), floats, symmetric, int(str(size)) if strategy == "group" else 0)
