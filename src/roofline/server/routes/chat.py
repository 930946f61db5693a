"""POST /v1/chat/completions"""

from collections.abc import Iterable, Iterator

from fastapi import APIRouter, Request, Response

from roofline.common.json_types import JsonObject
from roofline.engine.answers import Piece
from roofline.engine.events import TokenLogprob
from roofline.server import validate
from roofline.server.routes.generation import respond
from roofline.server.text_side import TextSide

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Answer a conversation. Body and answer are OpenAI's, with the extensions of `schema.Sampling`."""
    return await respond(request, validate.chat, ChatForm)


class ChatForm:
    """OpenAI's chat completions; in a stream the role comes first and the finish reason last."""

    id_prefix, object_name, event_object_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, text: TextSide, logprobs: bool) -> None:
        self._text, self._with_logprobs = text, logprobs
        self._begun: set[int] = set()

    def choice(self, index: int, piece: Piece) -> JsonObject:
        return {
            "index": index,
            "finish_reason": piece.finish_reason,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._logprobs(piece.logprobs),
        }

    def deltas(self, index: int, piece: Piece) -> Iterator[JsonObject]:
        def delta(content: JsonObject, finish_reason: str | None = None, logprobs: object = None) -> JsonObject:
            return {"index": index, "delta": content, "logprobs": logprobs, "finish_reason": finish_reason}

        if index not in self._begun:
            self._begun.add(index)
            yield delta({"role": "assistant", "content": ""})
        if piece.text or piece.logprobs:
            yield delta({"content": piece.text}, logprobs=self._logprobs(piece.logprobs))
        if piece.finish_reason is not None:
            yield delta({}, piece.finish_reason)

    def _logprobs(self, tokens: Iterable[TokenLogprob]) -> JsonObject | None:
        if not self._with_logprobs:
            return None

        def entry(token: int, logprob: float) -> JsonObject:
            raw = self._text.token_bytes(token)
            return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

        content = [
            {**entry(token.id, token.logprob), "top_logprobs": [entry(i, logprob) for i, logprob in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}
