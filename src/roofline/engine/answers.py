"""Answers from the engine's events: text, stop strings, log-probabilities and what is billed, built in one place.

`LLM` and `roofline.torch` build theirs with `local_answers.LocalAnswers`, the server with `server.answers.Answers`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roofline.common.errors import RooflineError
from roofline.engine.events import Event, FinishReason, TokenLogprob, Usage

if TYPE_CHECKING:
    from roofline.text.streaming.stops import TextStream


@dataclass(frozen=True)
class Answer:
    """One answer. `stop` is the stop string or id that ended it; `error` says why, when finish_reason is "error"."""

    text: str
    ids: list[int]
    finish_reason: FinishReason
    stop: str | int | None
    logprobs: list[TokenLogprob] | None
    usage: Usage
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """What an event adds to an answer: text, how many ids are billed, the log-probabilities of those that are text.

    The piece with a `finish_reason` is the last.
    """

    text: str
    tokens: int = 0
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: FinishReason | None = None


class AnswerBuilder:
    """Builds one answer from its events. Ids after a stop string are dropped and not billed.

    An answer that a stop string ended is complete before the engine has finished with it: while `running`, the caller
    should abort it there. The engine's last event brings the usage.

    Args:
        text: turns the ids into text and finds the stop strings; None: the answer has ids alone.
        logprobs: whether the request asked for log-probabilities.
    """

    def __init__(self, text: "TextStream | None", logprobs: bool) -> None:
        self.ids: list[int] = []  # all that are billed
        self.logprobs: list[TokenLogprob] | None = [] if logprobs else None  # of `ids`
        self.finish_reason: FinishReason | None = None
        self.stop: str | int | None = None
        self.running = True  # whether the engine computes it still
        self._text, self._pieces, self._read = text, list[str](), 0
        self._last: Event | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    def read(self) -> str:
        """The text since the last call."""
        text = "".join(self._pieces[self._read :])
        self._read = len(self._pieces)
        return text

    def push(self, event: Event) -> Piece:
        """Take an event of this answer and return what it adds."""
        if event.finish_reason is not None:
            self.running, self._last = False, event
        if self.finish_reason is not None:
            return Piece("")
        words = event.ids if event.stop_id is None else event.ids[:-1]  # an id that ends the answer is not text
        text, used = "", len(event.ids)
        if self._text is not None:
            delta = self._text.push(words)
            text = delta.text
            if delta.stopped is not None:
                used = delta.used
            elif event.finish_reason is not None:
                text += self._text.finish()  # the last half of a character may complete a stop string
        stopped = self._text.stopped if self._text is not None else None
        if event.finish_reason == "error" or stopped is None:
            self.finish_reason, self.stop = event.finish_reason, event.stop_id
        else:
            self.finish_reason, self.stop = "stop", stopped
        self.ids += event.ids[:used]
        self._pieces.append(text)
        logprobs = event.logprobs[:used] if event.logprobs else []
        if self.logprobs is not None:
            self.logprobs += logprobs
        return Piece(text, used, logprobs[: len(words)], self.finish_reason)

    def result(self) -> Answer:
        """The finished answer. Raises RooflineError when the engine failed on it."""
        last = self._last
        assert last is not None, "the engine's last event has not come"
        assert self.finish_reason is not None, "the last event says why"
        if self.finish_reason == "error":
            raise RooflineError(f"the engine failed on this request: {last.error}")
        assert last.usage is not None, "the last event has the usage"
        usage = last.usage._replace(completion_tokens=len(self.ids))
        return Answer(self.text, self.ids, self.finish_reason, self.stop, self.logprobs, usage, last.error)
