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

    def finish(self) -> list[Delta]:
        """What is left at the end: what looked like the begin of a mark and was none."""


def parse_more(parser: ReplyParser, text: str, *, last: bool) -> list[Delta]:
    """What is certain after more text; last: no more comes."""
    return [*parser.push(text), *parser.finish()] if last else parser.push(text)


class PlainReply:
    """All text is what the user is told."""

    def push(self, text: str) -> list[Delta]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Delta]:
        return []


class FirstCall:
    """Keeps the first call of a reply, and leaves out all others."""

    def __init__(self, parser: ReplyParser) -> None:
        self._parser = parser

    def push(self, text: str) -> list[Delta]:
        return _without_later_calls(self._parser.push(text))

    def finish(self) -> list[Delta]:
        return _without_later_calls(self._parser.finish())


def _without_later_calls(deltas: list[Delta]) -> list[Delta]:
    return [delta for delta in deltas if not (isinstance(delta, CallDelta) and delta.number > 0)]


class WithoutThoughts:
    """A reply whose reasoning has no text, but its place."""

    def __init__(self, parser: Callable[[], ReplyParser]) -> None:
        self._parser = parser()

    def push(self, text: str) -> list[Delta]:
        return _without_thoughts(self._parser.push(text))

    def finish(self) -> list[Delta]:
        return _without_thoughts(self._parser.finish())


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
