"""What readers and writers of adapters share: values of their tensors, which of them lie in one, and the order of the
rows of q and k and of value heads."""

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.fields import refuse, shorten
from roofline.models.registry import configure
from roofline.ops import formats
from roofline.ops.adapters import AdapterMatrix
from roofline.weights.families.shared.joined_experts import experts_apart
from roofline.weights.families.shared.tensor_names import layer_part
from roofline.weights.families.table import files_of
from roofline.weights.files.mapped import JsonObject, TensorInfo
from roofline.weights.joined_rows import joined_of, places_of
from roofline.weights.rope_rows import heads_of, reorder
from roofline.weights.value_heads import moved_heads, rows_before

_JOINED = ".gate_up.weight"  # of an expert, as transformers has gate and up in memory
_ALONE = re.compile(r"(?P<expert>layers\.\d+\.mlp\.experts\.\d+)\.(?P<part>gate|up)\.weight")


class TensorFile(Protocol):
    """An opened file of tensors."""

    path: Path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> np.ndarray: ...


def finite_values(file: TensorFile, name: str) -> np.ndarray:
    """float32 of a tensor's shape. Raises ConfigError for NaN and infinity."""
    info = file.tensors[name]
    values = formats.get(info.format).dequantize(file.read(name), info.shape)
    if not np.isfinite(values).all():
        refuse(file.path, f"tensor {shorten(name)!r}", "holds NaN or infinity")
    return values


def rows_are_paired(config: JsonObject) -> bool:
    """Whether a converter to GGUF has permuted the rows of a model's q and k. Models that turn neighbours in part of
    each head, such as GLM-4, do so in every file, and so do those of some families (`TensorNames.neighbours`)."""
    _, read = configure(config)
    if files_of(config["family"]).NAMES.neighbours:
        return False
    rotates = read.positions == "rope"
    return rotates and read.rope.style == "interleaved" and read.rope.dim == config["head_dim"]


def with_rows(matrix: AdapterMatrix, config: JsonObject, paired: bool) -> AdapterMatrix:
    """The matrix with its outputs in the order that files with paired rows have, or with those in halves."""
    heads = heads_of(matrix.tensor, config)
    if heads is None or matrix.paired == paired:
        return replace(matrix, paired=paired)
    style = "interleaved" if paired else "half"

    def moved(rows: np.ndarray) -> np.ndarray:
        """rows: float32 [outputs, anything]."""
        raw = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        return reorder(raw, len(rows), heads, style).view(np.float32).reshape(rows.shape)

    magnitude = None if matrix.magnitude is None else moved(matrix.magnitude[:, None])[:, 0]
    b = np.ascontiguousarray(moved(matrix.b.T).T)
    return replace(matrix, b=b, magnitude=magnitude, paired=paired)


def with_value_heads(matrix: AdapterMatrix, config: JsonObject, tiled: bool) -> AdapterMatrix:
    """The matrix with value heads in that order, where it has some in its outputs or inputs."""
    part, order = layer_part(matrix.tensor)[1], moved_heads(config, tiled)
    if order is None or matrix.tiled == tiled or not part.startswith("linear."):
        return replace(matrix, tiled=tiled)
    if part == "linear.o":
        return replace(matrix, a=_heads_moved(matrix.a, order), tiled=tiled)
    first, magnitude = rows_before(config, part), matrix.magnitude
    if magnitude is not None:
        magnitude = np.concatenate([magnitude[:first], _heads_moved(magnitude[None, first:], order)[0]])
    b = np.concatenate([matrix.b[:, :first], _heads_moved(matrix.b[:, first:], order)], axis=1)
    return replace(matrix, b=b, magnitude=magnitude, tiled=tiled)


