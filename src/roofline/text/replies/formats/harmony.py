"""OpenAI's harmony format, which gpt-oss writes: messages in channels, with calls among them."""

import json
import re

from roofline.common.json_types import JsonObject
from roofline.text.replies.call_format import CallFrame
from roofline.text.replies.call_grammar import CallGrammar, Schema, json_rule
from roofline.text.replies.formats.messages import MessageCalls
from roofline.text.replies.json_scanner import SPACES
from roofline.text.replies.parser import ReasoningDelta, TextDelta
from roofline.text.replies.reasoning import ThoughtMarks

_RECIPIENT = re.compile(r"\bto=(?:functions\.)?(?P<name>[A-Za-z0-9_.\-]+)")
_ROLE = "assistant"


class HarmonyCalls(MessageCalls):
    """gpt-oss: a header with channel and recipient, a mark, the message, a mark.

    Messages of the channel analysis are reasoning, those to a tool of the request are calls, all others are text. A
    header that says neither is passed over, and what stands there instead of a channel is reasoning: the model forgot
    the mark behind the header, or wrote its thoughts into it.
    """

    name = "harmony"
    start, end, message, channel, constrain, call, back = (
        *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"),
    )
    signs = ((start, message, channel),)
    marks = (start, end, message, channel, constrain, call, back)
    openings = (channel, start)
    thoughts = ThoughtMarks(f"{channel}analysis{message}", end)
    heads = ("to=", _ROLE)
    message_head = f"{start}{_ROLE}"
    text_before = f"{channel}final{message}"
    frame = CallFrame(f"{channel}commentary to=functions.", several=False)

    @classmethod
    def call_text(cls, tool: str, arguments: JsonObject) -> str:
        return f"{tool} {cls.constrain}json{cls.message}{json.dumps(arguments, ensure_ascii=False)}{cls.call}"

    @classmethod
    def call_rules(cls, rule: str, tool: str, schema: Schema, grammar: CallGrammar) -> list[str]:
        head = grammar.literal(f"{tool} {cls.constrain}json{cls.message}")
        return [f"{rule}: {head} {rule}_arguments", f"{rule}_arguments: {json_rule(schema)}"]

    def _read_mark(self, mark: str) -> None:
        if self._state == "header" and mark == self.message:
            self._read_header()
        elif self._state == "header" and mark in (self.channel, self.constrain):
            self._header += f" {mark} "
        elif mark in (self.start, self.channel):
            self._end_part()
            self._state, self._header = "header", f" {mark} " if mark == self.channel else ""
        elif mark in (self.end, self.call, self.back):
            self._end_part()
            self._state = "between"

    def _end_part(self) -> None:
        if self._state == "header":
            self._tell_header()
        elif self._state == "body":
            self._end_message()

    def _tell_header(self) -> None:
        """A header had no message: what is none of a header in it was meant to be one."""
        self._tell_of(ReasoningDelta, self._free_text())

    def _free_text(self) -> str:
        """What stands in a header in place of a channel and is no name of one."""
        channel = self._header.rpartition(self.channel)[2].partition(self.constrain)[0]
        text = _RECIPIENT.sub("", channel).strip(SPACES)
        word = re.sub(r"[^a-z]", "", text.partition(" ")[0].lower())
        return "" if word in ("", "analysis", "commentary", "final", "json", "code", _ROLE) else text

    def _read_header(self) -> None:
        recipient = _RECIPIENT.search(self._header)
        name = recipient["name"] if recipient is not None else ""
        channel = self._header.rpartition(self.channel)[2].strip(SPACES)
        self._tell_of(ReasoningDelta, self._free_text())
        if name in self._names:
            self._start_call(name)
        else:
            self._begin_message(ReasoningDelta if channel.startswith("analysis") else TextDelta)
