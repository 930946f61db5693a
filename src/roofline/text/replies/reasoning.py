"""Reasoning between marks at the beginning of a reply, which some templates open in the prompt."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from roofline.text.replies.begun_reply import SENTINEL, WritesCalls
from roofline.text.replies.json_scanner import SPACES
from roofline.text.replies.parser import (
    Delta,
    PlainReply,
    ReasoningDelta,
    ReplyParser,
    TextDelta,
    begun,
    joined,
)


class ThoughtMarks(NamedTuple):
    """What stands around the reasoning of a model.

    label: what may follow the first mark and is no thought. sign: what a chat template has that puts the first mark
    together; "": it has the mark.
    """

    open: str
    close: str
    label: str = ""
    sign: str = ""


THINK = ThoughtMarks("<think>", "</think>")
BRACKETS = ThoughtMarks("[THINK]", "[/THINK]")
CHANNEL = ThoughtMarks("<|channel>", "<channel|>", "thought\n")
SEED = ThoughtMarks("<seed:think>", "</seed:think>")
THOUGHTS = (BRACKETS, CHANNEL, SEED, THINK)
OPEN, CLOSE = THINK.open, THINK.close


class ThinkingReply:
    """Tells reasoning apart, and passes the rest of a reply on. White space around the reasoning is dropped.

    A call within the reasoning ends it as the closing mark does, which some models leave out: so a parser of calls
    reads the reasoning too. A closing mark right behind such a call, or at the begin of a reply, is dropped.

    Args:
        rest: makes the parser of what follows the reasoning.
        open: the prompt has opened the reasoning already.
        marks: around the reasoning.
        within: makes the parser of the reasoning, which finds calls in it.
    """

    def __init__(
        self,
        rest: Callable[[], ReplyParser],
        *,
        open: bool,
        marks: ThoughtMarks = THINK,
        within: Callable[[], ReplyParser] = PlainReply,
    ) -> None:
        self._rest, self._within, self._marks = rest(), within(), marks
        self._pending = ""
        self._spaces = ""  # at the end of the reasoning so far, which is told if more follows
        self._state = "thinking" if open else "start"
        self._begun = False  # whether any reasoning was told

    @property
    def open_call(self) -> int | None:
        """The number of the call whose end has not come; None: there is none."""
        return self._rest.open_call if isinstance(self._rest, WritesCalls) else None

    def push(self, text: str) -> list[Delta]:
        if self._state == "rest":
            return self._rest.push(text)
        if self._state in ("called", "closed"):
            return self._without_mark(self._rest.push(text))
        self._pending += text
        if self._state == "start" and not self._started():
            return []
        if self._state == "label":
            self._skip_label()
        deltas = self._think() if self._state == "thinking" else []
        if self._state == "after":
            self._pending = self._pending.lstrip(SPACES)
            if self._pending:
                self._state = "rest"
        if self._state == "rest":
            pending, self._pending = self._pending, ""
            deltas += self._rest.push(pending)
        return deltas

    def finish(self, *, cut: bool = False) -> list[Delta]:
        pending, self._pending = self._pending, ""
        if self._state == "label":
            return [] if cut else self._thought(pending)
        if self._state == "thinking":
            pending = pending[: len(pending) - begun(pending, self._marks.close)] if cut else pending
            deltas = self._thought(pending)
            if self._state == "thinking":
                return [*deltas, *self._as_thoughts(self._within.finish(cut=cut))]
            return [*deltas, *self.finish(cut=cut)]
        if self._state in ("called", "closed"):
            self._pending = pending
            deltas = self._without_mark(self._rest.finish(cut=cut))
            return deltas if cut or not self._pending else [*deltas, TextDelta(self._pending)]
        if self._state == "start" and pending and not (cut and pending.strip(SPACES)):
            return [*self._rest.push(pending), *self._rest.finish(cut=cut)]
        return self._rest.finish(cut=cut)

    def _started(self) -> bool:
        """Whether it is known if the reply begins with reasoning."""
        begin = self._pending.lstrip(SPACES)
        if any(len(begin) < len(mark) and mark.startswith(begin) for mark in (self._marks.open, self._marks.close)):
            return False
        if begin.startswith(self._marks.open):
            self._state, self._pending = "label", begin.removeprefix(self._marks.open)
        elif begin.startswith(self._marks.close):
            self._state, self._pending = "after", begin.removeprefix(self._marks.close)
        else:
            self._state = "rest"
        return True

    def _skip_label(self) -> None:
        """Leave out what names the reasoning, where that is there."""
        label = self._marks.label
        if len(self._pending) >= len(label) or not label.startswith(self._pending):
            self._state, self._pending = "thinking", self._pending.removeprefix(label)

    def _think(self) -> list[Delta]:
        thought, closed, after = self._pending.partition(self._marks.close)
        if not closed:
            thought = thought[: len(thought) - begun(thought, self._marks.close)]
        behind, self._pending = self._pending[len(thought) :], ""
        deltas = self._thought(thought)
        if self._state != "thinking":  # a call has begun
            return [*deltas, *self.push(behind)]
        if closed:
            ended = joined([*self._within.push(SENTINEL), *self._within.finish()])  # no call goes on with that
            deltas += self._as_thoughts(
                [delta._replace(text=delta.text.removesuffix(SENTINEL)) for delta in texts(ended)]
            )
            self._state = "after"
        self._pending = after if closed else behind
        return deltas

    def _thought(self, text: str) -> list[Delta]:
        """Take more of the reasoning, in which a call may begin."""
        return self._as_thoughts(self._within.push(text))

    def _as_thoughts(self, deltas: list[Delta]) -> list[Delta]:
        """What the parser of the reasoning tells, its text as reasoning up to a call."""
        result: list[Delta] = []
        for at, delta in enumerate(deltas):
            if not isinstance(delta, TextDelta):
                self._state, self._rest = "called", self._within
                return [*result, *self._without_mark(deltas[at:])]
            text = self._spaces + delta.text if self._begun else delta.text.lstrip(SPACES)
            sure = text.rstrip(SPACES)
            self._spaces = text[len(sure) :]
            self._begun = self._begun or bool(sure)
            result += [ReasoningDelta(sure)] if sure else []
        return result

    def _without_mark(self, deltas: list[Delta]) -> list[Delta]:
        """What follows a call in the reasoning, without the mark that closes the reasoning after all."""
        result: list[Delta] = []
        for delta in deltas:
            if self._state == "rest" or not isinstance(delta, TextDelta):
                result += [TextDelta(self._pending), delta] if self._pending else [delta]
                self._pending = ""
                continue
            text, mark, self._pending = self._pending + delta.text, self._marks.close, ""
            begin = text.lstrip(SPACES)
            if self._state == "called" and len(begin) < len(mark) and mark.startswith(begin):
                self._pending = text
                continue
            if self._state == "called" and begin.startswith(mark):
                self._state, begin = "closed", begin.removeprefix(mark).lstrip(SPACES)
            text = begin if self._state == "closed" else text
            if text:
                self._state = "rest"
                result.append(TextDelta(text))
        return result


def texts(deltas: Iterable[Delta]) -> list[TextDelta]:
    """Return the text among what a parser tells."""
    return [delta for delta in deltas if isinstance(delta, TextDelta)]
