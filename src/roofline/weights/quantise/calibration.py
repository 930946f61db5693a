"""What a text said of the matrices of a model, by their canonical names."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Folding:
    """Parameters that can be scaled together without a change of what the model computes: columns of matrices are
    multiplied, and the vectors, or the rows of a matrix, that give these columns their input are divided.

    matrices: all that read the input; divided: the weight (and bias) of the norm before them, or the matrix whose rows
    are factors of their input.
    """

    matrices: tuple[str, ...]
    divided: tuple[str, ...]


@dataclass(frozen=True)
class ParameterScale:
    """Factors of a parameter; None: not scaled. rows: float32 [rows]; columns: float32 [cols], of a vector its
    elements."""

    rows: np.ndarray | None = None
    columns: np.ndarray | None = None

    def apply(self, values: np.ndarray, first: int = 0) -> np.ndarray:
        """values: float32 [rows, cols], those from row `first` on; of a vector [1, elements]."""
        if self.columns is not None:
            values = values * self.columns
        if self.rows is not None:
            values = values * self.rows[first : first + len(values), None]
        return values

    def undo(self, values: np.ndarray, first: int = 0) -> np.ndarray:
        """The values before `apply`."""
        rows, columns = (None if scale is None else 1 / scale for scale in (self.rows, self.columns))
        return ParameterScale(rows, columns).apply(values, first)


@dataclass(frozen=True)
class WeightCalibration:
    """Empty where nothing was measured. Names and columns are those of `gguf_form.ordered_form`.

    importance: float32 [cols], how much an error in a column counts, with mean 1. products: float32 [cols, cols], the
    sum of x^T x over rows x that the matrix was multiplied with; with them errors are made up for in later columns.
    Both have a dimension before, [matrices, ...], for a tensor that holds several matrices one below the other.
    foldings: what can be scaled; scales: by how much it is (`scaling.fit_scales`); reasons: why a tensor, or some of
    its matrices, has not all that was to be measured.
    """

    importance: Mapping[str, np.ndarray] = field(default_factory=dict)
    products: Mapping[str, np.ndarray] = field(default_factory=dict)
    foldings: tuple[Folding, ...] = ()
    scales: Mapping[str, ParameterScale] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.importance or self.products or self.scales)
