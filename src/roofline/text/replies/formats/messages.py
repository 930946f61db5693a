"""What the formats share in which an answer is messages behind marks, reasoning and calls among them."""

from collections.abc import Collection
from typing import ClassVar

from roofline.text.replies.call_format import CallFormat, first_of, longest_begun
from roofline.text.replies.call_grammar import CallGrammar
from roofline.text.replies.json_scanner import SPACES, JsonScanner
from roofline.text.replies.parser import CallDelta, Delta, ReasoningDelta, TextDelta


class MessageCalls(CallFormat):
    """Messages, each reasoning, text or the arguments of a call, which the marks before it say (`_read_mark`)."""

    tells_reasoning = True
    message_head: ClassVar[str]
    """What stands before the mark of a message behind another."""
    heads: ClassVar[tuple[str, ...]] = ()
    """What a header begins with besides marks."""

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
    def prologue(cls, grammar: CallGrammar, *, thinking: bool) -> tuple[str, list[str]]:
        thought = f"thoughts {grammar.literal(cls.message_head)}"
        item = thought if thinking else f"({grammar.literal(cls.thoughts.open)} {thought})?"
        return item, grammar.until("thoughts", cls.thoughts.close)

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
        heads = (*self.heads, *self.marks)
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

    def _start_call(self, name: str) -> None:
        self._begin_message(CallDelta)
        self._scanner = JsonScanner()
        self._deltas.append(CallDelta(self._calls, name, ""))
        self._calls += 1

    def _read_mark(self, mark: str) -> None:
        """Go on behind a mark."""
        raise NotImplementedError

    def _tell_header(self) -> None:
        """Tell what a header has that had no message: nothing."""
