"""Where GGUF files hold other values than our parameters: read as ours.

A family says so in its table of names: parameters whose tensors hold -exp of ours or have another shape, and tensors in
which rows of several of ours lie in turn. How they are written is `gguf_form.py`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from roofline.common.fields import Fields, refuse, shorten
from roofline.ops import formats
from roofline.weights.families.shared.tensor_names import layer_part
from roofline.weights.families.table import files_of
from roofline.weights.files.mapped import JsonObject, TensorInfo
from roofline.weights.joined_rows import rows_apart

Read = Callable[[str], np.ndarray]


def as_ours(config: JsonObject, tensors: Mapping[str, TensorInfo], read: Read) -> tuple[dict[str, TensorInfo], Read]:
    """The tensors of a GGUF file as our parameters are.

    tensors: canonical name -> what the file holds; read: uint8 bytes of one of them.
    """
    infos, read_rows = rows_apart(config, tensors, read)
    shapes = files_of(config["family"]).NAMES.gguf_shapes(dict(config))
    for name, info in infos.items():
        if info.shape == shapes.get(layer_part(name)[1]):
            infos[name] = replace(info, shape=(math.prod(info.shape),))
    negated = {name for name in infos if is_negated(config, name)}
    stored = dict(infos)
    infos |= {name: replace(infos[name], format="F32", nbytes=4 * math.prod(infos[name].shape)) for name in negated}

    def read_ours(name: str) -> np.ndarray:
        if name not in negated:
            return read_rows(name)
        values = formats.get(stored[name].format).dequantize(read_rows(name), stored[name].shape)
        if not (values < 0).all():
            refuse("the GGUF file", f"tensor {shorten(name)!r}", "holds a decay that is not below 0")
        return np.log(-values.astype(np.float64)).astype(np.float32).reshape(-1).view(np.uint8)

    return infos, read_ours


def is_negated(config: JsonObject, name: str) -> bool:
    """Whether a GGUF file has -exp of the values of a parameter."""
    return layer_part(name)[1] in files_of(config["family"]).NAMES.gguf_negated


def further_layers(fields: Fields) -> range:
    """The layers of a file that guess further tokens, behind those of the model."""
    layers, further = fields.need("block_count", int), fields.get("nextn_predict_layers", int, 0)
    if not 0 <= further < max(1, layers):
        fields.refuse("nextn_predict_layers", f"is {further}, of {layers} layers")
    return range(layers - further, layers)
