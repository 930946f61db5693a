"""What readers and writers of adapters share: values of their tensors, and the order of the rows of q and k."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from roofline.common.fields import refuse, shorten
from roofline.models.registry import configure
from roofline.ops import formats
from roofline.ops.adapters import AdapterMatrix
from roofline.weights.families.shared.joined_experts import experts_apart
from roofline.weights.families.table import files_of
from roofline.weights.files.mapped import JsonObject, TensorInfo
from roofline.weights.rope_rows import heads_of, reorder

_JOINED = ".gate_up.weight"  # of an expert, as transformers has gate and up in memory


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
    return read.rope.style == "interleaved" and read.rope.dim == config["head_dim"]


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
    in_turn = files_of(config["family"]).NAMES.hf_apart is experts_apart
    for matrix in matrices:
        if ".mlp.experts." not in matrix.tensor or not matrix.tensor.endswith(_JOINED):
            yield matrix
            continue
        half = matrix.b.shape[1] // 2
        for at, part in enumerate(("gate", "up")):
            rows = slice(at, None, 2) if in_turn else slice(at * half, (at + 1) * half)
            tensor = f"{matrix.tensor.removesuffix(_JOINED)}.{part}.weight"
            yield replace(matrix, tensor=tensor, b=np.ascontiguousarray(matrix.b[:, rows]))
