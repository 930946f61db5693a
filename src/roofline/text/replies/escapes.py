"""Arguments of calls without halves of surrogate pairs, which a model can write and no answer can carry."""

from roofline.common.json_escapes import certain_escapes, whole_escapes
from roofline.text.replies.parser import CallDelta, Delta, ReplyParser


class WholeEscapes:
    """A parser's reply in whose arguments each escape of half a surrogate pair is `\\ufffd`.

    The end of what came so far is kept back while it may be the first half of a pair.
    """

    def __init__(self, parser: ReplyParser) -> None:
        self._parser = parser
        self._number, self._held = 0, ""  # of the call that is open

    def push(self, text: str) -> list[Delta]:
        return self._whole(self._parser.push(text))

    def finish(self) -> list[Delta]:
        return [*self._whole(self._parser.finish()), *self._flushed()]

    def _whole(self, deltas: list[Delta]) -> list[Delta]:
        whole: list[Delta] = []
        for delta in deltas:
            if not isinstance(delta, CallDelta):
                whole += [*self._flushed(), delta]
                continue
            if delta.number != self._number:
                whole += self._flushed()
            arguments, self._held = certain_escapes(self._held + delta.arguments)
            self._number = delta.number
            if arguments or delta.name is not None:
                whole.append(CallDelta(delta.number, delta.name, arguments))
        return whole

    def _flushed(self) -> list[Delta]:
        """What was kept back of a call that ended within an escape."""
        held, self._held = self._held, ""
        return [CallDelta(self._number, None, whole_escapes(held))] if held else []
