"""POST /v1/completions"""

from collections.abc import Iterator, Sequence

from fastapi import APIRouter, Request, Response

from roofline.common.json_types import JsonObject
from roofline.engine.answers import Piece
from roofline.engine.events import TokenLogprob
from roofline.server.answers import Answers
from roofline.server.respond import respond
from roofline.server.routes.openai import read
from roofline.server.routes.openai.form import OpenAIForm
from roofline.server.routes.openai.schema import CompletionBody
from roofline.server.scopes import USE, needs

router = APIRouter()


@router.post("/v1/completions")
@needs(USE, CompletionBody)
async def completions(request: Request) -> Response:
    """Continue one or several prompts, given as text or as token ids; special tokens in text are plain text."""
    return await respond(request, read.completion, CompletionForm)


class CompletionForm(OpenAIForm):
    """OpenAI's older completions; their events have the same form as the whole."""

    id_prefix, object_name, event_object_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, answers: Answers) -> None:
        super().__init__(answers)
        self._echoed: set[int] = set()
        self._offsets: dict[int, int] = {}  # characters that each choice has sent in tokens

    def choice(self, index: int, piece: Piece) -> JsonObject:
        generation = self.answers.generation
        logprobs: Sequence[TokenLogprob | None] = piece.logprobs
        if generation.echoes_logprobs and index not in self._echoed:
            logprobs = [*self.answers.prompt_logprobs(self._prompt_of(index)), *logprobs]
        choice: JsonObject = {
            "index": index,
            "finish_reason": piece.finish_reason,
            "text": self._echo(index) + piece.text,
            "logprobs": self._logprobs(index, logprobs) if self.with_logprobs else None,
        }
        if generation.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self.prompt_logprobs(self._prompt_of(index))
        return choice

    def deltas(self, index: int, piece: Piece) -> Iterator[JsonObject]:
        yield self.choice(index, piece)

    def _echo(self, index: int) -> str:
        """The text of the prompt, once, where the request wants it."""
        generation = self.answers.generation
        if not generation.echo or index in self._echoed:
            return ""
        self._echoed.add(index)
        return generation.echo[self._prompt_of(index)]

    def _prompt_of(self, index: int) -> int:
        """Which prompt a choice answers."""
        generation = self.answers.generation
        return index // (generation.best or generation.params.n)

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob | None]) -> JsonObject:
        """OpenAI's older form: parallel lists; offsets count characters of the tokens as text. None stands for the
        first token of an echoed prompt."""
        first = self.answers.generation.prompts[self._prompt_of(index)][0]
        texts = [self.token_text(first if token is None else token.id) for token in tokens]
        offsets = []
        offset = self._offsets.get(index, 0)
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        return {
            "tokens": texts,
            "token_logprobs": [None if token is None else token.logprob for token in tokens],
            "top_logprobs": [None if token is None else self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        """The most likely tokens by their text. Of a prompt more may have been computed, for `prompt_logprobs`."""
        most = self.answers.generation.params.logprobs
        return {self.token_text(i): logprob for i, logprob in token.top[:most]}
