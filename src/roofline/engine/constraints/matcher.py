"""Matcher: one answer's place in its grammar. It follows the ids that were committed, and no others."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from roofline.engine.constraints.library import fill
from roofline.engine.events import FinishReason

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher

_ALL = 0xFFFFFFFF


class MarksFailure(Protocol):
    """What a matcher was made from."""

    failed: bool


class Matcher:
    """Says which ids may come next, and takes the one that came.

    Args:
        early: ids that end the answer, which shall not come before `min_tokens`.
        never: ids that shall not come at all, because the request ignores the model's end ids.

    An answer that cannot go on without one of these ids ends with it all the same: the form comes first. `error`: why
    it cannot go on at all; such an answer ends alone, with the step after.
    """

    def __init__(
        self, grammar: MarksFailure, state: "LLMatcher", early: Iterable[int], min_tokens: int, never: Iterable[int]
    ) -> None:
        self.error: str | None = None
        self._grammar, self._state, self._min_tokens = grammar, state, min_tokens
        self._early, self._never, self._count = tuple(early), tuple(never), 0
        self._forced: list[int] = []  # ids that nothing else can take the place of, the next one last
        self._looked = False  # for those, here

    def fill(self, mask: "np.ndarray") -> None:
        """Write the bits of the ids that may come next, uint32 [words]; all of them after an error."""
        if self.error is None:
            self._look()
            if self._forced:
                mask[:] = 0
                token = self._forced[-1]
                mask[token >> 5] = 1 << (token & 31)
                return
            try:
                fill(self._state, mask)
            except ValueError as error:
                self.fail(str(error))
        if self.error is not None:
            mask[:] = _ALL
            return
        unwanted = self._early if self._count < self._min_tokens else self._never
        if unwanted:
            rest = mask.copy()
            for token in unwanted:
                rest[token >> 5] &= _ALL ^ (1 << (token & 31))
            if rest.any():
                mask[:] = rest

    @property
    def forced(self) -> bool:
        """Whether it is known already that one id alone may come next."""
        return self.error is None and bool(self._forced)

    def allows(self, token: int) -> bool:
        """Whether `fill` would set the bit of an id, found without those of the others; False where only it knows."""
        if self.error is not None or token < 0:  # as after `fill`: the answer ends, whatever was sampled
            return True
        self._look()
        if self._forced:
            return token == self._forced[-1]
        if token in (self._early if self._count < self._min_tokens else self._never):
            return False  # it may come where nothing else can
        return self._state.validate_tokens([token]) == 1

    def take(self, token: int) -> FinishReason | None:
        """Go on with an id; "stop" where the answer is complete with it, "error" where it cannot come here."""
        if self.error is None:
            self._look()  # also where nobody needed a mask: what may come later depends on the ids alone
        if self.error is None and not self._state.consume_token(token):
            self.fail(f"id {token} does not fit its form")
        if self.error is not None:
            return "error"
        self._count += 1
        self._looked = False
        if self._forced:
            self._forced.pop()
        return "stop" if self._state.is_stopped() else None

    def _look(self) -> None:
        if not self._forced and not self._looked:
            self._forced = self._state.compute_ff_tokens()[::-1]
        self._looked = True

    def is_end(self, token: int) -> bool:
        """Whether an id only ends the answer, and is no text of it."""
        return token in self._early

    def fail(self, problem: str) -> None:
        """End this answer with its next step. Fresh answers compile the constraint anew: its automaton may be full."""
        self.error, self._grammar.failed = f"the answer's form could not be kept: {problem}", True
