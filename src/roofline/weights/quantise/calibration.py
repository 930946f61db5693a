"""What a text said of the matrices of a model, by their canonical names."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Calibration:
    """Empty where nothing was measured.

    importance: float32 [cols], how much an error in a column counts, with mean 1. products: float32 [cols, cols], the
    sum of x^T x over rows x that the matrix was multiplied with; with them errors are made up for in later columns.
    """

    importance: Mapping[str, np.ndarray] = field(default_factory=dict)
    products: Mapping[str, np.ndarray] = field(default_factory=dict)
