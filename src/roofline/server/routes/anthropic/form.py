"""How Anthropic's API writes an answer: a message of blocks, or the events that build one."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from roofline.common.errors import RequestError
from roofline.common.json_types import JsonObject
from roofline.engine.answers import AnswerPiece
from roofline.server.answers import Answers
from roofline.server.response import sse
from roofline.server.routes.anthropic.errors import error_body
from roofline.text.replies.parser import CallDelta, Delta, ReasoningDelta, complete_arguments


class Blocks:
    """A reply as blocks: one for each stretch of text, of thought, and for each call, in their order.

    call_id: what the ids of calls begin with.
    """

    def __init__(self, call_id: str) -> None:
        self.content: list[JsonObject] = []
        self.has_calls = False
        self._call_id = call_id
        self._open: type | int | None = None  # what the last block is of: a type of deltas, or the number of a call
        self._texts: list[str] = []  # of that block

    def add(self, deltas: Iterable[Delta]) -> list[JsonObject]:
        """Takes more of the reply; returns the events that say so."""
        events: list[JsonObject] = []
        for delta in deltas:
            key = delta.number if isinstance(delta, CallDelta) else type(delta)
            if key != self._open:
                events += self.close()
                self._open = key
                self.content.append(self._begun(delta))
                events.append(self._event("content_block_start", content_block=dict(self.content[-1])))
            text = delta.arguments if isinstance(delta, CallDelta) else delta.text
            if text:
                self._texts.append(text)
                events.append(self._event("content_block_delta", delta=_change(delta, text)))
        return events

    def close(self) -> list[JsonObject]:
        """Ends the block that is open, if one is."""
        if self._open is None:
            return []
        block, text = self.content[-1], "".join(self._texts)
        self._open, self._texts = None, []
        if block["type"] == "tool_use":
            block["input"] = complete_arguments(text)
        else:
            block[block["type"]] = text  # the field has the name of the type
        return [self._event("content_block_stop")]

    def _begun(self, delta: Delta) -> JsonObject:
        if isinstance(delta, CallDelta):
            self.has_calls = True
            return {"type": "tool_use", "id": f"{self._call_id}{delta.number}", "name": delta.name or "", "input": {}}
        if isinstance(delta, ReasoningDelta):
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "text", "text": ""}

    def _event(self, kind: str, **fields: object) -> JsonObject:
        return {"type": kind, "index": len(self.content) - 1, **fields}


def _change(delta: Delta, text: str) -> JsonObject:
    if isinstance(delta, CallDelta):
        return {"type": "input_json_delta", "partial_json": text}
    if isinstance(delta, ReasoningDelta):
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


class MessageForm:
    """An AnswerForm: in a stream, message_start, a start, deltas and a stop for each block, message_delta with why it
    ended, message_stop."""

    media_type: ClassVar[str] = "text/event-stream"

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self._blocks = Blocks(f"toolu_{answers.id[:20]}_")

    def complete(self, pieces: Sequence[AnswerPiece]) -> JsonObject:
        (piece,) = pieces
        self._events(piece)
        return {**self._message(), "content": self._blocks.content, **self._end(), "usage": self._usage()}

    def begin(self) -> bytes:
        usage = {**self._usage(), "output_tokens": 0}
        message = {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _sse({"type": "message_start", "message": message}) + _sse({"type": "ping"})

    def add(self, index: int, piece: AnswerPiece) -> bytes:
        return b"".join(map(_sse, self._events(piece)))

    def end(self) -> bytes:
        delta = {"type": "message_delta", "delta": self._end(), "usage": self._usage()}
        return _sse(delta) + _sse({"type": "message_stop"})

    def failure(self, error: RequestError) -> bytes:
        return _sse(error_body(error))

    def _events(self, piece: AnswerPiece) -> list[JsonObject]:
        events = self._blocks.add(piece.parts)
        return events if piece.finish_reason is None else events + self._blocks.close()

    def _message(self) -> JsonObject:
        generation = self.answers.generation
        return {"id": f"msg_{self.answers.id}", "type": "message", "role": "assistant", "model": generation.model}

    def _end(self) -> JsonObject:
        """Why the answer ended."""
        (choice,) = self.answers.choices
        sequence = choice.stop if isinstance(choice.stop, str) else None
        if choice.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if sequence is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
        return {"stop_reason": "tool_use" if self._blocks.has_calls else "end_turn", "stop_sequence": None}

    def _usage(self) -> JsonObject:
        """Tokens; those of the prompt that the cache had are not among input_tokens."""
        usage, cached = self.answers.usage(), self.answers.cached_tokens
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


def _sse(event: JsonObject) -> bytes:
    return sse(event, event["type"])
