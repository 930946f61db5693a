"""What the formats share in which each argument of a call stands between tags of its own, as text."""

import json
import re
from collections.abc import Collection
from typing import ClassVar

from roofline.common.json_types import JsonObject
from roofline.text.replies.call_format import CallFormat, first_of, longest_begun, schemas_of
from roofline.text.replies.call_grammar import CallGrammar, Schema, quoted
from roofline.text.replies.json_scanner import JsonScanner
from roofline.text.replies.parser import CallDelta, Delta
from roofline.text.replies.tag_rules import ValueEnds, tagged_arguments
from roofline.text.replies.values import ArgumentWriter

LONGEST_TAG = 1024  # characters of a tag, beyond which its first character is none


class TaggedCalls(CallFormat):
    """Calls as XML writes them, without its escapes: a tag with the tool's name, one with the name of each argument.

    A call without a closing tag ends where its section does, where another one begins, or with the reply. A malformed
    tag is dropped, and so is all else between the arguments of a call.
    """

    head: ClassVar[tuple[str, str]]
    """What stands before a tool's name and behind it."""
    sections: ClassVar[tuple[str, ...]] = ()
    """Marks behind which a head must follow; the others of `openings` are heads."""
    section_ends: ClassVar[tuple[str, ...]] = ()
    """Marks that end a section of calls."""
    call_ends: ClassVar[tuple[str, ...]]
    """Tags that end a call."""
    parameter: ClassVar[re.Pattern[str]]
    """A whole tag before a value; its group `name` is the argument's name."""
    value_lead: ClassVar[str] = ""
    """One character that may stand before a value and is none of it."""
    value_ends: ClassVar[tuple[str, ...]]
    """What ends a value: its closing tag, and what shows that this was left out."""
    value_close: ClassVar[tuple[str, ...]]
    """Those of `value_ends` that belong to the value; the others are read again."""

    def __init__(self, tools: Collection[str]) -> None:
        super().__init__(tools)
        self._writer = ArgumentWriter(None)
        self._scanner: JsonScanner | None = None  # of a value that is JSON
        self._is_json = False  # as far as it was read
        self._value: list[str] = []
        self._sure: str | None = None  # the value up to the first mark that stands in a string of its JSON

    @classmethod
    def call_text(cls, tool: str, arguments: JsonObject) -> str:
        values = [
            f"{cls.value_head(name, {'type': 'string'} if isinstance(value, str) else {})}{text_of(value)}"
            f"{cls.value_close[0]}\n"
            for name, value in arguments.items()
        ]
        return f"{cls.head[0]}{tool}{cls.head[1]}\n{''.join(values)}{cls.call_ends[0]}"

    @classmethod
    def call_rules(cls, rule: str, tool: str, schema: Schema, grammar: CallGrammar) -> list[str]:
        def before(name: str, part: JsonObject) -> str:
            return quoted(cls.value_head(name, part))

        ends = ValueEnds(f"{cls.value_close[0]}\n", cls.value_ends)
        arguments, rules = tagged_arguments(rule, schema, before, ends)
        head = quoted(f"{cls.head[0]}{tool}{cls.head[1]}\n")
        return [f"{rule}: {head} {arguments} {quoted(cls.call_ends[0])}", *rules]

    @classmethod
    def value_head(cls, name: str, part: JsonObject) -> str:
        """Return what a forced call has before the value of an argument. part: its schema."""
        raise NotImplementedError

    @property
    def open_call(self) -> int | None:
        return self._calls - 1 if self._is_in_call else None

    @property
    def _is_in_call(self) -> bool:
        return self._state not in ("text", "opened", "closed", "ended")

    def finish(self, *, cut: bool = False) -> list[Delta]:
        if self._state == "opened":
            self._finish_opened(cut=cut)
        elif self._is_in_call and not cut:
            if self._state in ("lead", "value"):
                self._end_value_at_end()
            self._tell_arguments("}")
        if self._state != "text":
            self._pending, self._state = "", "ended"
        return super().finish(cut=cut)

    def _finish_opened(self, *, cut: bool) -> None:
        self._tell("" if cut else self._opening + self._pending)

    def _begin(self) -> bool:
        mark = self._tell_before(*self.openings)
        if mark is None:
            return False
        self._state = "opened"
        if mark not in self.sections:  # it is the head of a call: read again, as behind a section
            self._pending, self._opening = mark + self._pending, self._opening.removesuffix(mark)
        return True

    def _after(self) -> bool:
        match self._state:
            case "opened":
                return self._read_head()
            case "between":
                return self._read_tag()
            case "lead":
                return self._skip_lead()
            case "value":
                return self._read_value()
            case "closed":
                return self._behind_call()
        self._pending = ""
        return False

    def _read_head(self) -> bool:
        self._opening += self._strip_spaces()
        if not self._pending:
            return False
        before, behind = self.head
        if not self._pending.startswith(before):
            return False if before.startswith(self._pending) else self._no_call()
        name, end, body = self._pending.removeprefix(before).partition(behind)
        if not end:
            name = name[: len(name) - longest_begun(name, (behind,))]
            return False if any(tool.startswith(name) for tool in self._names) else self._no_head()
        if name not in self._names:
            return self._no_head()
        self._start(name, body)
        return True

    def _no_head(self) -> bool:
        """The tool is none of the request's, so its call is text; another may begin behind that."""
        before = self.head[0]
        self._opening, self._pending = self._opening + before, self._pending.removeprefix(before)
        return self._no_call()

    def _start(self, name: str, body: str) -> None:
        """A call begins."""
        self._pending, self._state, self._opening = body, "between", ""
        self._writer = ArgumentWriter(schemas_of(self._names).get(name))
        self._deltas.append(CallDelta(self._calls, name, "{"))
        self._calls += 1

    def _read_tag(self) -> bool:
        """Read what may follow a value: another, the end of the call, or what is dropped."""
        at = self._pending.find("<")
        self._pending = self._pending[at:] if at >= 0 else ""
        tag, end, _ = self._pending[:LONGEST_TAG].partition(">")
        if not end and len(self._pending) < LONGEST_TAG:
            return False
        if not end:
            self._pending = self._pending[1:]
            return True
        tag += end
        behind = self._pending[len(tag) :]
        match = self.parameter.fullmatch(tag)
        if match is not None:
            self._begin_value(match, behind)
        elif tag in self.call_ends:
            self._end_call_of(behind)
        elif tag in self.section_ends or tag in self.sections or tag.startswith(self.head[0] or "\0"):
            self._end_call_of(self._pending)
        else:
            self._pending = self._pending[1:]
        return True

    def _begin_value(self, match: re.Match[str], behind: str) -> None:
        self._start_value(match["name"], behind)

    def _start_value(self, name: str, behind: str, types: frozenset[str] | None = None) -> None:
        self._tell_arguments(self._writer.begin(name, types))
        self._pending, self._state, self._value, self._sure = behind, "lead", [], None
        self._scanner, self._is_json = (None, False) if self._writer.is_text else (JsonScanner(), True)

    def _end_call_of(self, behind: str) -> None:
        self._tell_arguments("}")
        self._pending, self._state, self._strips = behind, "closed", True

    def _skip_lead(self) -> bool:
        if not self._pending and self.value_lead:
            return False
        self._pending, self._state = self._pending.removeprefix(self.value_lead), "value"
        return True

    def _read_value(self) -> bool:
        place = first_of(self._pending, self.value_ends)
        if place is None:
            self._take_value(len(self._pending) - longest_begun(self._pending, self.value_ends))
            return False
        at, mark = place
        self._take_value(at)
        if self._scanner is not None and self._is_json and self._scanner.mode == "string":  # where it ends nothing
            self._sure = self._sure or "".join(self._value)
            self._take_value(1)
            return True
        self._end_value("".join(self._value))
        self._pending = self._pending.removeprefix(mark) if mark in self.value_close else self._pending
        self._state = "between"
        return True

    def _take_value(self, end: int) -> None:
        """Take characters of a value: they are told where they are text as it stands."""
        text, self._pending = self._pending[:end], self._pending[end:]
        if self._scanner is None:
            self._tell_arguments(self._writer.feed(text))
        else:
            self._value.append(text)
            self._is_json = self._is_json and all(map(self._scanner.feed, text))

    def _end_value(self, text: str) -> None:
        self._tell_arguments(self._writer.feed(text) + self._writer.end())

    def _end_value_at_end(self) -> None:
        """The reply ends within a value: the begin of a closing tag is none of it."""
        self._take_value(len(self._pending) - longest_begun(self._pending, self.value_ends))
        self._end_value("".join(self._value) if self._sure is None else self._sure)

    def _behind_call(self) -> bool:
        """Read what may follow a call: the end of the section, or the next call in it."""
        self._strip_spaces()
        if not self._pending:
            return False
        for mark in self.section_ends:
            if self._pending.startswith(mark):
                self._pending, self._state = self._pending.removeprefix(mark), "text"
                return True
        marks = (*self.section_ends, *((self.head[0],) if self.head[0] else ()))
        if any(mark.startswith(self._pending) for mark in marks):
            return False
        self._state = "text"
        return True

    def _tell_arguments(self, text: str) -> None:
        if text:
            self._deltas.append(CallDelta(self._calls - 1, None, text))


def text_of(value: object) -> str:
    """Return a value as it stands between tags: a text as it is, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
