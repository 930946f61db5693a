"""An adapter put into a model's matrices: W + scale * B A, of DoRA with the length of each row."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from roofline.common.errors import ConfigError
from roofline.ops.adapters import AdapterMatrix
from roofline.weights.adapter_matrices import of_model, rows_are_paired, with_rows
from roofline.weights.checkpoint import Checkpoint
from roofline.weights.families.shared.tensor_names import EXPERT, without_expert
from roofline.weights.files.mapped import TensorInfo

_VALUES = 1 << 22  # of a matrix that are in float64 at a time


@dataclass(frozen=True, eq=False)
class AdapterPart:
    """What an adapter changes of a tensor: its rows from `first` on."""

    first: int
    matrix: AdapterMatrix

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.matrix.b.shape[1])


@dataclass(frozen=True, eq=False)
class Merged:
    """A model with an adapter in it. base: the model alone; checkpoint: with the tensors of `parts` in float32, each
    computed when it is read; parts: tensor -> what the adapter changes of it."""

    base: Checkpoint
    checkpoint: Checkpoint
    parts: dict[str, list[AdapterPart]]

    def values(self, name: str) -> np.ndarray:
        """float32 [shape] of a tensor that the adapter changes."""
        return _changed(self.base.dequantize(name), self.parts[name])


def merged(base: Checkpoint, matrices: Sequence[AdapterMatrix]) -> Merged:
    """matrices: as `adapters.read_adapter` gives them. Raises ConfigError for a matrix that the model does not have, or
    has in another shape."""
    parts: dict[str, list[AdapterPart]] = {}
    paired = rows_are_paired(base.config)
    for matrix in of_model(matrices, base.config):
        name, part = _placed(base, matrix)
        parts.setdefault(name, []).append(replace(part, matrix=with_rows(part.matrix, base.config, paired)))
    tensors = dict(base.tensors)
    for name in parts:
        shape = base.tensors[name].shape
        tensors[name] = TensorInfo(name, "F32", shape, 4 * int(np.prod(shape)))

    def bytes_of(name: str) -> np.ndarray:
        if name not in parts:
            return base.bytes_of(name)
        return _changed(base.dequantize(name), parts[name]).reshape(-1).view(np.uint8)

    return Merged(base, replace(base, tensors=tensors, bytes_of=bytes_of), parts)


def _placed(base: Checkpoint, matrix: AdapterMatrix) -> tuple[str, AdapterPart]:
    """The tensor of a matrix, and which of its rows are the matrix's."""
    name, first = matrix.tensor, 0
    inputs, outputs = matrix.a.shape[1], matrix.b.shape[1]
    stacked_name, number = without_expert(name)
    if name not in base.tensors and number:  # all experts of a layer lie one below the other in one tensor
        name, first = stacked_name.replace(f"{EXPERT}.", ""), int(number) * outputs
    info = base.tensors.get(name)
    if info is None or len(info.shape) != 2 or not name.startswith("layers."):
        raise ConfigError(f"the adapter changes {matrix.tensor}, which is no matrix of this model's layers")
    rows = info.shape[0] // base.config["experts"] if name != matrix.tensor else info.shape[0]
    if (rows, info.shape[1]) != (outputs, inputs) or first + rows > info.shape[0]:
        what = f"the adapter's matrices for {matrix.tensor} have {inputs} inputs and {outputs} outputs"
        raise ConfigError(f"{what}, the model's have {info.shape[1]} and {rows}")
    return name, AdapterPart(first, matrix)


def _changed(values: np.ndarray, parts: Sequence[AdapterPart]) -> np.ndarray:
    """float32 [rows, columns], in its own memory."""
    values = np.array(values, np.float32)
    for part in parts:
        matrix, rows = part.matrix, values[part.rows]
        rows += np.float32(matrix.scale) * (matrix.b.T @ matrix.a)
        if matrix.magnitude is not None:
            lengths = np.linalg.norm(rows, axis=1)
            rows *= (matrix.magnitude / np.maximum(lengths, np.finfo(np.float32).tiny))[:, None]
    return values


def row_scaling(base: Checkpoint, matrix: AdapterMatrix) -> tuple[np.ndarray, np.ndarray]:
    """The gain and the shift of DoRA, float32 [outputs] each: gain * (W x + scale * B (A x) + bias) + shift is what the
    merged matrix gives, and the bias.

    matrix: with its rows in the model's order. The lengths of the rows are summed in float64, so that a library that
    adds in another order hardly ever gives another gain in float32.
    """
    assert matrix.magnitude is not None, "it is DoRA's"
    squares = np.empty(matrix.b.shape[1])
    w, step = base.dequantize(matrix.tensor), max(1, _VALUES // matrix.a.shape[1])
    a = matrix.a.astype(np.float64)
    for start in range(0, len(w), step):
        rows = w[start : start + step] + np.float64(matrix.scale) * (matrix.b[:, start : start + step].T @ a)
        squares[start : start + step] = np.square(rows).sum(axis=1)
    gain = (matrix.magnitude / np.sqrt(np.maximum(squares, np.finfo(np.float64).tiny))).astype(np.float32)
    bias = matrix.tensor.removesuffix("weight") + "bias"
    shift = np.zeros_like(gain)
    if bias in base.tensors:
        shift = (np.float32(1) - gain) * base.dequantize(bias)
    return gain, shift
