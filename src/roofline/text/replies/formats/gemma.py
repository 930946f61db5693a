"""The format of Gemma 4: call:f{k:<|"|>text<|"|>,n:1} between marks."""

import json
import re
from collections.abc import Collection

from roofline.common.json_types import JsonObject
from roofline.text.replies.call_format import CallFormat, CallFrame, schemas_of
from roofline.text.replies.call_grammar import CallGrammar, Schema, quoted
from roofline.text.replies.formats.gemma_arguments import QUOTE, GemmaArguments
from roofline.text.replies.json_scanner import SPACES
from roofline.text.replies.parser import CallDelta, Delta
from roofline.text.replies.reasoning import CHANNEL
from roofline.text.replies.tag_rules import ValueEnds, properties_of, value_rules

_HEAD = re.compile(r"(?:call)?\s*[:\-]?\s*(?P<name>\S*)")
_LONGEST_HEAD = 256


class GemmaCalls(CallFormat):
    """Gemma 4: keys without quotes, texts between marks of their own.

    The mark before a call may be missing where nothing else stands before it, as behind reasoning or another call. The
    mark behind a call may be there twice.
    """

    name = "gemma"
    open, close, response = "<|tool_call>", "<tool_call|>", "<|tool_response>"
    bare = "call:"
    signs = ((open, QUOTE),)
    openings, marks = (open,), (open, close, response, QUOTE)
    thoughts = CHANNEL
    frame = CallFrame(open, f"{close}{open}", close)

    def __init__(self, tools: Collection[str]) -> None:
        super().__init__(tools)
        self._arguments = GemmaArguments(None)
        self._is_fresh = True  # nothing was told since the reply or a call behind which this stands

    @classmethod
    def call_text(cls, tool: str, arguments: JsonObject) -> str:
        pairs = ",".join(f"{name}:{_written(value)}" for name, value in arguments.items())
        return f"call:{tool}{{{pairs}}}"

    @classmethod
    def call_rules(cls, rule: str, tool: str, schema: Schema, grammar: CallGrammar) -> list[str]:
        properties, ends = list(properties_of(schema)), ValueEnds("", (QUOTE,), QUOTE)
        rules = [f'{rule}: {quoted(f"call:{tool}" + "{")} {rule}_first_0 "}}"']
        for number, (name, part, required) in enumerate(properties):
            if not re.fullmatch(r"[\w.\-]+", name):
                raise ValueError(f"properties.{name}: the format cannot write this name")
            item, rest = f"{rule}_{number}", f"{rule}_next_{number + 1}"
            rules += [f"{item}: {quoted(name + ':')} {item}_value", *value_rules(f"{item}_value", part, ends, grammar)]
            for kind, comma in (("first", ""), ("next", '"," ')):
                skipped = "" if required else f" | {rule}_{kind}_{number + 1}"
                rules.append(f"{rule}_{kind}_{number}: {comma}{item} {rest}{skipped}")
        return [*rules, f'{rule}_first_{len(properties)}: ""', f'{rule}_next_{len(properties)}: ""']

    @property
    def open_call(self) -> int | None:
        return self._calls - 1 if self._state == "arguments" else None

    def finish(self, *, cut: bool = False) -> list[Delta]:
        if self._state == "opened":
            self._tell("" if cut else self._opening + self._pending)
        elif self._state == "arguments" and not cut:
            self._tell_arguments(self._arguments.end())
        if self._state == "text" and cut and self._is_fresh and self.bare.startswith(self._pending.strip(SPACES)):
            self._pending = ""
        if self._state != "text":
            self._pending, self._state = "", "ended"
        return super().finish(cut=cut)

    def _begin(self) -> bool:
        begin = self._pending.lstrip(SPACES)
        if self._is_fresh and len(begin) < len(self.bare) and self.bare.startswith(begin):
            return False
        if self._is_fresh and begin.startswith(self.bare):
            self._opening = "" if self._strips else self._pending[: len(self._pending) - len(begin)]
            self._pending, self._state, self._is_fresh = begin, "opened", False
            return True
        self._is_fresh = False
        return super()._begin()

    def _after(self) -> bool:
        match self._state:
            case "opened":
                return self._read_head()
            case "arguments":
                return self._read_arguments()
            case "broken":
                return self._skip_broken()
            case "closed":
                return self._behind_call()
        self._pending = ""
        return False

    def _read_head(self) -> bool:
        head, bracket, behind = self._pending.partition("{")
        if not bracket and len(head) <= _LONGEST_HEAD and not (set("<}") & set(head)):
            return False
        match = _HEAD.fullmatch(head.strip(SPACES))
        names = (head.strip(SPACES), match["name"] if match is not None else "")
        name = next((name for name in names if name in self._names), None) if bracket else None
        if name is None:
            return self._no_call()
        self._pending, self._state = behind, "arguments"
        self._arguments = GemmaArguments(schemas_of(self._names).get(name))
        self._deltas.append(CallDelta(self._calls, name, ""))
        self._calls += 1
        self._strips = True
        return True

    def _read_arguments(self) -> bool:
        pending, self._pending = self._pending, ""
        self._tell_arguments(self._arguments.push(pending))
        if self._arguments.complete or self._arguments.is_broken:
            self._state = "closed" if self._arguments.complete else "broken"
            self._pending, self._arguments.pending = self._arguments.pending, ""
            self._tell_arguments(self._arguments.end())
            return True
        return False

    def _skip_broken(self) -> bool:
        """Drop what follows in a call that is broken, up to the mark behind it."""
        at = self._pending.find(self.close)
        self._pending = self._pending[at:] if at >= 0 else self._pending[-len(self.close) + 1 :]
        self._state = "closed" if at >= 0 else "broken"
        return at >= 0

    def _behind_call(self) -> bool:
        self._strip_spaces()
        if not self._pending:
            return False
        mark = next((mark for mark in (self.close, self.response) if self._pending.startswith(mark)), None)
        if mark is not None:
            self._pending = self._pending.removeprefix(mark)
            return True
        if any(mark.startswith(self._pending) for mark in (self.close, self.response)):
            return False
        self._state, self._is_fresh = "text", True
        return True

    def _tell_arguments(self, text: str) -> None:
        if text:
            self._deltas.append(CallDelta(self._calls - 1, None, text))


def _written(value: object) -> str:
    """A value as the model writes it."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{QUOTE}{name}{QUOTE}:{_written(part)}" for name, part in value.items()) + "}"
    return "[" + ",".join(map(_written, value)) + "]" if isinstance(value, list) else json.dumps(value)
