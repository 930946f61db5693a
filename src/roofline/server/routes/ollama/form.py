"""How Ollama's API writes an answer: one object, or a line of JSON for each piece and one for the end."""

import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import ClassVar

from roofline.common.errors import RequestError
from roofline.common.json_types import JsonObject
from roofline.engine.answers import AnswerPiece
from roofline.engine.events import TokenLogprob
from roofline.server.answers import Answers
from roofline.server.errors import message_of
from roofline.server.logprobs import token_logprobs
from roofline.server.response import json_line
from roofline.text.replies.parser import (
    CallDelta,
    Delta,
    Reply,
    TextDelta,
    ToolCall,
    complete_arguments,
)


def error_body(error: RequestError) -> JsonObject:
    """An error as Ollama's clients read it; its message names the field at fault."""
    return {"error": message_of(error)}


class OllamaForm:
    """An AnswerForm; where the answer stands in an object is the subclass's."""

    media_type: ClassVar[str] = "application/x-ndjson"

    def __init__(self, answers: Answers) -> None:
        self.answers, self.text = answers, answers.context.text
        self._call: ToolCall | None = None  # that is being written: calls are told when they are complete

    def part(self, text: str, thinking: str, calls: Sequence[ToolCall]) -> JsonObject:
        """The fields of an answer, or of more of it."""
        raise NotImplementedError

    def complete(self, pieces: Sequence[AnswerPiece]) -> JsonObject:
        (piece,) = pieces
        reply = Reply()
        reply.add(piece.parts)
        part = self.part(reply.text, reply.reasoning, reply.calls)
        return {**self._head(), **part, **self._logprobs(piece.logprobs), **self._tail()}

    def begin(self) -> bytes:
        return b""

    def add(self, index: int, piece: AnswerPiece) -> bytes:
        parts = [part for delta in piece.parts for part in self._parts(delta)]
        if piece.finish_reason is not None:
            parts += self._ended_call()
        if not parts and piece.logprobs:
            parts = [self.part("", "", ())]
        lines = []
        for number, part in enumerate(parts):  # the log-probabilities of a piece stand with its first part
            logprobs = self._logprobs(piece.logprobs) if number == 0 else {}
            lines.append(_line({**self._head(), **part, **logprobs, "done": False}))
        return b"".join(lines)

    def end(self) -> bytes:
        return _line({**self._head(), **self.part("", "", ()), **self._tail()})

    def failure(self, error: RequestError) -> bytes:
        return _line(error_body(error))

    def _parts(self, delta: Delta) -> Iterable[JsonObject]:
        if isinstance(delta, CallDelta):
            if delta.name is not None:
                yield from self._ended_call()
                self._call = ToolCall(delta.name)
            assert self._call is not None, "the first of a call has its name"
            self._call.arguments += delta.arguments
            return
        yield from self._ended_call()
        yield self.part(delta.text, "", ()) if isinstance(delta, TextDelta) else self.part("", delta.text, ())

    def _ended_call(self) -> list[JsonObject]:
        call, self._call = self._call, None
        return [] if call is None else [self.part("", "", [call])]

    def _head(self) -> JsonObject:
        return {"model": self.answers.generation.model, "created_at": timestamp(time.time())}

    def _tail(self) -> JsonObject:
        """Why the answer ended, counts, and times in nanoseconds since the request arrived."""
        usage, answers = self.answers.usage(), self.answers
        total = time.monotonic() - answers.arrived
        first = total if answers.first_token_seconds is None else answers.first_token_seconds
        return {
            "done": True,
            "done_reason": answers.choices[0].finish_reason,
            "total_duration": _nanoseconds(total),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(first),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _nanoseconds(total - first),
        }

    def _logprobs(self, tokens: Iterable[TokenLogprob]) -> JsonObject:
        if self.answers.generation.params.logprobs is None:
            return {}
        return {"logprobs": token_logprobs(self.text, tokens)}


class OllamaChatForm(OllamaForm):
    """Answers of /api/chat."""

    def part(self, text: str, thinking: str, calls: Sequence[ToolCall]) -> JsonObject:
        message: JsonObject = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": complete_arguments(call.arguments)}} for call in calls
            ]
        return {"message": message}


class GenerateForm(OllamaForm):
    """Answers of /api/generate, which call no tools."""

    def part(self, text: str, thinking: str, calls: Sequence[ToolCall]) -> JsonObject:
        return {"response": text, **({"thinking": thinking} if thinking else {})}


def timestamp(seconds: float) -> str:
    """A time since 1970 as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _line(content: JsonObject) -> bytes:
    return json_line(content) + b"\n"


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
