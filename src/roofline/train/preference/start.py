"""Which preference method a run is configured with."""

from typing import TYPE_CHECKING, Protocol

import numpy as np

from roofline.common.json_types import JsonObject
from roofline.train.preference.objective import Facts, RowObjective
from roofline.train.preference.pairs import Pairs

if TYPE_CHECKING:
    from roofline.train.data.loader import Rows
    from roofline.train.run.loop import Run


class Preference(Protocol):
    """What a run with a preference method has beside others. objective: for `Gradients`."""

    @property
    def objective(self) -> RowObjective: ...

    def begin(self) -> JsonObject:
        """Prepare before the first step, on all ranks together; facts for the log's first line."""

    def facts(self, rows: "Rows") -> list[Facts]:
        """What the objective has to know of each part of a batch."""

    def held_out_facts(self, label: str, numbers: np.ndarray) -> Facts:
        """What it has to know of rows of an evaluation."""


def preference_of(run: "Run") -> Preference | None:
    """The method of a run's configuration."""
    section = run.config.dpo
    return Pairs(run, section) if section is not None else None
