"""POST /v1/chat/completions"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from fastapi import APIRouter, Request, Response

from roofline.common.json_types import JsonObject
from roofline.engine.answers import AnswerPiece
from roofline.engine.events import TokenLogprob
from roofline.server.answers import Answers
from roofline.server.conversation import call_id
from roofline.server.logprobs import token_logprobs
from roofline.server.respond import respond
from roofline.server.routes.openai import read
from roofline.server.routes.openai.form import OpenAIForm
from roofline.server.routes.openai.schema import ChatBody
from roofline.server.scopes import USE, needs
from roofline.text.replies.parser import CallDelta, Delta, ReasoningDelta, Reply, TextDelta

router = APIRouter()


@router.post("/v1/chat/completions")
@needs(USE, ChatBody)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation. Body and answer are OpenAI's, with the extensions of `openai.schema.Sampling`."""
    return await respond(request, read.chat, ChatForm)


class ChatForm(OpenAIForm):
    """OpenAI's chat completions; in a stream the role comes first and the finish reason last."""

    id_prefix, object_name, event_object_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, answers: Answers) -> None:
        super().__init__(answers)
        self._begun: set[int] = set()  # the choices of a stream that have begun
        self._callers: set[int] = set()  # those of them that have called a tool

    def complete(self, pieces: Sequence[AnswerPiece]) -> JsonObject:
        answer = super().complete(pieces)
        if self.answers.generation.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self.prompt_logprobs(0)
        return answer

    def choice(self, index: int, piece: AnswerPiece) -> JsonObject:
        reply = Reply()
        reply.add(piece.parts)
        message: JsonObject = {"role": "assistant", "content": reply.text, "refusal": None}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["content"] = reply.text or None
            message["tool_calls"] = [
                {"id": self._call_id(index, number), "type": "function", "function": asdict(call)}
                for number, call in enumerate(reply.calls)
            ]
        reason = "tool_calls" if reply.calls and piece.finish_reason == "stop" else piece.finish_reason
        logprobs = self._logprobs(piece.logprobs)
        return {"index": index, "finish_reason": reason, "message": message, "logprobs": logprobs}

    def deltas(self, index: int, piece: AnswerPiece) -> Iterator[JsonObject]:
        def event(delta: JsonObject, finish_reason: str | None = None, logprobs: object = None) -> JsonObject:
            return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

        if index not in self._begun:
            self._begun.add(index)
            yield event({"role": "assistant", "content": ""})
        logprobs = self._logprobs(piece.logprobs)
        if not piece.parts and piece.logprobs:
            yield event({"content": ""}, logprobs=logprobs)
        for part in piece.parts:
            yield event(self._delta(index, part), logprobs=logprobs)
            logprobs = None  # those of a piece stand with its first part
        if piece.finish_reason is not None:
            called = index in self._callers and piece.finish_reason == "stop"
            yield event({}, "tool_calls" if called else piece.finish_reason)

    def _delta(self, index: int, part: Delta) -> JsonObject:
        if isinstance(part, TextDelta):
            return {"content": part.text}
        if isinstance(part, ReasoningDelta):
            return {"reasoning_content": part.text}
        assert isinstance(part, CallDelta), "there is no fourth kind"
        call: JsonObject = {"index": part.number, "function": {"arguments": part.arguments}}
        if part.name is not None:
            self._callers.add(index)
            function = {"name": part.name, "arguments": part.arguments}
            call |= {"id": self._call_id(index, part.number), "type": "function", "function": function}
        return {"tool_calls": [call]}

    def _call_id(self, index: int, number: int) -> str:
        return call_id(self.answers.id, index, number)

    def _logprobs(self, tokens: Iterable[TokenLogprob]) -> JsonObject | None:
        if not self.with_logprobs:
            return None
        return {"content": token_logprobs(self.text, tokens), "refusal": None}
