"""Reasoning between <think> and </think> at the beginning of a reply, which some templates open in the prompt."""

from roofline.text.replies.begun_reply import WritesCalls
from roofline.text.replies.json_scanner import SPACES
from roofline.text.replies.parser import Delta, ReasoningDelta, ReplyParser, begun

OPEN, CLOSE = "<think>", "</think>"


class ThinkingReply:
    """Tells reasoning apart, and passes the rest of a reply on. White space around the reasoning is dropped.

    Args:
        rest: parses what follows the reasoning.
        open: the prompt has opened the reasoning already.
    """

    def __init__(self, rest: ReplyParser, *, open: bool) -> None:
        self._rest = rest
        self._pending = ""
        self._state = "thinking" if open else "start"
        self._begun = False  # whether any reasoning was told

    @property
    def open_call(self) -> int | None:
        """The number of the call whose end has not come; None: there is none."""
        return self._rest.open_call if isinstance(self._rest, WritesCalls) else None

    def push(self, text: str) -> list[Delta]:
        if self._state == "rest":
            return self._rest.push(text)
        self._pending += text
        if self._state == "start" and not self._started():
            return []
        deltas: list[Delta] = []
        if self._state == "thinking":
            deltas = self._think()
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
        if self._state == "thinking":
            pending = pending[: len(pending) - begun(pending, CLOSE)] if cut else pending
            text = pending.strip(SPACES) if not self._begun else pending.rstrip(SPACES)
            return [ReasoningDelta(text)] if text else []
        if self._state == "start" and pending and not (cut and pending.strip(SPACES)):
            return [*self._rest.push(pending), *self._rest.finish(cut=cut)]
        return self._rest.finish(cut=cut)

    def _started(self) -> bool:
        """Whether it is known if the reply begins with reasoning."""
        begin = self._pending.lstrip(SPACES)
        if len(begin) < len(OPEN) and OPEN.startswith(begin):
            return False
        if begin.startswith(OPEN):
            self._state, self._pending = "thinking", begin.removeprefix(OPEN)
        else:
            self._state = "rest"
        return True

    def _think(self) -> list[Delta]:
        if not self._begun:
            self._pending = self._pending.lstrip(SPACES)
        thought, closed, after = self._pending.partition(CLOSE)
        if closed:
            self._state, self._pending = "after", after
        else:
            thought = thought[: len(thought) - begun(thought, CLOSE)]
        text = thought.rstrip(SPACES)
        if not closed:
            self._pending = self._pending[len(text) :]
        self._begun = self._begun or bool(text)
        return [ReasoningDelta(text)] if text else []
