"""The formats in which models write calls of tools, each a parser of what is left of a reply without its reasoning.

What looks like a call and is none, because it is no JSON or names no tool of the request, is text. White space next to
a call is dropped, and so is what follows within a call that stops being JSON after its name.
"""

from collections.abc import Collection
from typing import ClassVar

from roofline.text.replies.call_reader import CallReader
from roofline.text.replies.json_scanner import SPACES, JsonScanner
from roofline.text.replies.parser import CallDelta, Delta, TextDelta, begun


class CallFormat:
    """What the formats share: text up to something that may be a call, and the call itself.

    A subclass says in `_begin` where calls begin, in `_after` what may follow one, in `mark` what stands before them.
    """

    mark: ClassVar[str]

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._pending = ""
        self._calls = 0
        self._reader: CallReader | None = None
        self._opening = ""  # what may introduce a call, white space and marks: text where no call follows
        self._state = "text"
        self._strips = False  # white space that comes next stands beside a call
        self._deltas: list[Delta] = []

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
        mark_characters = begun(pending, self.mark)
        self._tell(pending[: len(pending) - mark_characters].rstrip() if mark_characters else pending)

    def _advance(self) -> bool:
        """Go on with the pending text; False: the rest waits for more."""
        if self._reader is not None:
            return self._read(self._reader)
        return self._begin() if self._state == "text" else self._after()

    def _begin(self) -> bool:
        raise NotImplementedError

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

    def _strip_spaces(self, beside: str = "") -> str:
        """Take white space, and characters of `beside`, off the begin of the pending text: what was taken off."""
        rest = self._pending.lstrip(SPACES + beside)
        spaces, self._pending = self._pending[: len(self._pending) - len(rest)], rest
        return spaces

    def _tell(self, text: str) -> None:
        if text:
            self._deltas.append(TextDelta(text))
            self._strips = False

    def _tell_before(self, mark: str) -> bool:
        """Tell the text before a mark and take the mark off; False: no mark is complete, and what is sure was told."""
        pending = self._pending.lstrip() if self._strips else self._pending
        at = pending.find(mark)
        if at >= 0:
            text = pending[:at].rstrip()
            self._tell(text)
            self._opening, self._pending = pending[len(text) : at + len(mark)], pending[at + len(mark) :]
            return True
        sure = pending[: len(pending) - begun(pending, mark)].rstrip()
        self._tell(sure)
        self._pending = pending[len(sure) :]
        return False

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas


class HermesCalls(CallFormat):
    """Nous Hermes, Qwen, and models without a format of their own: an object between <tool_call> and </tool_call>."""

    open, close = "<tool_call>", "</tool_call>"
    mark = open

    def _begin(self) -> bool:
        if not self._tell_before(self.open):
            return False
        self._state = "opened"
        return True

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


class ObjectCalls(CallFormat):
    """Llama 3 and others: the reply is an object or a list of objects, {"name": ..., "parameters": ...}, and no text.

    prefix: a mark that may stand before the first.
    """

    prefix = "<|python_tag|>"
    mark = prefix

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._prefixed = False

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


class MistralCalls(CallFormat):
    """Mistral: [TOOL_CALLS] and a list of objects, or, since the eleventh tokenizer, name[ARGS]{...} or name{...}."""

    open, separator = "[TOOL_CALLS]", "[ARGS]"
    mark = open
    name_characters = 256

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._in_list = False
        self._arguments: JsonScanner | None = None

    def _begin(self) -> bool:
        if not self._tell_before(self.open):
            return False
        self._state, self._in_list = "opened", False
        return True

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
        at = self._pending.find("{")
        name = self._pending[:at].strip(SPACES).removesuffix(self.separator).strip(SPACES) if at >= 0 else ""
        if at < 0 and len(self._pending) <= self.name_characters:
            return False
        if at < 0 or name not in self._names:
            self._tell(self._opening)
            self._state = "text"
            return True
        self._pending, self._state, self._arguments = self._pending[at:], "arguments", JsonScanner()
        self._deltas.append(CallDelta(self._calls, name, ""))
        self._calls += 1
        self._strips = True
        return True

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
            self._tell("" if cut else self._opening + self._pending)
            self._state = "ended"
        return super().finish(cut=cut)
