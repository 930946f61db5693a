"""Hermes' format: an object between <tool_call> and </tool_call>."""

import json

from roofline.common.json_types import JsonObject
from roofline.text.replies.call_format import CallFormat, CallFrame
from roofline.text.replies.call_grammar import CallGrammar, Schema, json_rule
from roofline.text.replies.parser import Delta


class HermesCalls(CallFormat):
    """Nous Hermes, Qwen 2.5 and 3, Granite 4, and models without a format of their own: an object between marks."""

    name = "hermes"
    open, close = "<tool_call>", "</tool_call>"
    signs = (("<tool_call>",),)
    openings, marks = (open,), (open, close)
    told_as = "write an object with its name and arguments between marks"
    frame = CallFrame(f"{open}\n", f"\n{close}\n{open}\n", f"\n{close}")

    @classmethod
    def call_text(cls, tool: str, arguments: JsonObject) -> str:
        return json.dumps({"name": tool, "arguments": arguments}, ensure_ascii=False)

    @classmethod
    def example(cls) -> str:
        return f'{cls.frame.before}{{"name": "NAME", "arguments": {{"ARGUMENT": VALUE}}}}{cls.frame.after}'

    @classmethod
    def call_rules(cls, rule: str, tool: str, schema: Schema, grammar: CallGrammar) -> list[str]:
        return object_rules(rule, tool, schema, "arguments")

    def _after(self) -> bool:
        spaces = self._strip_spaces()
        if self._state == "opened":
            self._opening += spaces
        if not self._pending:
            return False
        if self._state == "opened":
            return self._call(self._opening)
        if self._state == "broken":
            at = self._pending.find(self.close)
            self._pending = self._pending[at:] if at >= 0 else self._pending[-len(self.close) :]
            if at < 0:
                return False
            self._state = "after"
        if self.close.startswith(self._pending) and self._pending != self.close:
            return False
        self._pending = self._pending.removeprefix(self.close)
        self._state = "text"
        return bool(self._pending)

    @property
    def open_call(self) -> int | None:
        return self._calls - 1 if self._state in ("after", "broken") else super().open_call

    def finish(self, *, cut: bool = False) -> list[Delta]:
        if self._state == "opened" and self._reader is None:
            self._tell("" if cut else self._opening)
            self._state = "ended"
        return super().finish(cut=cut)


def object_rules(rule: str, tool: str, schema: Schema, key: str) -> list[str]:
    """Return the rules of a call that is an object. key: of its arguments."""
    head = json.dumps(f'{{"name": {json.dumps(tool)}, "{key}": ', ensure_ascii=False)
    return [f'{rule}: {head} {rule}_arguments "}}"', f"{rule}_arguments: {json_rule(schema)}"]
