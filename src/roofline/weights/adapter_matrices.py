"""What readers and writers of adapters share: values of their tensors, and the order of the rows of q and k."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from roofline.common.errors import ConfigError
from roofline.common.fields import refuse, shorten
from roofline.models.registry import configure
from roofline.ops import formats
from roofline.ops.adapters import AdapterMatrix
from roofline.weights.families.shared.joined_experts import experts_apart
from roofline.weights.families.table import files_of
from roofline.weights.files.mapped import JsonObject, TensorInfo
from roofline.weights.rope_rows import heads_of, reorder

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
    each head, such as GLM-4, do so in every file."""
    _, read = configure(config)
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


def each_alone(matrices: Iterable[AdapterMatrix], config: JsonObject) -> Iterator[AdapterMatrix]:
    """The matrices with gate and up of each expert apart: A is of both, the rows of B are in turn theirs in models of
    gpt-oss, else those of the gate stand above."""
    for matrix in matrices:
        if ".mlp.experts." not in matrix.tensor or not matrix.tensor.endswith(_JOINED):
            yield matrix
            continue
        for part, rows in zip(("gate", "up"), _halves(config, matrix.b.shape[1]), strict=True):
            tensor = f"{matrix.tensor.removesuffix(_JOINED)}.{part}.weight"
            yield replace(matrix, tensor=tensor, b=np.ascontiguousarray(matrix.b[:, rows]))


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
