"""What backends make of the share of one rank."""

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from roofline.backends.base import Executable, GuessingExecutable
from roofline.backends.sampling import Sampled, SampleRows
from roofline.program.ir import Program

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class ShareExecutable(Executable, Protocol):
    """What a backend makes of the Program of one rank."""

    @property
    def program(self) -> Program: ...

    def run(self, carried: "Mapping[str, Tensor]") -> "Tensor":
        """The step's logits, or what the next stage goes on from; carried: what this stage goes on from, by name."""

    def sample_of(self, logits: "Tensor", rows: SampleRows) -> Sampled:
        """One id for each row of float32 logits [rows, vocab], where `run` or another stage made them."""


class GuessingShare(GuessingExecutable, ShareExecutable, Protocol):
    """What a backend makes of a rank's share of a model's layer that guesses further tokens."""


@runtime_checkable
class SharesGuesser(Protocol):
    """May have been loaded with a share of that layer; see `backends.base.KeepsHidden`."""

    @property
    def guesser(self) -> GuessingShare | None: ...

    def hidden(self) -> np.ndarray: ...
