"""An Executable of which each rank has a share: rank 0's is the one an engine sees, the others follow its batches.

Tensor ranks run every instruction together. Stages run one after the other: a step takes as long as on one device that
holds everything, so stages make room for a model, not speed.
"""

import contextlib
import hashlib
from typing import TYPE_CHECKING, Protocol

import numpy as np

from roofline.backends.base import IdentifiesWeights, KeepsState, StepCost
from roofline.backends.parallel.guesser import GUESS, ParallelGuesser, follow_guess
from roofline.backends.parallel.ranks import RankError, Ranks
from roofline.backends.parallel.share import ShareExecutable, SharesGuesser
from roofline.backends.sampling import Sampled, SampleRows
from roofline.ops.batch import Header

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

STOP = -1  # tokens of the batch that ends a follower


class Watch(Protocol):
    """Whoever started the other ranks (launch.Launched)."""

    def reason(self) -> str | None:
        """What is known of a rank that is gone."""

    def close(self, wait: float) -> None:
        """End the ranks that are left, by force after `wait` seconds."""


class _Step:
    """One rank's part of a step."""

    def __init__(self, inner: ShareExecutable, ranks: Ranks) -> None:
        self.inner, self.ranks = inner, ranks
        tensor = ranks.grid.tensor
        self.first, self.last = ranks.share.stage == 0, ranks.share.stage == ranks.grid.pipeline - 1
        self.before, self.after = ranks.rank - tensor, ranks.rank + tensor

    def run(self) -> "Tensor | None":
        """The logits, on ranks of the last stage."""
        carried, batch = {}, self.inner.batch
        for value in self.inner.program.carried:
            rows = batch.tokens if value.type.leading == "tokens" else batch.rows
            carried[value.name] = self.ranks.receive((rows, value.type.width), self.before)
        result = self.inner.run(carried)
        if self.last:
            return result
        self.ranks.send(result, self.after)
        return None


def follow(inner: ShareExecutable, ranks: Ranks) -> None:
    """Run rank 0's steps until it says stop. Raises RankError when another rank is lost."""
    step = _Step(inner, ranks)
    logits_to_0 = step.last and not step.first and ranks.share.rank == 0
    while True:
        ranks.share_batch(inner.batch.buffer)
        if inner.batch.tokens == STOP:
            return
        if inner.batch.tokens == GUESS:
            assert isinstance(inner, SharesGuesser), "rank 0 was loaded with the same options"
            follow_guess(inner, ranks)
            continue
        logits = step.run()
        if logits is not None and logits_to_0:
            ranks.send(logits, 0)


class ParallelExecutable:
    """Rank 0 of a model that several processes run; see `backends.base.Executable`.

    Args:
        inner: this rank's share; its fingerprint, with the grid of ranks, gives the model's.
        vocab_size: width of the logits, which another stage may make.
        watch: what ends with this, and knows why a rank is gone.
    """

    def __init__(self, inner: ShareExecutable, ranks: Ranks, *, vocab_size: int, watch: Watch) -> None:
        self.limits, self.num_pages, self.max_context = inner.limits, inner.num_pages, inner.max_context
        self.page_bytes, self.batch, self.clock = inner.page_bytes, inner.batch, inner.clock
        self.slot_bytes = inner.slot_bytes if isinstance(inner, KeepsState) else 0
        self.vocab_size, self.program, self.exact = vocab_size, inner.program, inner.exact
        facts = f"{inner.fingerprint} tp:{ranks.grid.tensor} pp:{ranks.grid.pipeline}"
        self.fingerprint = hashlib.sha256(facts.encode()).hexdigest()
        self._inner, self._ranks, self._watch = inner, ranks, watch
        self._step = _Step(inner, ranks)
        self._logits: Tensor | None = None
        self._failure: RankError | None = None
        layer = inner.guesser if isinstance(inner, SharesGuesser) else None
        self.guesser = None if layer is None else ParallelGuesser(layer, ranks, self.batch, self.together)

    def forward(self) -> None:
        """Run the step in `batch` on all ranks.

        Raises RankError, from then on every time, when one is lost. After any error the other ranks are ended: what
        they would say next could be taken for an answer to another step.
        """
        self._logits = self.together(self._run)

    def together(self, run: "Callable[[], Tensor]") -> "Tensor":
        """Run what the other ranks follow, and return what comes of it. Raises as `forward`."""
        if self._failure is not None:
            raise self._failure
        try:
            return run()
        except Exception as error:
            lost = isinstance(error, RankError)
            reason = (self._watch.reason() or str(error)) if lost else f"a step failed on rank 0: {error!r}"
            self._failure = RankError(f"{reason}; load the model again")
            self._end(0.0)
            if lost:
                raise self._failure from error
            raise

    def _run(self) -> "Tensor":
        self._ranks.share_batch(self.batch.buffer)
        logits = self._step.run()
        if logits is not None:
            return logits
        return self._ranks.receive((self.batch.rows, self.vocab_size), self._ranks.grid.size - self._ranks.grid.tensor)

    @property
    def weights_identity(self) -> str:
        return self._inner.weights_identity if isinstance(self._inner, IdentifiesWeights) else ""

    def logits(self) -> np.ndarray:
        logits: np.ndarray = self._last().cpu().numpy()
        return logits

    def sample(self, rows: SampleRows) -> Sampled:
        return self._inner.sample_of(self._last(), rows)

    def step_cost(self) -> StepCost:
        """The price of this rank's share of the step now in `batch`."""
        return self._inner.step_cost()

    def close(self) -> None:
        """End all ranks."""
        if self._failure is None:
            self.batch.header[Header.TOKENS] = STOP
            self._failure = RankError("the model was closed")
            with contextlib.suppress(RankError):  # gone already, which is what is wanted
                self._ranks.share_batch(self.batch.buffer)
            self._end(5.0)

    def hidden(self) -> np.ndarray:
        """See `backends.base.KeepsHidden`: these rows are whole on each rank."""
        assert isinstance(self._inner, SharesGuesser), "loaded with its layer that guesses"
        return self._inner.hidden()

    def _last(self) -> "Tensor":
        assert self._logits is not None, "no step was run"
        return self._logits

    def _end(self, wait: float) -> None:
        self._watch.close(wait)
        self._ranks.close()
        self._inner.close()