def _heads_moved(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    """float32 [rank, columns] with the heads of its columns in another order. Raises ConfigError where there are not so
    many heads."""
    if values.shape[1] % len(order):
        raise ConfigError(f"an adapter's matrix has {values.shape[1]} columns for {len(order)} value heads")
    heads = values.reshape(len(values), len(order), -1)
    return np.ascontiguousarray(heads[:, order]).reshape(values.shape)


def of_model(matrices: Iterable[AdapterMatrix], config: JsonObject) -> Iterator[AdapterMatrix]:
    """The matrices as those of a model: each alone, with the model's order of value heads."""
    tiled = bool(config.get("tiled", False))
    return (with_value_heads(matrix, config, tiled) for matrix in each_alone(matrices, config))


def each_alone(matrices: Iterable[AdapterMatrix], config: JsonObject) -> Iterator[AdapterMatrix]:
    """The matrices with gate and up of each expert apart: A is of both, the rows of B are in turn theirs in models of
    gpt-oss, else those of the gate stand above. Likewise what files have with others row by row (`joined_rows`)."""
    together = joined_of(config)
    for matrix in matrices:
        before, part = layer_part(matrix.tensor)
        if part in together:
            yield from _rows_alone(matrix, before, places_of(together[part]))
            continue
        if ".mlp.experts." not in matrix.tensor or not matrix.tensor.endswith(_JOINED):
            yield matrix
            continue
        for part, rows in zip(("gate", "up"), _halves(config, matrix.b.shape[1]), strict=True):
            tensor = f"{matrix.tensor.removesuffix(_JOINED)}.{part}.weight"
            yield replace(matrix, tensor=tensor, b=np.ascontiguousarray(matrix.b[:, rows]))


def _rows_alone(matrix: AdapterMatrix, before: str, places: Mapping[str, np.ndarray]) -> Iterator[AdapterMatrix]:
    outputs = sum(map(len, places.values()))
    if matrix.b.shape[1] != outputs:
        what = f"the adapter's matrices for {matrix.tensor} have {matrix.b.shape[1]} outputs"
        raise ConfigError(f"{what}, the model's have {outputs}")
    for ours, order in places.items():
        magnitude = None if matrix.magnitude is None else matrix.magnitude[order]
        b = np.ascontiguousarray(matrix.b[:, order])
        yield replace(matrix, tensor=f"{before}{ours}.weight", b=b, magnitude=magnitude)


def rows_together(
    matrices: Iterable[AdapterMatrix], config: JsonObject, parts: Container[str] | None = None
) -> Iterator[AdapterMatrix]:
    """The inverse for rows: what files have with others row by row in one matrix, whose rank is that of all their A.

    parts: those joined tensors alone, None: all. Raises ConfigError for two scales, UnsupportedError for DoRA of some.
    """
    by_tensor = {matrix.tensor: matrix for matrix in matrices}
    holders = {
        ours: part for part, rows in joined_of(config).items() for ours, _ in rows if parts is None or part in parts
    }
    written: set[str] = set()
    for tensor, matrix in by_tensor.items():
        before, part = layer_part(tensor)
        holder = holders.get(part, "")
        if not holder:
            yield matrix
        elif f"{before}{holder}" not in written:
            written.add(f"{before}{holder}")
            places = places_of(joined_of(config)[holder])
            yield _with_rows_of(
                f"{before}{holder}.weight",
                {ours: by_tensor[name] for ours in places if (name := f"{before}{ours}.weight") in by_tensor},
                places,
            )


def _with_rows_of(tensor: str, members: Mapping[str, AdapterMatrix], places: Mapping[str, np.ndarray]) -> AdapterMatrix:
    first, *others = members.values()
    if any(matrix.scale != first.scale for matrix in others):
        raise ConfigError(f"{tensor}: its parts need matrices of one scale, as they lie in one tensor")
    magnitude = _lengths_of(tensor, members, places)
    shared = all(np.array_equal(matrix.a, first.a) for matrix in others)
    a = first.a if shared else np.concatenate([matrix.a for matrix in members.values()])
    b, at = np.zeros((len(a), sum(map(len, places.values()))), np.float32), 0
    for ours, matrix in members.items():
        b[at : at + matrix.rank, places[ours]] = matrix.b
        at += 0 if shared else matrix.rank
    return replace(first, tensor=tensor, a=a, b=b, magnitude=magnitude)


def _lengths_of(
    tensor: str, members: Mapping[str, AdapterMatrix], places: Mapping[str, np.ndarray]
) -> np.ndarray | None:
    """DoRA's lengths of the rows of a joined tensor; None where none of its parts has any."""
    magnitudes = {ours: matrix.magnitude for ours, matrix in members.items() if matrix.magnitude is not None}
    if not magnitudes:
        return None
    if magnitudes.keys() != places.keys():
        raise UnsupportedError(f"{tensor}: DoRA of a part", "its rows lie in one tensor with others", ("method lora",))
    lengths = np.empty(sum(map(len, places.values())), np.float32)
    for ours, magnitude in magnitudes.items():
        lengths[places[ours]] = magnitude
    return lengths


def joined(matrices: Iterable[AdapterMatrix], config: JsonObject) -> Iterator[AdapterMatrix]:
    """The inverse. Where gate and up have an A each, both become one of twice the ranks, of which each half is
    multiplied with its own rows of B. Raises ConfigError for one without the other, and for two scales."""
    by_tensor = {matrix.tensor: matrix for matrix in matrices}
    for tensor, matrix in by_tensor.items():
        match = _ALONE.fullmatch(tensor)
        if match is None:
            yield matrix
        elif match["part"] == "gate" or f"{match['expert']}.gate.weight" not in by_tensor:
            gate, up = (by_tensor.get(f"{match['expert']}.{part}.weight") for part in ("gate", "up"))
            if gate is None or up is None or gate.scale != up.scale:
                raise ConfigError(
                    f"{match['expert']}: gate and up need matrices of one scale, as they lie in one tensor"
                )
            yield _together(gate, up, config, match["expert"] + _JOINED)


def _together(gate: AdapterMatrix, up: AdapterMatrix, config: JsonObject, tensor: str) -> AdapterMatrix:
    outputs = gate.b.shape[1] + up.b.shape[1]
    shared = np.array_equal(gate.a, up.a)
    a = gate.a if shared else np.concatenate([gate.a, up.a])
    b = np.zeros((len(a), outputs), np.float32)
    of_gate, of_up = _halves(config, outputs)
    b[: gate.rank, of_gate] = gate.b
    b[len(a) - up.rank :, of_up] = up.b
    return replace(gate, tensor=tensor, a=a, b=b)


def _halves(config: JsonObject, outputs: int) -> tuple[slice, slice]:
    """Which outputs of an expert are the gate's and which the up's, in the one tensor that transformers has of both."""
    if files_of(config["family"]).NAMES.hf_apart is experts_apart:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, outputs // 2), slice(outputs // 2, None)
