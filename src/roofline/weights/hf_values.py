"""Where Hugging Face's tensors hold other values than our parameters, or in another order: read as ours, and written as
theirs."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from roofline.ops import formats
from roofline.weights.families.table import files_of
from roofline.weights.files.mapped import JsonObject, TensorInfo
from roofline.weights.joined_rows import rows_apart

Read = Callable[[str], np.ndarray]


def as_ours(config: JsonObject, tensors: Mapping[str, TensorInfo], read: Read) -> tuple[dict[str, TensorInfo], Read]:
    """The tensors of a model of that configuration as our parameters are: norms that lack something in float32, with
    it; matrices [outputs, inputs]; q, k and v one below the other; rows that lie in turn with others' by themselves.

    tensors: canonical name -> what the files hold; read: uint8 bytes of one of them.
    """
    table = files_of(config["family"]).NAMES
    stacked = {
        name: replace(info, shape=hf_shape(config, name, info.shape))
        for name, info in tensors.items()
        if table.is_stacked(name) and len(info.shape) > 2
    }
    tensors, read = rows_apart(config, {**tensors, **stacked}, read)
    infos = {}
    for name, info in tensors.items():
        if table.lacks(name):
            info = replace(info, format="F32", nbytes=4 * info.shape[0])
        infos[name] = info if name in stacked else replace(info, shape=hf_shape(config, name, info.shape))

    def read_ours(name: str) -> np.ndarray:
        raw, info = read(name), tensors[name]
        if table.lacks(name):
            values = formats.get(info.format).dequantize(raw, info.shape)
            return (values + np.float32(table.lacks(name))).view(np.uint8)
        if table.is_transposed(name):
            return _transposed(raw, info.shape)
        if table.is_by_head(name):
            return _swapped(raw, config["heads"], 3)
        return raw

    return infos, read_ours


def differs(config: JsonObject, name: str) -> bool:
    """Whether a parameter is another sequence of bytes in Hugging Face's files."""
    table = files_of(config["family"]).NAMES
    return bool(table.lacks(name)) or table.is_transposed(name) or table.is_by_head(name)


def hf_shape(config: JsonObject, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that Hugging Face's files give a parameter of that shape, and the other way round."""
    table = files_of(config["family"]).NAMES
    if table.is_parted(name):
        return (shape[0], 1, shape[1]) if len(shape) == 2 else (shape[0], shape[-1])
    if table.is_row(name):
        return (1, *shape) if len(shape) == 1 else shape[1:]
    if table.is_stacked(name):
        experts = config["experts"]
        return (experts, shape[0] // experts, shape[1]) if len(shape) == 2 else (shape[0] * shape[1], shape[2])
    return shape[::-1] if table.is_transposed(name) else shape


def is_lacking_in(config: JsonObject, name: str, values: np.ndarray, dtype: str) -> bool:
    """Return whether a parameter's float32 values are those of numbers in `dtype` that lack something to ours."""
    lack, form = np.float32(files_of(config["family"]).NAMES.lacks(name)), formats.get(dtype)
    theirs = form.dequantize(form.quantize(values - lack), values.shape)
    return bool(lack) and np.array_equal(theirs + lack, values)


def as_theirs(
    config: JsonObject, name: str, shape: tuple[int, ...], data: bytes, dtype: str, written: str = ""
) -> bytes:
    """The bytes, in `dtype` ("F32", "BF16", "F16"), that Hugging Face's files have for those of a parameter. written:
    their dtype, of those that lack something to ours; "": the same."""
    table, raw = files_of(config["family"]).NAMES, np.frombuffer(data, np.uint8)
    if table.lacks(name):
        form = formats.get(dtype)
        values = form.dequantize(raw, (len(raw) // form.block_bytes,))
        return formats.get(written or dtype).quantize(values - np.float32(table.lacks(name))).tobytes()
    if table.is_transposed(name):
        return _transposed(raw, shape).tobytes()
    if table.is_by_head(name):
        return _swapped(raw, 3, config["heads"]).tobytes()
    return data


def _transposed(raw: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """uint8 [nbytes] of a matrix [rows, columns] of numbers, by columns."""
    values = np.ascontiguousarray(raw).view(f"u{raw.size // (shape[0] * shape[1])}").reshape(shape)
    return np.ascontiguousarray(values.T).reshape(-1).view(np.uint8)


def _swapped(raw: np.ndarray, outer: int, inner: int) -> np.ndarray:
    """uint8 [nbytes] of `outer` groups of `inner` equal parts: the first part of each group, then the second."""
    return np.ascontiguousarray(raw.reshape(outer, inner, -1).swapaxes(0, 1)).reshape(-1)
