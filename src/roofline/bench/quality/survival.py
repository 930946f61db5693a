"""How much of an adapter is left in a model that it was merged into: what rounding took away, matrix by matrix."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np

from roofline.common.errors import ConfigError
from roofline.ops import formats
from roofline.weights.adapter_merge import Merged
from roofline.weights.checkpoint import Checkpoint
from roofline.weights.families.shared.tensor_names import EXPERT, without_expert
from roofline.weights.quantise.rounding import round_to
from roofline.weights.rope_rows import heads_of, reorder

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Sums:
    """Sums of squares over a matrix or over several, from which the figures follow. With W the model's matrix, C what
    the adapter changes of it, X what was written, and R what W alone is in the format that was written:

    weight: of W + C; change: of C; written: of X - R; along: of the products of X - R and C; lost: of X - (W + C).
    """

    weight: float = 0.0
    change: float = 0.0
    written: float = 0.0
    along: float = 0.0
    lost: float = 0.0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Sums)))

    @property
    def survival(self) -> float:
        """How large what rounding made of the change is, ||X - R|| / ||C||: 0 where nothing changed, 1 where all did;
        larger where rounding added noise of its own."""
        return math.sqrt(self.written / self.change) if self.change else 1.0

    @property
    def projected_share(self) -> float:
        """The part of the change that is there: X - R along C. 1 where rounding takes nothing away on average.

        Noise across the change does not lower it, unlike `train.checkpoint.outcome.rounding_fidelity`, which compares X
        with W + C.
        """
        return self.along / self.change if self.change else 1.0

    @property
    def loss(self) -> float:
        """What rounding lost of the matrix, ||X - (W + C)|| / ||W + C||."""
        return math.sqrt(self.lost / self.weight) if self.weight else 0.0

    @property
    def size(self) -> float:
        """How large the change is beside the matrix, ||C|| / ||W + C||."""
        return math.sqrt(self.change / self.weight) if self.weight else 0.0

    def facts(self) -> dict[str, float]:
        """As plain values."""
        values = {"size": self.size, "loss": self.loss, "survival": self.survival, "kept": self.projected_share}
        return {name: round(value, 6) for name, value in values.items()}


@dataclass(frozen=True)
class MatrixSurvival:
    """Of one matrix. format: in which it was written."""

    name: str
    format: str
    sums: Sums

    def facts(self) -> dict[str, object]:
        """As plain values."""
        return {"name": self.name, "format": self.format, **self.sums.facts()}


def survivals(
    model: Merged, written: Checkpoint, progress: Progress = lambda done, total: None
) -> list[MatrixSurvival]:
    """Of each matrix that the adapter changes. written: the model as it was written."""
    values_of = _Values(written)
    result = []
    for at, name in enumerate(model.parts):
        base, merged = model.base.dequantize(name), model.values(name)
        x, form = values_of(name)
        if (heads := heads_of(name, model.base.config)) is not None:
            style = model.base.config["rope_style"]
            if style != written.config["rope_style"]:
                x = reorder(x.reshape(-1).view(np.uint8), len(x), heads, style).view(np.float32).reshape(x.shape)
        alone = base
        if form != model.base.tensors[name].format:
            alone = formats.get(form).dequantize(round_to(form, base), base.shape)
        result.append(MatrixSurvival(name, form, _sums(base, merged, x, alone)))
        progress(at + 1, len(model.parts))
    return result


def head_is_tied(base: Checkpoint, written: Checkpoint) -> bool:
    """Whether the head is the embedding. Raises ConfigError unless it is so in both models, and the embedding, where
    its format stayed, has its bytes."""
    tied = bool(base.config["tied"])
    same = bool(written.config["tied"]) == tied and ("head.weight" in written.tensors) != tied
    first, second = (checkpoint.tensors["embed.weight"] for checkpoint in (base, written))
    if first.format == second.format:
        same = same and np.array_equal(base.read("embed.weight"), written.read("embed.weight"))
    if not same:
        raise ConfigError(f"{written.path}: embedding and head are not those of {base.path}, which no adapter changed")
    return tied


def total(matrices: Iterable[MatrixSurvival]) -> Sums:
    """Of all matrices together."""
    return sum((one.sums for one in matrices), Sums())


def _sums(base: np.ndarray, merged: np.ndarray, x: np.ndarray, alone: np.ndarray) -> Sums:
    change, moved, lost = merged - base, x - alone, x - merged

    def product(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.einsum("ij,ij->", a, b, dtype=np.float64))

    squares = [(merged, merged), (change, change), (moved, moved), (moved, change), (lost, lost)]
    return Sums(*(product(*pair) for pair in squares))


class _Values:
    """Values of a checkpoint's matrices, whether it has those of experts each or one below the other."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._latest = lru_cache(maxsize=1)(checkpoint.dequantize)  # all experts of a layer, which are read in turn

    def __call__(self, name: str) -> tuple[np.ndarray, str]:
        """float32 [rows, columns], and the format in the file."""
        tensors = self._checkpoint.tensors
        if name in tensors:
            return self._checkpoint.dequantize(name), tensors[name].format
        whole, number = without_expert(name)
        if number:
            stacked = whole.replace(f"{EXPERT}.", "")
            values, experts = self._latest(stacked), self._checkpoint.config["experts"]
            rows = len(values) // experts
            return values[int(number) * rows : (int(number) + 1) * rows], tensors[stacked].format
        before, _, after = name.rpartition(".experts.")
        names = [f"{before}.experts.{number}.{after}" for number in range(self._checkpoint.config["experts"])]
        return np.concatenate([self._checkpoint.dequantize(one) for one in names]), tensors[names[0]].format
