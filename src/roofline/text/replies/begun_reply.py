"""Replies that go on from a beginning: it decides whether they begin as text, within the reasoning or within a call."""

from collections.abc import Iterable
from copy import deepcopy
from typing import Protocol, runtime_checkable

from roofline.text.replies.parser import CallDelta, Delta, ReplyParser, joined

SENTINEL = "\U0010fffe"  # which no mark contains, nor JSON outside of strings


@runtime_checkable
class WritesCalls(Protocol):
    """A parser that knows whether a call is being written."""

    @property
    def open_call(self) -> int | None:
        """The number of the call whose end has not come; None: there is none."""


class BegunReply:
    """What a parser tells behind a beginning that it has read.

    Of the beginning nothing is told again, but for the call within which it ends: that is told with its name and with
    the arguments of the beginning, since they are arguments of the call. Calls are counted from it on.

    Args:
        parser: a fresh one; begun: the beginning.
    """

    def __init__(self, parser: ReplyParser, begun: str) -> None:
        self._parser = parser
        calls = [delta for delta in joined(parser.push(begun)) if isinstance(delta, CallDelta)]
        number = parser.open_call if isinstance(parser, WritesCalls) else None
        self._again = [delta._replace(number=0) for delta in calls if delta.number == number]
        self._count = len({delta.number for delta in calls}) - bool(self._again)  # calls that the beginning has whole
        self._kind: type[Delta] | None = None
        self._skipped = ""  # characters of the beginning that the parser will tell, as it did not know what they are
        self._look_ahead()

    def push(self, text: str) -> list[Delta]:
        return self._behind(self._parser.push(text))

    def finish(self, *, cut: bool = False) -> list[Delta]:
        return self._behind(self._parser.finish(cut=cut))

    def _look_ahead(self) -> None:
        """Find out what the parser keeps back of the beginning, by a copy that is given a character which ends it."""
        probe = deepcopy(self._parser)
        for delta in joined([*probe.push(SENTINEL), *probe.finish()]):
            if not isinstance(delta, CallDelta) and SENTINEL in delta.text:
                self._kind, self._skipped = type(delta), delta.text.partition(SENTINEL)[0]

    def _behind(self, deltas: Iterable[Delta]) -> list[Delta]:
        result: list[Delta] = list(self._again)
        self._again = []
        for delta in deltas:
            if isinstance(delta, CallDelta):
                self._skipped = ""
                result.append(delta._replace(number=delta.number - self._count))
                continue
            text = delta.text
            if self._skipped and type(delta) is self._kind and self._skipped.startswith(text[: len(self._skipped)]):
                text, self._skipped = text[len(self._skipped) :], self._skipped[len(text) :]
            else:
                self._skipped = ""
            if text:
                result.append(delta._replace(text=text))
        return result
