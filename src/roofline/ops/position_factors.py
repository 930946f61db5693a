"""Factors by position: computed in float64, rounded once to float32.

Sources: Meta's Llama 4 and Mistral's Ministral 3, whose queries they keep sharp in long texts.
"""

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from roofline.common.errors import ConfigError


@dataclass(frozen=True)
class PositionFactors:
    """What a row at a position is multiplied by: 1 + beta * ln(1 + floor((position + offset) / context))."""

    beta: float
    context: int
    offset: int = 0

    def __post_init__(self) -> None:
        if self.context < 1 or self.offset < 0 or not 0 < self.beta < math.inf:
            raise ConfigError(f"factors by position cannot be of beta, context, offset = {astuple(self)}")

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> "PositionFactors | None":
        """Those of an instruction with these attributes; None where it multiplies nothing."""
        if not attributes.get("beta"):
            return None
        return cls(attributes["beta"], attributes["context"], attributes.get("offset", 0))

    def at(self, positions: np.ndarray) -> np.ndarray:
        """float32 [n] of positions int [n]."""
        times = (positions.astype(np.int64) + self.offset) // self.context
        return (1.0 + self.beta * np.log1p(times.astype(np.float64))).astype(np.float32)
