"""Where Hugging Face's tensors hold other values than our parameters: read as ours, and written as theirs."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from roofline.ops import formats
from roofline.weights.families.table import files_of
from roofline.weights.files.mapped import TensorInfo

Read = Callable[[str], np.ndarray]


def as_ours(family: str, tensors: Mapping[str, TensorInfo], read: Read) -> tuple[dict[str, TensorInfo], Read]:
    """The tensors of a model of that family as our parameters are, float32 where they are changed.

    tensors: canonical name -> what the files hold; read: uint8 bytes of one of them.
    """
    less = files_of(family).NAMES.norms_less
    changed = {name for name in tensors if less and _is_norm(name)}
    infos = {
        name: replace(info, format="F32", nbytes=4 * info.shape[0]) if name in changed else info
        for name, info in tensors.items()
    }

    def read_ours(name: str) -> np.ndarray:
        raw = read(name)
        if name not in changed:
            return raw
        values = formats.get(tensors[name].format).dequantize(raw, tensors[name].shape)
        return (values + np.float32(less)).view(np.uint8)

    return infos, read_ours


def as_theirs(family: str, name: str, data: bytes, dtype: str) -> bytes:
    """The bytes, in `dtype` ("F32", "BF16", "F16"), that Hugging Face's files have for those of a parameter."""
    less = files_of(family).NAMES.norms_less
    if not less or not _is_norm(name):
        return data
    form = formats.get(dtype)
    raw = np.frombuffer(data, np.uint8)
    values = form.dequantize(raw, (len(raw) // form.block_bytes,))
    return form.quantize(values - np.float32(less)).tobytes()


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight")
