"""The format of Solar Open: messages of reasoning, text or calls behind marks."""

import json

from roofline.common.json_types import JsonObject
from roofline.text.replies.call_format import CallFrame
from roofline.text.replies.call_grammar import CallGrammar, Schema, json_rule
from roofline.text.replies.formats.messages import MessageCalls
from roofline.text.replies.json_scanner import SPACES
from roofline.text.replies.parser import ReasoningDelta, TextDelta
from roofline.text.replies.reasoning import ThoughtMarks


class SolarCalls(MessageCalls):
    """Solar Open: a mark says what a message is; each call in it has an id, the tool's name and JSON behind marks.

    A call of a tool that is none of the request's is text.
    """

    name = "solar"
    begin, end, think, content, flush = "<|begin|>", "<|end|>", "<|think|>", "<|content|>", "<|flush|>"
    section, section_end = "<|tool_calls|>", "<|calls|>"
    call_open, call_close = "<|tool_call:begin|>", "<|tool_call:end|>"
    name_open, arguments_open = "<|tool_call:name|>", "<|tool_call:args|>"
    signs = ((call_open, name_open, arguments_open),)
    openings = (section, call_open)
    marks = (
        *(begin, end, think, content, flush, section, section_end),
        *(call_open, call_close, name_open, arguments_open),
    )
    thoughts = ThoughtMarks(think, end)
    message_head = f"{begin}assistant"
    text_before = content
    frame = CallFrame(f"{section}{call_open}", call_open, "")
    example_id = "a1b2c3d4e5"

    @classmethod
    def call_text(cls, tool: str, arguments: JsonObject) -> str:
        written = json.dumps(arguments, ensure_ascii=False)
        return f"{cls.example_id}{cls.name_open}{tool}{cls.arguments_open}{written}{cls.call_close}"

    @classmethod
    def call_rules(cls, rule: str, tool: str, schema: Schema, grammar: CallGrammar) -> list[str]:
        head = grammar.literal(f"{cls.name_open}{tool}{cls.arguments_open}")
        return [
            f"{rule}: /[a-z0-9]{{10}}/ {head} {rule}_arguments {grammar.literal(cls.call_close)}",
            f"{rule}_arguments: {json_rule(schema)}",
        ]

    def _read_mark(self, mark: str) -> None:
        if self._state == "body":
            self._end_message()
        if mark == self.think:
            self._begin_message(ReasoningDelta)
        elif mark == self.content:
            self._begin_message(TextDelta)
        elif mark == self.arguments_open:
            name = self._header.strip(SPACES)
            if name in self._names:
                self._start_call(name)
            else:
                self._begin_message(TextDelta)
        elif mark in (self.end, self.section_end, self.flush):
            self._state = "between"
        else:
            self._state, self._header = "header", ""
