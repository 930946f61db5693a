"""A checkpoint as a file has it: values, rows and heads in the file's order, under our names.

Value heads are moved as bytes where blocks of a format lie within one, else their matrix becomes float32. Files of
Falcon-H1 hold products of matrices and multipliers.
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
from roofline.weights.files.mapped import TensorInfo
from roofline.weights.gguf_values import is_negated
from roofline.weights.joined_rows import joined_of
from roofline.weights.latent_form import KEYS, latent_form
from roofline.weights.value_heads import moved_heads, rows_before

Change = Callable[[np.ndarray], np.ndarray]  # of a tensor's bytes


def gguf_form(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as a GGUF file has it."""
    return _negated(_together(ordered_form(checkpoint)))


def ordered_form(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with values, rows and heads in a GGUF file's order, and no rows joined yet: a model that
    loads, whose matrices have the columns of the file's."""
    names = files_of(checkpoint.config["family"]).NAMES
    by_head = bool(names.layer.get(KEYS, ("", ""))[0])
    return with_heads(latent_form(_multiplied(checkpoint), by_head), names.gguf_tiles)


def joined_spans(checkpoint: Checkpoint) -> dict[str, list[tuple[str, range]]]:
    """Return the tensors of a GGUF file in which rows of several parameters lie -> these parameters and their rows, in
    the file's order."""
    names = files_of(checkpoint.config["family"]).NAMES
    joined = {part: rows for part, rows in joined_of(checkpoint.config).items() if part in names.gguf_joined}
    spans: dict[str, list[tuple[str, range]]] = {}
    for before in dict.fromkeys(layer_part(name)[0] for name in checkpoint.tensors):
        for part, rows in joined.items():
            named = [(f"{before}{ours}.weight", span) for ours, span in rows]
            if any(name in checkpoint.tensors for name, _ in named):
                spans[f"{before}{part}.weight"] = named
    return spans


def with_heads(checkpoint: Checkpoint, tiled: bool) -> Checkpoint:
    """The checkpoint with its value heads tiled, or with those of a key head side by side."""
    config = checkpoint.config
    order = moved_heads(config, tiled)
    if order is None or config.get("tiled", False) == tiled:
        return checkpoint
    infos, changes = dict(checkpoint.tensors), dict[str, Change]()
    for name, info in checkpoint.tensors.items():
        part = layer_part(name)[1]
        if part == "linear.o":
            infos[name], changes[name] = _columns_moved(info, config["value_dim"], order)
        elif part.startswith("linear.") and part != "linear.norm":
            changes[name] = _rows_moved(info, len(order), rows_before(config, part), order)
    return _changed(replace(checkpoint, config={**config, "tiled": tiled}), infos, changes)


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
    infos, sources = dict(checkpoint.tensors), joined_spans(checkpoint)
    for name, spans in sources.items():
        parts = {part: infos.pop(part) for part in dict.fromkeys(part for part, _ in spans) if part in infos}
        if len({info.format for info in parts.values()}) > 1:
            stem = name.removesuffix(".weight")
            raise ConfigError(f"{stem}: its parts have several formats, and a GGUF file has them in one tensor")
        first = next(iter(parts.values()))
        shape = (sum(info.shape[0] for info in parts.values()), *first.shape[1:])
        infos[name] = replace(first, name=name, shape=shape, nbytes=sum(info.nbytes for info in parts.values()))

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
