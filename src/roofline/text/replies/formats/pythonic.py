"""The formats in which calls are Python's: a list of them with named arguments, between marks or as a whole reply."""

import json
import re
from typing import ClassVar

from roofline.common.json_types import JsonObject
from roofline.text.replies.call_format import CallFormat, CallFrame
from roofline.text.replies.call_grammar import CallGrammar, Schema, json_rule, quoted
from roofline.text.replies.json_scanner import SPACES
from roofline.text.replies.literals import LiteralReader
from roofline.text.replies.parser import CallDelta, Delta
from roofline.text.replies.tag_rules import properties_of

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_MOST = 1 << 20  # characters of a list that are kept back


class PythonicCalls(CallFormat):
    """LFM2: [f(k='v', n=1)] between marks. A call is told when the list that it stands in has ended.

    What is no such list, or has a call of no tool of the request, is text.
    """

    name = "lfm2"
    open, close = "<|tool_call_start|>", "<|tool_call_end|>"
    signs: ClassVar[tuple[tuple[str, ...], ...]] = (
        (open, close),
        ("<|tool_list_start|>", "<|tool_response_start|>"),
        ("List of tools: [",),
    )
    openings: ClassVar[tuple[str, ...]] = (open,)
    marks: ClassVar[tuple[str, ...]] = (open, close)
    frame: ClassVar[CallFrame] = CallFrame(f"{open}[", ", ", f"]{close}")

    @classmethod
    def call_text(cls, tool: str, arguments: JsonObject) -> str:
        return f"{tool}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"

    @classmethod
    def call_rules(cls, rule: str, tool: str, schema: Schema, grammar: CallGrammar) -> list[str]:
        properties = list(properties_of(schema))
        rules = [f'{rule}: {quoted(f"{tool}(")} {rule}_first_0 ")"']
        for number, (name, part, required) in enumerate(properties):
            if not re.fullmatch(r"[^\W\d]\w*", name):
                raise ValueError(f"properties.{name}: the format cannot write this name")
            item = f"{rule}_{number}"
            rules += [f"{item}: {quoted(f'{name}=')} {item}_value", f"{item}_value: {json_rule(part)}"]
            for kind, comma in (("first", ""), ("next", '", " ')):
                skipped = "" if required else f" | {rule}_{kind}_{number + 1}"
                rules.append(f"{rule}_{kind}_{number}: {comma}{item} {rule}_next_{number + 1}{skipped}")
        return [*rules, f'{rule}_first_{len(properties)}: ""', f'{rule}_next_{len(properties)}: ""']

    def finish(self, *, cut: bool = False) -> list[Delta]:
        if self._state == "opened":
            calls = None if cut else self._calls_of(self._pending)
            if calls is None:
                self._tell("" if cut else self._opening + self._pending)
            else:
                self._tell_calls(calls)
            self._pending, self._state = "", "ended"
        if self._state in ("closed", "ended"):
            self._pending, self._state = "", "ended"
        return super().finish(cut=cut)

    def _after(self) -> bool:
        if self._state == "closed":
            return self._behind_list()
        if self._state != "opened":
            self._pending = ""
            return False
        text, mark, behind = self._pending.partition(self.close)
        if not mark:
            return False if len(self._pending) < _MOST else self._no_call()
        calls = self._calls_of(text)
        if calls is None:
            return self._no_call()
        self._tell_calls(calls)
        self._pending, self._state = behind, "closed"
        return True

    def _behind_list(self) -> bool:
        self._strip_spaces()
        self._state = "text" if self._pending else "closed"
        return bool(self._pending)

    def _tell_calls(self, calls: list[tuple[str, str]]) -> None:
        for name, arguments in calls:
            self._deltas.append(CallDelta(self._calls, name, arguments))
            self._calls += 1
        self._strips = True

    def _calls_of(self, text: str) -> list[tuple[str, str]] | None:
        """Names and arguments of the calls of a list; None: it is none, or has calls of other tools."""
        try:
            calls = _PythonCallReader(text).calls()
        except ValueError:
            return None
        if any(name not in self._names for name, _ in calls):
            return None
        return [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]


class BarePythonicCalls(PythonicCalls):
    """Llama 4, and models that are told to write so: the reply is the list and nothing else."""

    name = "pythonic"
    signs = (("[func_name1(",), ("[func1(",))
    openings, marks = ("<|python_start|>",), ("<|python_start|>", "<|python_end|>")
    close = "<|python_end|>"
    frame = CallFrame("[", ", ", "]")
    is_marked = False

    def _begin(self) -> bool:
        begin = self._pending.lstrip(SPACES)
        if not begin or (len(begin) < len(self.openings[0]) and self.openings[0].startswith(begin)):
            return False
        self._opening = self._pending[: len(self._pending) - len(begin)]
        if begin.startswith(self.openings[0]):
            self._opening += self.openings[0]
            begin = begin.removeprefix(self.openings[0])
        self._pending, self._state = begin, "opened"
        return True

    def _after(self) -> bool:
        if self._state == "opened" and self._pending and not self._pending.lstrip(SPACES).startswith("["):
            self._state = "opened" if not self._pending.strip(SPACES) else "plain"
            self._tell(self._opening if self._state == "plain" else "")
        if self._state == "plain":
            self._tell(self._pending)
            self._pending = ""
            return False
        return self._state != "opened" and super()._after()

    def finish(self, *, cut: bool = False) -> list[Delta]:
        self._pending = self._pending.removesuffix(self.close) if self._state == "opened" else self._pending
        if self._state == "opened" and cut and not self._may_be_list():
            self._tell(self._opening + self._pending)
            self._pending, self._state = "", "ended"
        if self._state == "plain":
            self._state = "ended"
        return super().finish(cut=cut)

    def _may_be_list(self) -> bool:
        """Whether a reply that was cut off is the begin of a list of calls: no mark says so."""
        text = self._pending.lstrip(SPACES).removeprefix("[").lstrip(SPACES)
        name = text.partition("(")[0]
        return name in self._names if "(" in text else any(tool.startswith(name) for tool in self._names)


class _PythonCallReader(LiteralReader):
    """Reads calls with named arguments."""

    def calls(self) -> list[tuple[str, dict[str, object]]]:
        """Return the calls of the list that the text is. Raises ValueError."""
        self._expect("[")
        calls = [self.call()]
        while self._take(","):
            calls.append(self.call())
        self._expect("]")
        if self.skip_spaces() != len(self._text):
            raise ValueError("something stands behind the list")
        return calls

    def call(self) -> tuple[str, dict[str, object]]:
        """Return the call that stands next. Raises ValueError."""
        name, arguments = self._word(), dict[str, object]()
        self._expect("(")
        while not self._take(")"):
            key = self._word()
            self._expect("=")
            arguments.setdefault(key, self.value())
            if not self._take(","):
                self._expect(")")
                break
        return name, arguments

    def _word(self) -> str:
        self.skip_spaces()
        match = _NAME.match(self._text, self.at)
        if match is None:
            raise ValueError("no name stands there")
        self.at = match.end()
        return match[0]
