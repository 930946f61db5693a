"""What a model's text is made of, and what a parser of it offers.

Parsing a stream gives what parsing all of it at once does, however it was cut into pieces.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple, Protocol

from roofline.common.json_types import JsonObject


class TextDelta(NamedTuple):
    """More of what the user is told."""

    text: str


class ReasoningDelta(NamedTuple):
    """More of what the model thinks before it answers."""

    text: str


class CallDelta(NamedTuple):
    """More of a call of a tool: the first of each call has its name, all have more of the JSON of its arguments.

    number: of the call within the reply, from 0.
    """

    number: int
    name: str | None
    arguments: str


Delta = TextDelta | ReasoningDelta | CallDelta


class ReplyParser(Protocol):
    """Takes one reply's text apart, piece by piece. Text that no format claims is what the user is told."""

    def push(self, text: str) -> list[Delta]:
        """What is certain after more text."""

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """What is left at the end: what looked like the begin of a mark and was none.

        cut: the longest answer ended it, so the begin of a mark or of a call is no text but what is left of one.
        """


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """Deltas of which none is empty, and none goes on where the one before it ended."""
    result: list[Delta] = []
    for delta in deltas:
        last = result[-1] if result else None
        if isinstance(delta, CallDelta):
            if isinstance(last, CallDelta) and last.number == delta.number and delta.name is None:
                result[-1] = last._replace(arguments=last.arguments + delta.arguments)
            else:
                result.append(delta)
        elif delta.text and type(last) is type(delta):
            assert not isinstance(last, CallDelta | None), "it has the type of the other"
            result[-1] = last._replace(text=last.text + delta.text)
        elif delta.text:
            result.append(delta)
    return result


class PlainReply:
    """All text is what the user is told."""

    def push(self, text: str) -> list[Delta]:
        return [TextDelta(text)] if text else []

    def finish(self, *, cut: bool = False) -> list[Delta]:
        return []


class FirstCall:
    """Keeps the first call of a reply, and leaves out all others."""

    def __init__(self, parser: ReplyParser) -> None:
        self._parser = parser

    def push(self, text: str) -> list[Delta]:
        return _without_later_calls(self._parser.push(text))

    def finish(self, *, cut: bool = False) -> list[Delta]:
        return _without_later_calls(self._parser.finish(cut=cut))


def _without_later_calls(deltas: list[Delta]) -> list[Delta]:
    return [delta for delta in deltas if not (isinstance(delta, CallDelta) and delta.number > 0)]


class WithoutThoughts:
    """A reply whose reasoning has no text, but its place."""

    def __init__(self, parser: Callable[[], ReplyParser]) -> None:
        self._parser = parser()

    def push(self, text: str) -> list[Delta]:
        return _without_thoughts(self._parser.push(text))

    def finish(self, *, cut: bool = False) -> list[Delta]:
        return _without_thoughts(self._parser.finish(cut=cut))


def _without_thoughts(deltas: list[Delta]) -> list[Delta]:
    return [ReasoningDelta("") if isinstance(delta, ReasoningDelta) else delta for delta in deltas]


@dataclass
class ToolCall:
    """A call of a tool: its name and the JSON text of its arguments."""

    name: str
    arguments: str = ""


@dataclass
class Reply:
    """A reply, put together from its deltas."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, deltas: Iterable[Delta]) -> None:
        """Append what deltas bring."""
        for delta in deltas:
            if isinstance(delta, TextDelta):
                self.text += delta.text
            elif isinstance(delta, ReasoningDelta):
                self.reasoning += delta.text
            else:
                if delta.name is not None:
                    self.calls.append(ToolCall(delta.name))
                self.calls[delta.number].arguments += delta.arguments


def complete_arguments(text: str) -> JsonObject:
    """The arguments of a call as an object; none where they are not complete, as where the longest answer cut them.

    A number that no float holds, such as 1e400, stays the text that it is (msgspec.Raw).
    """
    try:
        arguments = json.loads(text, parse_float=_number, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _number(text: str) -> object:
    value = float(text)
    if isfinite(value):
        return value
    from msgspec import Raw

    return Raw(text.encode())


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def begun(text: str, mark: str) -> int:
    """Length of the longest end of a text that begins a mark."""
    return next((length for length in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:length])), 0)
