"""How the Responses API writes an answer: a response, or the events that build one."""

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import ClassVar

from roofline.common.errors import RequestError
from roofline.common.json_types import JsonObject
from roofline.engine.answers import AnswerPiece
from roofline.server.answers import Answers
from roofline.server.receipts import receipt_of
from roofline.server.response import sse
from roofline.server.routes.responses.output import ResponseItems
from roofline.server.routes.responses.read import ResponseGeneration
from roofline.server.routes.responses.store import Kept, ResponseStore

FINAL = ("completed", "incomplete", "failed", "cancelled")


class ResponseForm:
    """An AnswerForm that keeps the response. In a stream: response.created and in_progress, the events of each item,
    then response.completed, incomplete or failed. Every event has a number."""

    media_type: ClassVar[str] = "text/event-stream"

    def __init__(self, answers: Answers, store: ResponseStore, owner: str) -> None:
        assert isinstance(answers.generation, ResponseGeneration), "the reader of this API made it"
        self.answers, self.generation = answers, answers.generation
        self.id = f"resp_{answers.id}"
        self.stored = self.generation.store and store.keeps
        self._store, self._owner = store, owner
        self._created = int(time.time())
        self._completed: int | None = None
        self._receipt: JsonObject | None = None
        self._output = ResponseItems(answers.id)
        self._number = 0  # of the next event

    def complete(self, pieces: Sequence[AnswerPiece]) -> JsonObject:
        for piece in pieces:
            self.take(piece)
        return self.response(self.final_status)

    def begin(self) -> bytes:
        states = ("created", "in_progress")
        return b"".join(self._sse({"type": f"response.{state}", "response": self.response()}) for state in states)

    def add(self, index: int, piece: AnswerPiece) -> bytes:
        return b"".join(map(self._sse, self.take(piece)))

    def end(self) -> bytes:
        status = self.final_status
        return self._sse({"type": f"response.{status}", "response": self.response(status)})

    def failure(self, error: RequestError) -> bytes:
        return self._sse({"type": "response.failed", "response": self.keep_failed(error)})

    async def complete_and_keep(self, pieces: Sequence[AnswerPiece]) -> JsonObject:
        for piece in pieces:
            self.take(piece)
        await self.keep()
        return self.response(self.final_status)

    async def end_and_keep(self) -> bytes:
        await self.keep()
        return self.end()

    async def keep(self) -> None:
        """Keeps the complete response; where that cannot be, the response says that it is not stored."""
        if self.stored:
            self.stored = await self._store.keep(self.record(self.response(self.final_status)))

    def take(self, piece: AnswerPiece) -> list[JsonObject]:
        """Takes more of the answer; returns the events that say so."""
        ended = piece.finish_reason is not None
        events = self._output.add(piece.parts)
        if not ended:
            return events
        self._completed = int(time.time())
        self._receipt = receipt_of(self.answers, self._created)
        return events + self._output.close("incomplete" if self.final_status == "incomplete" else "completed")

    @property
    def final_status(self) -> str:
        (choice,) = self.answers.choices
        return "incomplete" if choice.finish_reason == "length" else "completed"

    def response(self, status: str = "in_progress", error: JsonObject | None = None) -> JsonObject:
        """The response in a state; what is not known before its end is null until then."""
        ended = status in ("completed", "incomplete")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": self._completed if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.generation.model,
            "output": [dict(item) for item in self._output.items] if status in FINAL else [],
            "store": self.stored,
            "system_fingerprint": self.generation.fingerprint,
            "usage": self._usage() if ended else None,
            **self.generation.repeated,
            **({"receipt": self._receipt} if ended and self._receipt is not None else {}),
        }

    def keep_failed(self, error: RequestError | None) -> JsonObject:
        """The response of an answer that could not be completed, which is kept; None: it was cancelled."""
        self._output.close("incomplete")
        if error is None:
            response = self.response("cancelled")
        else:
            code = "rate_limit_exceeded" if error.status == 429 else "server_error"
            response = self.response("failed", {"code": code, "message": str(error)[:2048]})
        if self.stored:
            self._store.keep_soon(self.record(response))
        return response

    def record(self, response: JsonObject) -> Kept:
        """A state of the response as it is kept."""
        return Kept(self.id, self._owner, self.generation.previous, self.generation.input, response)

    def _usage(self) -> JsonObject:
        usage = self.answers.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": self.answers.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens()},
            "total_tokens": usage["total_tokens"],
        }

    def _reasoning_tokens(self) -> int:
        """Tokens of the answer up to the mark that closes its reasoning, or all where that was not reached."""
        if not self._output.thinks:
            return 0
        (choice,) = self.answers.choices
        text, ids = self.answers.context.text, choice.ids
        close = text.reply_format.thoughts.close
        return min(len(ids), bisect_left(range(len(ids)), True, key=lambda k: close in text.decode(ids[: k + 1])) + 1)

    def _sse(self, event: JsonObject) -> bytes:
        numbered = {"type": event["type"], "sequence_number": self._number, **event}
        self._number += 1
        return sse(numbered, event["type"])
