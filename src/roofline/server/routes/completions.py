"""POST /v1/completions"""

from collections.abc import Iterator, Sequence

from fastapi import APIRouter, Request, Response

from roofline.common.json_types import JsonObject
from roofline.engine.answers import Piece
from roofline.engine.events import TokenLogprob
from roofline.server import validate
from roofline.server.routes.generation import respond
from roofline.server.text_side import TextSide

router = APIRouter()


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Continue one or several prompts, given as text or as token ids; special tokens in text are plain text."""
    return await respond(request, validate.completion, CompletionForm)


class CompletionForm:
    """OpenAI's older completions; their events have the same form as the whole."""

    id_prefix, object_name, event_object_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, text: TextSide, logprobs: bool) -> None:
        self._text, self._with_logprobs = text, logprobs
        self._offsets: dict[int, int] = {}  # characters that each choice has sent in tokens

    def choice(self, index: int, piece: Piece) -> JsonObject:
        return {
            "index": index,
            "finish_reason": piece.finish_reason,
            "text": piece.text,
            "logprobs": self._logprobs(index, piece.logprobs) if self._with_logprobs else None,
        }

    def deltas(self, index: int, piece: Piece) -> Iterator[JsonObject]:
        yield self.choice(index, piece)

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> JsonObject:
        """OpenAI's older form: parallel lists; offsets count characters of the tokens as text."""
        texts = [self._token_text(token.id) for token in tokens]
        offsets = []
        offset = self._offsets.get(index, 0)
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{self._token_text(i): logprob for i, logprob in token.top} for token in tokens],
            "text_offset": offsets,
        }

    def _token_text(self, token: int) -> str:
        return self._text.token_bytes(token).decode("utf-8", "replace")
