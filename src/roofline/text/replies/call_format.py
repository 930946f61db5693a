"""What the formats of tool calls share, each a parser of what is left of a reply without its reasoning.

A format is one class in a file of `formats/`: how a chat template shows that its model writes so (`signs`), the marks
(`marks`), the parser, and the grammar of calls that are forced (`frame`, `call_rules`). A row of `formats/table.py`
makes it known.

What looks like a call and is none, because it is no JSON or names no tool of the request, is text. White space next to
a call is dropped, and so is what follows within a call that stops being one after its name.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, NamedTuple

from roofline.common.json_types import JsonMapping, JsonObject
from roofline.text.replies.call_grammar import CallGrammar, Schema
from roofline.text.replies.call_reader import CallReader
from roofline.text.replies.json_scanner import SPACES
from roofline.text.replies.parser import Delta, TextDelta, begun
from roofline.text.replies.reasoning import THINK, ThoughtMarks


class CallFrame(NamedTuple):
    """What a forced answer has around its calls.

    before, between, after: the first call, two calls, the last. several: an answer can have more than one call.
    """

    before: str = ""
    between: str = ""
    after: str = ""
    several: bool = True


class CallFormat:
    """Text up to something that may be a call, and the call itself.

    A subclass says in `_begin` where calls begin, in `_after` what may follow one, in `openings` what stands before
    them.

    Args:
        tools: names of the tools that may be called; a mapping has the schema of each one's parameters.
    """

    name: ClassVar[str]
    signs: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """A model writes so whose chat template has all texts of one of these."""
    openings: ClassVar[tuple[str, ...]]
    """Marks of which one stands before a call. The first is the one that forced answers have."""
    marks: ClassVar[tuple[str, ...]]
    """All marks of the format, which a tokenizer may have as special tokens."""
    frame: ClassVar[CallFrame]
    thoughts: ClassVar[ThoughtMarks] = THINK
    """What stands around the reasoning of models that write so, where their chat template has it."""
    tells_reasoning: ClassVar[bool] = False
    """Whether reasoning and text stand behind marks of the format, which its parser reads with tools and without."""
    text_before: ClassVar[str] = ""
    """What stands before text, in a format that tells reasoning itself."""
    is_marked: ClassVar[bool] = True
    """Whether calls stand behind marks; else a reply is calls and nothing else, or text."""

    told_as: ClassVar[str] = "write its name and its arguments like this"
    """How a system message says it, before an example."""

    def __init__(self, tools: Collection[str]) -> None:
        self._names = tools
        self._pending = ""
        self._calls = 0
        self._reader: CallReader | None = None
        self._opening = ""  # what may introduce a call, white space and marks: text where no call follows
        self._state = "text"
        self._strips = False  # white space that comes next stands beside a call
        self._deltas: list[Delta] = []

    @classmethod
    def writes(cls, template: str) -> bool:
        """Return whether a model with this chat template writes calls so."""
        return any(all(sign in template for sign in signs) for signs in cls.signs)

    @classmethod
    def call_text(cls, tool: str, arguments: JsonObject) -> str:
        """Return one call as the model writes it, without what stands around calls (`frame`)."""
        raise NotImplementedError

    @classmethod
    def written(cls, tool: str, arguments: JsonObject) -> str:
        """Return an answer that is one call."""
        return f"{cls.frame.before}{cls.call_text(tool, arguments)}{cls.frame.after}"

    @classmethod
    def example(cls) -> str:
        """Return a call that shows a model how calls are written."""
        return cls.written("NAME", {"ARGUMENT": "VALUE"})

    @classmethod
    def instructions(cls, tools: Sequence[JsonMapping], *, own_results: bool) -> list[tuple[str, bool]]:
        """Return what a system message says of tools where the chat template does not, in pieces.

        Of each piece whether its special tokens are such; those in a tool's description are text.

        Args:
            tools: functions with name, description and parameters.
            own_results: the chat template has a form of its own for results.
        """
        functions = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        results = "" if own_results else "Its result follows between <tool_response> and </tool_response>. "
        return [
            ("You can call these functions, each given as a JSON schema:\n<tools>\n", True),
            (functions, False),
            (f"\n</tools>\nTo call one, {cls.told_as}:\n{cls.example()}\n{results}Otherwise answer in text.", True),
        ]

    @classmethod
    def call_rules(cls, rule: str, tool: str, schema: Schema, grammar: CallGrammar) -> list[str]:
        """Return the rules of one call. Raises ValueError where the format cannot hold calls to the schema.

        Args:
            rule: the name of the first of them, and the begin of the others' names.
            tool: its name.
            schema: of its arguments; None: it has no parameters.
        """
        raise NotImplementedError

    @classmethod
    def prologue(cls, grammar: CallGrammar, *, thinking: bool) -> tuple[str, list[str]]:
        """Return what a rule has for the reasoning before a call or text, and the rules that this needs.

        Of formats that tell reasoning themselves. thinking: the prompt ends within it.
        """
        raise NotImplementedError

    @property
    def open_call(self) -> int | None:
        """The number of the call whose end has not come; None: there is none."""
        return self._calls if self._reader is not None and self._reader.state == "call" else None

    def push(self, text: str) -> list[Delta]:
        self._pending += text
        while self._advance():
            pass
        return self._take()

    def finish(self, *, cut: bool = False) -> list[Delta]:
        reader = self._reader
        if reader is not None and reader.state == "undecided" and not (cut and self._may_be_call(reader)):
            self._tell(self._opening + reader.raw)
        if reader is None and self._state == "text" and not cut:
            self._tell(self._pending.lstrip() if self._strips else self._pending)
        if reader is None and self._state == "text" and cut:
            self._tell_cut()
        self._pending = ""
        return self._take()

    def _may_be_call(self, reader: CallReader) -> bool:
        """Whether an object that was cut off before it was decided is taken for a call: behind a mark."""
        return True

    def _tell_cut(self) -> None:
        """Tell the pending text of an answer that was cut off, without what may be the begin of a mark."""
        pending = self._pending.lstrip() if self._strips else self._pending
        mark_characters = longest_begun(pending, self.openings)
        self._tell(pending[: len(pending) - mark_characters].rstrip() if mark_characters else pending)

    def _advance(self) -> bool:
        """Go on with the pending text; False: the rest waits for more."""
        if self._reader is not None:
            return self._read(self._reader)
        return self._begin() if self._state == "text" else self._after()

    def _begin(self) -> bool:
        if self._tell_before(*self.openings) is None:
            return False
        self._state = "opened"
        return True

    def _after(self) -> bool:
        raise NotImplementedError

    def _read(self, reader: CallReader) -> bool:
        """Give the reader of a call its characters."""
        for at, character in enumerate(self._pending, 1):
            reader.feed(character)
            if reader.ended:
                self._pending = self._pending[at:]
                self._end_call(reader)
                return True
        self._pending = ""
        self._deltas += reader.take()
        return False

    def _end_call(self, reader: CallReader) -> None:
        self._reader = None
        if reader.state == "text":
            self._tell(self._opening + reader.raw)
            self._state = "text"
        else:
            self._deltas += reader.take()
            self._calls += 1
            self._strips = True
            self._state = "after" if reader.state == "complete" else "broken"

    def _call(self, opening: str) -> bool:
        """The pending text is a call that `opening` introduced."""
        self._reader, self._opening = CallReader(self._names, self._calls), opening
        return bool(self._pending)

    def _no_call(self) -> bool:
        """What has been taken for the begin of a call is text."""
        self._tell(self._opening)
        self._opening, self._state = "", "text"
        return True

    def _strip_spaces(self, beside: str = "") -> str:
        """Take white space, and characters of `beside`, off the begin of the pending text: what was taken off."""
        rest = self._pending.lstrip(SPACES + beside)
        spaces, self._pending = self._pending[: len(self._pending) - len(rest)], rest
        return spaces

    def _tell(self, text: str) -> None:
        if text:
            self._deltas.append(TextDelta(text))
            self._strips = False

    def _tell_before(self, *marks: str) -> str | None:
        """Tell the text before the first of some marks and take that off; None: there is none, and what is sure was
        told."""
        pending = self._pending.lstrip() if self._strips else self._pending
        place = first_of(pending, marks)
        if place is not None:
            at, mark = place
            text = pending[:at].rstrip()
            self._tell(text)
            self._opening, self._pending = pending[len(text) : at + len(mark)], pending[at + len(mark) :]
            return mark
        sure = pending[: len(pending) - longest_begun(pending, marks)].rstrip()
        self._tell(sure)
        self._pending = pending[len(sure) :]
        return None

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas


def first_of(text: str, marks: Collection[str]) -> tuple[int, str] | None:
    """Return where the first of some marks stands in a text, and that mark; of two in one place the longer one."""
    places = ((text.find(mark), -len(mark), mark) for mark in marks)
    first = min((place for place in places if place[0] >= 0), default=None)
    return None if first is None else (first[0], first[2])


def longest_begun(text: str, marks: Collection[str]) -> int:
    """Return the length of the longest end of a text that begins one of some marks."""
    return max((begun(text, mark) for mark in marks), default=0)


def schemas_of(tools: Collection[str]) -> Mapping[str, object]:
    """Return the schemas of the parameters of tools, as far as they are known."""
    return tools if isinstance(tools, Mapping) else {}
