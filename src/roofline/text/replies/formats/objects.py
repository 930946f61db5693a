"""Llama 3's format: the reply is an object or a list of objects, and no text."""

import json
from collections.abc import Collection
from typing import ClassVar

from roofline.common.json_types import JsonObject
from roofline.text.replies.call_format import CallFormat, CallFrame
from roofline.text.replies.call_grammar import CallGrammar, Schema
from roofline.text.replies.call_reader import CallReader
from roofline.text.replies.formats.hermes import object_rules
from roofline.text.replies.parser import Delta


class ObjectCalls(CallFormat):
    """Llama 3 and others: the reply is an object or a list of objects, {"name": ..., "parameters": ...}, and no text.

    prefix: a mark that may stand before the first.
    """

    name = "llama3"
    prefix = "<|python_tag|>"
    signs: ClassVar[tuple[tuple[str, ...], ...]] = (("<|python_tag|>",), ('"parameters"',))
    openings, marks = (prefix,), (prefix,)
    frame = CallFrame("", "; ", "")
    is_marked = False
    key = "parameters"

    def __init__(self, tools: Collection[str]) -> None:
        super().__init__(tools)
        self._prefixed = False

    @classmethod
    def call_text(cls, tool: str, arguments: JsonObject) -> str:
        return json.dumps({"name": tool, cls.key: arguments}, ensure_ascii=False)

    @classmethod
    def call_rules(cls, rule: str, tool: str, schema: Schema, grammar: CallGrammar) -> list[str]:
        return object_rules(rule, tool, schema, cls.key)

    def _begin(self) -> bool:
        self._opening += self._strip_spaces()
        if not self._prefixed and self._pending.startswith(self.prefix):
            self._prefixed, self._opening = True, self._opening + self.prefix
            self._pending = self._pending.removeprefix(self.prefix)
            return bool(self._pending)
        if not self._pending or (not self._prefixed and self.prefix.startswith(self._pending)):
            return False
        if self._pending[0] == "[":
            self._opening, self._pending = self._opening + "[", self._pending[1:]
            self._state = "first"
        else:
            self._state = "first" if self._pending[0] == "{" else "plain"
        if self._state == "plain":
            self._tell(self._opening)
        return bool(self._pending)

    def _after(self) -> bool:
        if self._state == "plain":
            self._tell(self._pending)
        if self._state in ("plain", "broken"):
            self._pending = ""
            return False
        if self._state == "first":
            self._opening += self._strip_spaces()
        else:
            self._strip_spaces(";,]")
        if not self._pending:
            return False
        if self._pending[0] == "{":
            return self._call(self._opening if self._state == "first" else "")
        if self._state == "first":
            self._tell(self._opening)
        self._state = "plain"
        return True

    def _end_call(self, reader: CallReader) -> None:
        super()._end_call(reader)
        if self._state == "text":
            self._state = "plain"

    def finish(self, *, cut: bool = False) -> list[Delta]:
        if self._state in ("text", "first") and self._reader is None:
            self._tell("" if cut else self._opening + self._pending)
            self._state = "ended"
        return super().finish(cut=cut)

    def _may_be_call(self, reader: CallReader) -> bool:
        """No mark need stand before these, so only one that has come no further than the name of a tool is."""
        return self._prefixed or reader.only_names


class JsonCalls(ObjectCalls):
    """The same with `arguments`, for models that are told of no format; no template is taken for one of these."""

    name = "json"
    signs = ()
    key = "arguments"
