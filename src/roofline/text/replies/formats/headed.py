"""What the formats share in which a mark and the tool's name stand before a JSON object of arguments."""

import json
import re
from collections.abc import Collection
from typing import ClassVar

from roofline.common.json_types import JsonObject
from roofline.text.replies.call_format import CallFormat, first_of, longest_begun
from roofline.text.replies.call_grammar import CallGrammar, Schema, json_rule
from roofline.text.replies.json_scanner import SPACES, JsonScanner
from roofline.text.replies.parser import CallDelta, Delta

MOST_OF_HEAD = 512  # characters of what stands before arguments


class HeadedCalls(CallFormat):
    """Calls in a section, each a mark, a head with the tool's name, a mark, JSON, a mark.

    The section's marks may be missing, and so may the mark behind a call. A call without arguments may have nothing
    where its JSON stands.
    """

    sections: ClassVar[tuple[str, ...]]
    """Marks that begin a section; behind them only calls stand."""
    call_open: ClassVar[str]
    arguments_open: ClassVar[tuple[str, ...]]
    """What may stand between the head and the arguments."""
    closes: ClassVar[tuple[str, ...]]
    """Marks of the ends of calls and sections, which are dropped behind a call."""
    head: ClassVar[re.Pattern[str]]
    """The whole head; its group `name` is the tool's name."""

    def __init__(self, tools: Collection[str]) -> None:
        super().__init__(tools)
        self._scanner = JsonScanner()
        self._is_empty = True  # nothing of the arguments was told

    @classmethod
    def call_text(cls, tool: str, arguments: JsonObject) -> str:
        before, behind = cls.around_arguments(tool)
        return f"{before}{json.dumps(arguments, ensure_ascii=False)}{behind}"

    @classmethod
    def call_rules(cls, rule: str, tool: str, schema: Schema, grammar: CallGrammar) -> list[str]:
        before, behind = (grammar.literal(text) for text in cls.around_arguments(tool))
        return [f"{rule}: {before} {rule}_arguments {behind}", f"{rule}_arguments: {json_rule(schema)}"]

    @classmethod
    def around_arguments(cls, tool: str) -> tuple[str, str]:
        """Return what the model writes before the arguments of a call and behind them."""
        raise NotImplementedError

    @property
    def open_call(self) -> int | None:
        return self._calls - 1 if self._state == "arguments" else None

    def finish(self, *, cut: bool = False) -> list[Delta]:
        if self._state == "opened":
            name = self._name(self._pending.removeprefix(self.call_open))
            if name is not None and not cut:
                self._start(name, "")
                self._tell_arguments("{}")
            else:
                self._tell("" if cut else self._opening + self._pending)
        elif self._state == "arguments" and self._is_empty and not cut:
            self._tell_arguments("{}")
        if self._state != "text":
            self._pending, self._state = "", "ended"
        return super().finish(cut=cut)

    def _begin(self) -> bool:
        mark = self._tell_before(*self.openings)
        if mark is None:
            return False
        self._state = "opened"
        if mark == self.call_open:
            self._pending, self._opening = mark + self._pending, self._opening.removesuffix(mark)
        return True

    def _after(self) -> bool:
        match self._state:
            case "opened":
                return self._read_head()
            case "arguments":
                return self._read_arguments()
            case "closed":
                return self._behind_call()
            case "broken":
                return self._skip_broken()
        self._pending = ""
        return False

    def _read_head(self) -> bool:
        self._opening += self._strip_spaces()
        if not self._pending.startswith(self.call_open):
            return False if self.call_open.startswith(self._pending) else self._no_call()
        head = self._pending.removeprefix(self.call_open)
        ends = [mark for mark in self.closes if not any(mark in begin for begin in self.arguments_open)]
        place = first_of(head, (*self.arguments_open, *ends, *self.openings))
        if place is None:
            return False if len(head) <= MOST_OF_HEAD else self._no_head()
        name = self._name(head[: place[0]])
        if name is None:
            return self._no_head()
        at, mark = place
        self._start(name, head[at:].removeprefix(mark if mark in self.arguments_open else ""))
        return True

    def _name(self, head: str) -> str | None:
        """The tool that a head names; None: none of the request's."""
        match = self.head.fullmatch(head.strip(SPACES))
        return match["name"] if match is not None and match["name"] in self._names else None

    def _no_head(self) -> bool:
        self._opening, self._pending = self._opening + self.call_open, self._pending.removeprefix(self.call_open)
        return self._no_call()

    def _start(self, name: str, behind: str) -> None:
        self._pending, self._state, self._opening = behind, "arguments", ""
        self._scanner, self._is_empty = JsonScanner(), True
        self._deltas.append(CallDelta(self._calls, name, ""))
        self._calls += 1
        self._strips = True

    def _read_arguments(self) -> bool:
        if self._is_empty:
            self._strip_spaces()
        for at, character in enumerate(self._pending):
            if self._is_empty and character != "{":
                return self._without_arguments()
            valid = self._scanner.feed(character)
            self._is_empty = False
            if not valid or self._scanner.complete:
                end = at + 1 if valid else at
                self._tell_arguments(self._pending[:end])
                self._pending, self._state = self._pending[end:], "closed" if valid else "broken"
                return True
        self._tell_arguments(self._pending)
        self._pending = ""
        return False

    def _without_arguments(self) -> bool:
        """Something else stands where the JSON of a call begins."""
        marks = (*self.closes, *self.openings)
        if any(mark.startswith(self._pending) and mark != self._pending for mark in marks):
            return False
        self._tell_arguments("{}")
        self._is_empty, self._state = False, "closed" if self._pending.startswith(marks) else "broken"
        return True

    def _skip_broken(self) -> bool:
        """Drop what follows in a call that has stopped being JSON, up to the next mark."""
        marks = (*self.closes, *self.openings)
        place = first_of(self._pending, marks)
        at = len(self._pending) - longest_begun(self._pending, marks) if place is None else place[0]
        self._pending = self._pending[at:]
        self._state = "broken" if place is None else "closed"
        return place is not None

    def _behind_call(self) -> bool:
        """Drop the marks that end calls and sections."""
        self._strip_spaces()
        if not self._pending:
            return False
        mark = next((mark for mark in self.closes if self._pending.startswith(mark)), None)
        if mark is not None:
            self._pending = self._pending.removeprefix(mark)
            return True
        if any(mark.startswith(self._pending) for mark in self.closes):
            return False
        self._state = "text"
        return True

    def _tell_arguments(self, text: str) -> None:
        if text:
            self._deltas.append(CallDelta(self._calls - 1, None, text))
