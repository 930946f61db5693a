"""A checkpoint as a file has it: values, rows and heads in the file's order, under our names.

GGUF files of Qwen3.5 have the value heads of gated DeltaNet tiled: those of the first key heads come first, then the
second of each. Heads are moved as bytes where a format's blocks lie within one, else their matrix becomes float32.
Files of Falcon-H1 hold products of matrices and multipliers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from roofline.common.errors import ConfigError
from roofline.ops import formats
from roofline.weights.checkpoint import Checkpoint
from roofline.weights.families.shared.tensor_names import layer_part
from roofline.weights.families.table import files_of
from roofline.weights.files.mapped import JsonObject, TensorInfo
from roofline.weights.gguf_values import is_negated
from roofline.weights.joined_rows import joined_of

Change = Callable[[np.ndarray], np.ndarray]  # of a tensor's bytes


def gguf_form(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as a GGUF file has it."""
    tiles = files_of(checkpoint.config["family"]).NAMES.gguf_tiles
    return _negated(_together(with_heads(_multiplied(checkpoint), tiles)))


def with_heads(checkpoint: Checkpoint, tiled: bool) -> Checkpoint:
    """The checkpoint with its value heads tiled, or with those of a key head side by side."""
    config = checkpoint.config
    keys, values = config.get("key_heads", 0), config.get("value_heads", 0)
    if not keys or keys == values or config.get("tiled", False) == tiled:
        return checkpoint
    group = values // keys
    order = np.arange(values).reshape((keys, group) if tiled else (group, keys)).T.reshape(-1)
    infos, changes = dict(checkpoint.tensors), dict[str, Change]()
    for name, info in checkpoint.tensors.items():
        part = layer_part(name)[1]
        if part == "linear.o":
            infos[name], changes[name] = _columns_moved(info, config["value_dim"], order)
        elif part.startswith("linear.") and part != "linear.norm":
            changes[name] = _rows_moved(info, len(order), _first_rows(config, part), order)
    return _changed(replace(checkpoint, config={**config, "tiled": tiled}), infos, changes)


def _first_rows(config: JsonObject, part: str) -> int:
    """How many rows of q and k stand before those of value heads."""
    return 2 * config["key_heads"] * config["key_dim"] if part in ("linear.qkv", "linear.conv") else 0


def _rows_moved(info: TensorInfo, heads: int, first: int, order: np.ndarray) -> Change:
    def moved(raw: np.ndarray) -> np.ndarray:
        rows = raw.reshape(info.shape[0], -1)
        behind = rows[first:].reshape(heads, -1, rows.shape[1])[order].reshape(-1, rows.shape[1])
        return np.concatenate([rows[:first], behind]).reshape(-1)

    return moved


def _columns_moved(info: TensorInfo, dim: int, order: np.ndarray) -> tuple[TensorInfo, Change]:
    """The matrix, in float32 where a block of its format spans heads."""
    form, shape = formats.get(info.format), info.shape
    spans = dim % form.block != 0
    written = replace(info, format="F32", nbytes=4 * shape[0] * shape[1]) if spans else info

    def moved(raw: np.ndarray) -> np.ndarray:
        values = form.dequantize(raw, shape).view(np.uint8) if spans else raw
        heads = values.reshape(shape[0], len(order), -1)
        return np.ascontiguousarray(heads[:, order]).reshape(-1)

    return written, moved


def _together(checkpoint: Checkpoint) -> Checkpoint:
    """With the rows of parameters that such files have in one tensor in it."""
    names = files_of(checkpoint.config["family"]).NAMES
    joined = {part: rows for part, rows in joined_of(checkpoint.config).items() if part in names.gguf_joined}
    infos, sources = dict(checkpoint.tensors), dict[str, list[tuple[str, range]]]()
    for before in dict.fromkeys(layer_part(name)[0] for name in checkpoint.tensors):
        for part, rows in joined.items():
            spans = [(f"{before}{ours}.weight", span) for ours, span in rows]
            parts = {name: infos.pop(name) for name in dict.fromkeys(name for name, _ in spans) if name in infos}
            if not parts:
                continue
            if len({info.format for info in parts.values()}) > 1:
                raise ConfigError(
                    f"{before}{part}: its parts have several formats, and a GGUF file has them in one tensor"
                )
            first = next(iter(parts.values()))
            shape = (sum(info.shape[0] for info in parts.values()), *first.shape[1:])
            name, nbytes = f"{before}{part}.weight", sum(info.nbytes for info in parts.values())
            infos[name], sources[name] = replace(first, name=name, shape=shape, nbytes=nbytes), spans

    def read(name: str) -> np.ndarray:
        if name not in sources:
            return checkpoint.read(name)
        rows = {part: checkpoint.read(part).reshape(checkpoint.tensors[part].shape[0], -1) for part, _ in sources[name]}
        return np.concatenate([rows[part][span.start : span.stop] for part, span in sources[name]]).reshape(-1)

    return replace(checkpoint, tensors=infos, bytes_of=read) if sources else checkpoint


def _multiplied(checkpoint: Checkpoint) -> Checkpoint:
    """With the products of matrices and of the multipliers that such files do not say, in float32."""
    names = files_of(checkpoint.config["family"]).NAMES
    factors = names.gguf_factors(dict(checkpoint.config))
    infos, changes = dict(checkpoint.tensors), dict[str, Change]()
    for name, info in checkpoint.tensors.items():
        stretches = factors.get(layer_part(name)[1], ()) if name.endswith(".weight") else ()
        if any(factor != 1 for _, factor in stretches):
            infos[name] = replace(info, format="F32", nbytes=4 * info.shape[0] * info.shape[1])
            changes[name] = _products(info, stretches)
    return _changed(replace(checkpoint, config=names.gguf_config(dict(checkpoint.config))), infos, changes)


def _products(info: TensorInfo, stretches: Sequence[tuple[int, float]]) -> Change:
    def change(raw: np.ndarray) -> np.ndarray:
        values = formats.get(info.format).dequantize(raw, info.shape)
        rows = np.repeat([factor for _, factor in stretches], [count for count, _ in stretches])
        return (values * rows.astype(np.float32)[:, None]).view(np.uint8).reshape(-1)

    return change


def _negated(checkpoint: Checkpoint) -> Checkpoint:
    infos, changes = dict(checkpoint.tensors), dict[str, Change]()
    for name, info in checkpoint.tensors.items():
        if is_negated(checkpoint.config, name):
            infos[name] = replace(info, format="F32", nbytes=4 * math.prod(info.shape))
            changes[name] = _exponential(info)
    return _changed(checkpoint, infos, changes)


def _exponential(info: TensorInfo) -> Change:
    def change(raw: np.ndarray) -> np.ndarray:
        values = formats.get(info.format).dequantize(raw, info.shape)
        return (-np.exp(values.astype(np.float64))).astype(np.float32).view(np.uint8)

    return change


def _changed(checkpoint: Checkpoint, infos: Mapping[str, TensorInfo], changes: Mapping[str, Change]) -> Checkpoint:
    """The checkpoint with other bytes of some tensors."""
    if not changes:
        return checkpoint

    def read(name: str) -> np.ndarray:
        raw = checkpoint.read(name)
        return changes[name](raw) if name in changes else raw

    return replace(checkpoint, tensors=dict(infos), bytes_of=read)
