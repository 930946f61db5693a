"""OpenAI's harmony format, which gpt-oss writes: messages in channels, with calls among them."""

import re
from collections.abc import Collection

from roofline.text.replies.call_format import CallFormat, CallFrame, first_of, longest_begun
from roofline.text.replies.call_grammar import CallGrammar, Schema, json_rule
from roofline.text.replies.json_scanner import SPACES, JsonScanner
from roofline.text.replies.parser import CallDelta, Delta, ReasoningDelta, TextDelta
from roofline.text.replies.reasoning import ThoughtMarks

_RECIPIENT = re.compile(r"\bto=(?:functions\.)?(?P<name>[A-Za-z0-9_.\-]+)")
_ROLE = "assistant"


class HarmonyCalls(CallFormat):
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
    tells_reasoning = True
    text_before = f"{channel}final{message}"
    frame = CallFrame(f"{channel}commentary to=functions.", several=False)

    def __init__(self, tools: Collection[str]) -> None:
        super().__init__(tools)
        self._state = "start"
        self._kind: type[Delta] = TextDelta
        self._header = ""
        self._spaces = ""  # at the end of a message so far, which are told if more of it follows
        self._told: set[type[Delta]] = set()  # kinds of which there was text before this message
        self._is_begun = False  # whether anything of this message was told
        self._scanner: JsonScanner | None = None

    @classmethod
    def call_rules(cls, rule: str, tool: str, schema: Schema, grammar: CallGrammar) -> list[str]:
        head = grammar.literal(f"{tool} {cls.constrain}json{cls.message}")
        return [f"{rule}: {head} {rule}_arguments", f"{rule}_arguments: {json_rule(schema)}"]

    @classmethod
    def prologue(cls, grammar: CallGrammar, *, thinking: bool) -> tuple[str, list[str]]:
        thought = f"thoughts {grammar.literal(cls.start + _ROLE)}"
        item = thought if thinking else f"({grammar.literal(cls.thoughts.open)} {thought})?"
        return item, grammar.until("thoughts", cls.end)

    @property
    def open_call(self) -> int | None:
        return self._calls - 1 if self._state == "body" and self._kind is CallDelta else None

    def finish(self, *, cut: bool = False) -> list[Delta]:
        pending = self._pending
        pending = pending[: len(pending) - longest_begun(pending, self.marks)] if cut else pending
        if self._state == "body":
            self._take_body(pending)
            self._end_message(cut=cut)
        elif not cut and self._state in ("start", "between"):
            self._tell_of(TextDelta, pending if self._state == "start" else pending.strip(SPACES))
        elif not cut:
            self._header += pending
            self._tell_header()
        self._pending, self._state = "", "ended"
        return self._take()

    def _advance(self) -> bool:
        if self._state in ("start", "between") and not self._starts():
            return False
        if self._state == "ended":
            return False
        place = first_of(self._pending, self.marks)
        if place is None:
            end = len(self._pending) - longest_begun(self._pending, self.marks)
            self._take_text(self._pending[:end])
            self._pending = self._pending[end:]
            return False
        at, mark = place
        self._take_text(self._pending[:at])
        self._pending = self._pending[at + len(mark) :]
        self._read_mark(mark)
        return True

    def _starts(self) -> bool:
        """Whether it is known what stands where a message begins: a header, or text without one."""
        begin = self._pending.lstrip(SPACES)
        heads = ("to=", _ROLE, *self.marks)
        if any(len(begin) < len(head) and head.startswith(begin) for head in heads):
            return False
        if any(begin.startswith(head) for head in heads):
            self._state, self._header = "header", ""
            self._pending = begin
        else:
            self._begin_message(TextDelta)
        return True

    def _take_text(self, text: str) -> None:
        if self._state == "header":
            self._header += text
        elif self._state == "body":
            self._take_body(text)

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
            self._begin_message(CallDelta)
            self._scanner = JsonScanner()
            self._deltas.append(CallDelta(self._calls, name, ""))
            self._calls += 1
        else:
            self._begin_message(ReasoningDelta if channel.startswith("analysis") else TextDelta)

    def _begin_message(self, kind: type[Delta]) -> None:
        self._state, self._kind, self._spaces, self._is_begun = "body", kind, "", False

    def _take_body(self, text: str) -> None:
        if self._kind is CallDelta:
            self._take_arguments(text)
            return
        text = self._spaces + text if self._is_begun else text.lstrip(SPACES)
        sure = text.rstrip(SPACES)
        self._spaces = text[len(sure) :]
        self._tell_of(self._kind, sure)

    def _tell_of(self, kind: type[Delta], text: str) -> None:
        if not text:
            return
        gap = "\n\n" if kind in self._told and not self._is_begun else ""
        self._deltas.append(ReasoningDelta(gap + text) if kind is ReasoningDelta else TextDelta(gap + text))
        self._is_begun = self._state == "body"
        self._told.add(kind)

    def _take_arguments(self, text: str) -> None:
        """Tell the arguments of a call as far as they are an object."""
        text = text if self._is_begun else text.lstrip(SPACES)
        for at, character in enumerate(text):
            valid = self._scanner is not None and (self._is_begun or character == "{")
            valid = valid and self._scanner is not None and self._scanner.feed(character)
            if not valid or self._scanner is None or self._scanner.complete:
                self._tell_arguments(text[: at + 1 if valid else at])
                self._scanner = None
                return
            self._is_begun = True
        self._tell_arguments(text if self._scanner is not None else "")

    def _tell_arguments(self, text: str) -> None:
        if text:
            self._is_begun = True
            self._deltas.append(CallDelta(self._calls - 1, None, text))

    def _end_message(self, *, cut: bool = False) -> None:
        if self._kind is CallDelta and not self._is_begun and not cut:
            self._deltas.append(CallDelta(self._calls - 1, None, "{}"))
        self._is_begun = False
