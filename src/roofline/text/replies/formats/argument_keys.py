"""The formats of GLM 4.5 to 5 and HY 3: the tool's name, then a key and a value between tags for each argument."""

import re
from typing import ClassVar

from roofline.common.json_types import JsonObject
from roofline.text.replies.call_format import CallFrame, first_of, longest_begun
from roofline.text.replies.call_grammar import CallGrammar, Schema
from roofline.text.replies.formats.tagged import TaggedCalls, text_of
from roofline.text.replies.json_scanner import SPACES
from roofline.text.replies.reasoning import ThoughtMarks
from roofline.text.replies.tag_rules import ValueEnds, tagged_arguments

_NAME = re.compile(r"[A-Za-z0-9_.\-]*")


class ArgumentKeyCalls(TaggedCalls):
    """GLM: <tool_call>f, then <arg_key>k</arg_key><arg_value>v</arg_value>, on lines of their own or not.

    Tags that are missing or there twice are made up for: a key is what stands between the last opening and the first
    closing tag, and a value begins behind that.
    """

    name = "glm"
    open: ClassVar[str] = "<tool_call>"
    close: ClassVar[str] = "</tool_call>"
    key_open: ClassVar[str] = "<arg_key>"
    key_close: ClassVar[str] = "</arg_key>"
    value_open: ClassVar[str] = "<arg_value>"
    signs: ClassVar[tuple[tuple[str, ...], ...]] = ((key_open, value_open),)
    name_close: ClassVar[str] = ""
    """What stands behind a tool's name."""
    head = ("", "")
    openings: ClassVar[tuple[str, ...]] = (open,)
    sections: ClassVar[tuple[str, ...]] = (open,)
    marks: ClassVar[tuple[str, ...]] = (open, close, key_open, key_close, value_open, "</arg_value>")
    call_ends: ClassVar[tuple[str, ...]] = (close,)
    value_close: ClassVar[tuple[str, ...]] = ("</arg_value>",)
    value_ends: ClassVar[tuple[str, ...]] = (*value_close, key_open, close)
    frame: ClassVar[CallFrame] = CallFrame(open, f"{close}{open}", close)

    @classmethod
    def call_text(cls, tool: str, arguments: JsonObject) -> str:
        pairs = (
            f"{cls.key_open}{name}{cls.key_close}\n{cls.value_open}{text_of(value)}{cls.value_close[0]}\n"
            for name, value in arguments.items()
        )
        return f"{tool}{cls.name_close}\n{''.join(pairs)}"

    @classmethod
    def call_rules(cls, rule: str, tool: str, schema: Schema, grammar: CallGrammar) -> list[str]:
        line = f"{rule}_line"

        def before(name: str, part: JsonObject) -> str:
            return f"{grammar.literal(f'{cls.key_open}{name}{cls.key_close}')} {line} {grammar.literal(cls.value_open)}"

        arguments, rules = tagged_arguments(
            rule, schema, before, ValueEnds(cls.value_close[0], cls.value_ends), grammar
        )
        arguments = "".join(f"{argument} {line} " for argument in arguments.split())
        return [f"{rule}: {grammar.literal(tool + cls.name_close)} {line} {arguments}", f'{line}: "\\n"?', *rules]

    def _read_head(self) -> bool:
        self._opening += self._strip_spaces()
        match = _NAME.match(self._pending)
        name = match[0] if match is not None else ""
        behind = self._pending[len(name) :].lstrip(SPACES)
        if not behind:
            spaces = len(self._pending) > len(name)
            is_tool = name in self._names if spaces else any(tool.startswith(name) for tool in self._names)
            return False if is_tool else self._no_call()
        tags = (self.key_open, self.key_close, self.value_open, self.close, *filter(None, (self.name_close,)))
        if name not in self._names or not any(behind.startswith(tag) for tag in tags):
            waits = name in self._names and any(tag.startswith(behind) for tag in tags)
            return False if waits else self._no_call()
        self._start(name, behind)
        return True

    def _finish_opened(self, *, cut: bool) -> None:
        if self._pending.strip(SPACES) in self._names and not cut:
            self._start(self._pending.strip(SPACES), "")
            self._tell_arguments("}")
        else:
            super()._finish_opened(cut=cut)

    def _after(self) -> bool:
        if self._state == "key":
            return self._read_key()
        return self._read_gap() if self._state == "gap" else super()._after()

    def _read_tag(self) -> bool:
        marks = (self.key_open, self.close, self.open, *self.section_ends)
        place = first_of(self._pending, marks)
        if place is None:
            begun = longest_begun(self._pending, marks)
            self._pending = self._pending[len(self._pending) - begun :]
            return False
        at, mark = place
        self._pending = self._pending[at:]
        if mark == self.key_open:
            self._pending, self._state = self._pending.removeprefix(mark), "key"
        else:
            self._end_call_of(self._pending.removeprefix(self.close))
        return True

    def _read_key(self) -> bool:
        place = first_of(self._pending, (self.key_close, self.value_open, self.close))
        if place is None:
            return False
        at, mark = place
        key = self._pending[:at].rpartition(self.key_open)[2].strip(SPACES)
        self._pending, self._state = self._pending[at:], "between"
        if key and mark != self.close:
            self._key, self._state = key, "gap"
        return True

    def _read_gap(self) -> bool:
        """Read what stands between a key and its value."""
        self._strip_spaces()
        if self._pending.startswith(self.key_close):
            self._pending = self._pending.removeprefix(self.key_close)
            return True
        if any(tag.startswith(self._pending) and tag != self._pending for tag in (self.key_close, self.value_open)):
            return False
        self._start_value(self._key, self._pending.removeprefix(self.value_open))
        return True


class HunyuanCalls(ArgumentKeyCalls):
    """HY 3: the same in a section, with a mark behind the tool's name and a suffix in every mark."""

    name = "hy_v3"
    suffix = ":opensource"
    section, section_end = f"<tool_calls{suffix}>", f"</tool_calls{suffix}>"
    open, close, name_close = f"<tool_call{suffix}>", f"</tool_call{suffix}>", f"<tool_sep{suffix}>"
    key_open, key_close, value_open = f"<arg_key{suffix}>", f"</arg_key{suffix}>", f"<arg_value{suffix}>"
    signs = (("<tool_sep{}>", "<arg_key{}>", suffix), (name_close, key_open))
    openings, sections, section_ends = (section, open), (section, open), (section_end,)
    call_ends, value_close = (close,), (f"</arg_value{suffix}>",)
    value_ends = (*value_close, key_open, close, section_end)
    marks = (section, section_end, open, close, name_close, key_open, key_close, value_open, *value_close)
    thoughts = ThoughtMarks(f"<think{suffix}>", f"</think{suffix}>", sign="<think{}>")
    frame = CallFrame(f"{section}\n{open}", f"{close}\n{open}", f"{close}\n{section_end}")

    def _read_head(self) -> bool:
        self._opening += self._strip_spaces()
        if self._pending != self.open and self.open.startswith(self._pending):
            return False
        if self._pending.startswith(self.open):  # behind the mark of the section
            self._opening, self._pending = self._opening + self.open, self._pending.removeprefix(self.open)
        return super()._read_head()
