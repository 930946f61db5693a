"""The layer of a model that guesses further tokens, of which each rank has a share as it has one of the model.

A batch of the model's whose tokens are GUESS says that a step of the layer comes next: the layer's own batch, and then
the hidden rows that its tokens begin with.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from roofline.backends.base import StepCost
from roofline.backends.parallel.ranks import Ranks
from roofline.backends.parallel.share import GuessingShare, SharesGuesser
from roofline.backends.sampling import Sampled, SampleRows
from roofline.ops.batch import Batch, Header
from roofline.program.ir import HIDDEN

if TYPE_CHECKING:
    from torch import Tensor

GUESS = -2


def follow_guess(inner: SharesGuesser, ranks: Ranks) -> None:
    """Run one step of the layer with rank 0."""
    layer = inner.guesser
    assert layer is not None, "rank 0 was loaded with the same options"
    ranks.share_batch(layer.batch.buffer)
    (width,) = (value.type.width for value in layer.program.inputs if value.name == HIDDEN)
    rows = np.empty((layer.batch.tokens, width), np.float32)
    ranks.share_batch(rows)
    layer.take_hidden(rows)
    layer.run({})


class ParallelGuesser:
    """Rank 0's share of the layer, which the others follow; see `backends.base.GuessingExecutable`.

    Args:
        inner: this rank's share.
        batch: of the model, which says what comes next.
        together: runs a step that other ranks follow, and ends them after an error.
    """

    def __init__(
        self, inner: GuessingShare, ranks: Ranks, batch: Batch, together: "Callable[[Callable[[], Tensor]], Tensor]"
    ) -> None:
        self.limits, self.num_pages, self.max_context = inner.limits, inner.num_pages, inner.max_context
        self.page_bytes, self.batch, self.clock = inner.page_bytes, inner.batch, inner.clock
        self.vocab_size, self.exact, self.fingerprint = inner.vocab_size, inner.exact, inner.fingerprint
        self._inner, self._ranks, self._model_batch, self._together = inner, ranks, batch, together
        self._rows = np.empty((0, 0), np.float32)
        self._logits: Tensor | None = None

    def take_hidden(self, rows: np.ndarray) -> None:
        """See `backends.base.GuessingExecutable`."""
        self._rows = np.array(rows, np.float32)

    def forward(self) -> None:
        """Run the step in `batch` on all ranks. Raises as the model's."""
        self._logits = self._together(self._run)

    def hidden(self) -> np.ndarray:
        """See `backends.base.GuessingExecutable`: these rows are whole on each rank."""
        return self._inner.hidden()

    def logits(self) -> np.ndarray:
        logits: np.ndarray = self._last().numpy()
        return logits

    def sample(self, rows: SampleRows) -> Sampled:
        return self._inner.sample_of(self._last(), rows)

    def step_cost(self) -> StepCost:
        """The price of this rank's share of the step now in `batch`."""
        return self._inner.step_cost()

    def close(self) -> None:
        self._inner.close()

    def _run(self) -> "Tensor":
        header = self._model_batch.header
        tokens = int(header[Header.TOKENS])
        header[Header.TOKENS] = GUESS
        self._ranks.share_batch(self._model_batch.buffer)
        header[Header.TOKENS] = tokens  # of the model's last step, whose rows may yet be asked for
        self._ranks.share_batch(self.batch.buffer)
        self._ranks.share_batch(self._rows)
        self._inner.take_hidden(self._rows)
        return self._inner.run({})

    def _last(self) -> "Tensor":
        assert self._logits is not None, "no step was run"
        return self._logits
