"""Arguments of calls without halves of surrogate pairs, which a model can write and no answer can carry."""

from roofline.common.json_escapes import certain_escapes, whole_escapes
from roofline.text.replies.parser import CallDelta, Delta, ReplyParser


class WholeEscapes:
    """A parser's reply in whose arguments each escape of half a surrogate pair is `\\ufffd`.

    The end of what came so far is kept back while it may be the first half of a pair.
    """

    def __init__(self, parser: ReplyParser) -> None:
        self._parser = parser
        self._number, self._pending = 0, ""  # of the call that is open

    def push(self, text: str) -> list[Delta]:
        return self._repaired(self._parser.push(text))

    def finish(self, *, cut: bool = False) -> list[Delta]:
        return [*self._repaired(self._parser.finish(cut=cut)), *self._flushed()]

    def _repaired(self, deltas: list[Delta]) -> list[Delta]:
        repaired: list[Delta] = []
        for delta in deltas:
            if not isinstance(delta, CallDelta):
                repaired += [*self._flushed(), delta]
                continue
            if delta.number != self._number:
                repaired += self._flushed()
            arguments, self._pending = certain_escapes(self._pending + delta.arguments)
            self._number = delta.number
            if arguments or delta.name is not None:
                repaired.append(CallDelta(delta.number, delta.name, arguments))
        return repaired

    def _flushed(self) -> list[Delta]:
        """What was kept back of a call that ended within an escape."""
        rest_of_call, self._pending = self._pending, ""
        return [CallDelta(self._number, None, whole_escapes(rest_of_call))] if rest_of_call else []
