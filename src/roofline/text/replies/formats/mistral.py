"""Mistral's formats: a list of objects behind [TOOL_CALLS], or name[ARGS]{...} behind each."""

import json
from collections.abc import Collection
from typing import ClassVar

from roofline.common.json_types import JsonObject
from roofline.text.replies.call_format import CallFormat, CallFrame, first_of
from roofline.text.replies.call_grammar import CallGrammar, Schema, json_rule
from roofline.text.replies.formats.hermes import object_rules
from roofline.text.replies.json_scanner import SPACES, JsonScanner
from roofline.text.replies.parser import CallDelta, Delta
from roofline.text.replies.reasoning import BRACKETS


class MistralCalls(CallFormat):
    """Mistral: [TOOL_CALLS] and a list of objects, or, since the eleventh tokenizer, name[ARGS]{...} or name{...}."""

    name = "mistral"
    open, separator, id_mark = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
    signs: ClassVar[tuple[tuple[str, ...], ...]] = ((open,),)
    openings, marks = (open,), (open, separator, id_mark)
    frame: ClassVar[CallFrame] = CallFrame(f"{open}[", ", ", "]")
    thoughts = BRACKETS
    name_characters = 256

    def __init__(self, tools: Collection[str]) -> None:
        super().__init__(tools)
        self._in_list = False
        self._arguments: JsonScanner | None = None

    @classmethod
    def call_text(cls, tool: str, arguments: JsonObject) -> str:
        return json.dumps({"name": tool, "arguments": arguments}, ensure_ascii=False)

    @classmethod
    def call_rules(cls, rule: str, tool: str, schema: Schema, grammar: CallGrammar) -> list[str]:
        return object_rules(rule, tool, schema, "arguments")

    def _begin(self) -> bool:
        self._in_list = False
        return super()._begin()

    def _after(self) -> bool:
        if self._state == "arguments":
            return self._read_arguments()
        if self._state == "broken":
            self._pending = ""
            return False
        spaces = self._strip_spaces()
        if self._state in ("opened", "element"):
            self._opening += spaces
        if not self._pending:
            return False
        if self._state == "opened":
            return self._first()
        return self._next()

    def _first(self) -> bool:
        if self._pending[0] == "[":
            self._pending, self._in_list, self._state = self._pending[1:], True, "element"
            self._opening += "["
            return bool(self._pending)
        if self._pending[0] == "{":
            return self._call(self._opening)
        place = first_of(self._pending, ("{", self.open))
        name = self._head(self._pending if place is None else self._pending[: place[0]])
        if place is None and len(self._pending) <= self.name_characters:
            return False
        if place is None or name not in self._names:
            return self._no_call()
        at, mark = place
        self._pending, self._state, self._arguments = self._pending[at:], "arguments", JsonScanner()
        self._deltas.append(CallDelta(self._calls, name, ""))
        self._calls += 1
        self._strips = True
        if mark == self.open:
            self._tell_arguments("{}")
            self._state = "text"
        return True

    def _head(self, text: str) -> str:
        """The name in what stands before arguments."""
        return text.strip(SPACES).removesuffix(self.separator).partition(self.id_mark)[0].strip(SPACES)

    def _next(self) -> bool:
        if self._in_list:
            between = self._strip_spaces(",")
            if self._state == "element":
                self._opening += between
            if not self._pending:
                return False
            if self._pending[0] == "{":
                return self._call(self._opening if self._state == "element" else "")
            if self._state == "element":
                self._tell(self._opening)
            self._in_list = False
            self._pending = self._pending.removeprefix("]") if self._state == "after" else self._pending
        if not self._pending:
            return False
        self._state = "text"
        return True

    def _read_arguments(self) -> bool:
        scanner = self._arguments
        assert scanner is not None, "the state says so"
        for at, character in enumerate(self._pending):
            valid = scanner.feed(character)
            if not valid or scanner.complete:
                end = at + 1 if valid else at
                self._tell_arguments(self._pending[:end])
                self._pending, self._state = self._pending[end:], "after" if valid else "broken"
                return bool(self._pending)
        self._tell_arguments(self._pending)
        self._pending = ""
        return False

    @property
    def open_call(self) -> int | None:
        return self._calls - 1 if self._state == "arguments" else super().open_call

    def _tell_arguments(self, text: str) -> None:
        if text:
            self._deltas.append(CallDelta(self._calls - 1, None, text))

    def finish(self, *, cut: bool = False) -> list[Delta]:
        if self._state in ("opened", "element") and self._reader is None:
            name = self._head(self._pending)
            if self._state == "opened" and name in self._names and not cut:
                self._deltas.append(CallDelta(self._calls, name, "{}"))
            else:
                self._tell("" if cut else self._opening + self._pending)
            self._state = "ended"
        return super().finish(cut=cut)


class MistralArgumentsCalls(MistralCalls):
    """Mistral since its eleventh tokenizer: [TOOL_CALLS]name[ARGS]{...}, the mark before each call."""

    name = "mistral_args"
    signs = ((MistralCalls.open, MistralCalls.separator),)
    frame = CallFrame(MistralCalls.open, MistralCalls.open)

    @classmethod
    def call_text(cls, tool: str, arguments: JsonObject) -> str:
        return f"{tool}{cls.separator}{json.dumps(arguments, ensure_ascii=False)}"

    @classmethod
    def call_rules(cls, rule: str, tool: str, schema: Schema, grammar: CallGrammar) -> list[str]:
        head = grammar.literal(f"{tool}{cls.separator}")
        return [f"{rule}: {head} {rule}_arguments", f"{rule}_arguments: {json_rule(schema)}"]
