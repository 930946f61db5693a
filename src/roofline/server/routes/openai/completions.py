"""POST /v1/completions"""

from codecs import getincrementaldecoder
from collections.abc import Collection, Iterator, Sequence

from fastapi import APIRouter, Request, Response

from roofline.common.json_types import JsonObject
from roofline.engine.answers import AnswerPiece
from roofline.engine.events import TokenLogprob
from roofline.server.answers import Answers
from roofline.server.respond import respond
from roofline.server.routes.openai import read
from roofline.server.routes.openai.form import OpenAIForm
from roofline.server.routes.openai.schema import CompletionBody
from roofline.server.scopes import USE, needs
from roofline.server.text_side import TextSide

router = APIRouter()


@router.post("/v1/completions")
@needs(USE, CompletionBody)
async def completions(request: Request) -> Response:
    """Continue one or several prompts, given as text or as token ids; special tokens in text are plain text
    unless it has `parse_special`."""
    return await respond(request, read.completion, CompletionForm)


class CompletionForm(OpenAIForm):
    """OpenAI's older completions; their events have the same form as the whole."""

    id_prefix, object_name, event_object_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, answers: Answers) -> None:
        super().__init__(answers)
        self._echoed: set[int] = set()
        self._places: dict[int, TokenPlaces] = {}  # of the tokens of each choice

    def choice(self, index: int, piece: AnswerPiece) -> JsonObject:
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

    def deltas(self, index: int, piece: AnswerPiece) -> Iterator[JsonObject]:
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
        """OpenAI's older form: parallel lists. None stands for the first token of an echoed prompt."""
        generation = self.answers.generation
        first = generation.prompts[self._prompt_of(index)][0]
        ids = [first if token is None else token.id for token in tokens]
        if index not in self._places:
            echoed = generation.echo[self._prompt_of(index)] if generation.echo else ""
            self._places[index] = TokenPlaces(self.text, echoed, generation.shown)
        return {
            "tokens": [self._spelled(token) for token in ids],
            "token_logprobs": [None if token is None else token.logprob for token in tokens],
            "top_logprobs": [None if token is None else self._top(token) for token in tokens],
            "text_offset": [self._places[index].add(token) for token in ids],
        }

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        """The most likely tokens by their text. Of a prompt more may have been computed, for `prompt_logprobs`.

        Of tokens with one text the one that was taken has it, else the likeliest; the others have their ids.
        """
        own_name, names = self._spelled(token.id), dict[str, float]()
        for i, logprob in token.top[: self.answers.generation.params.logprobs]:
            name = self._spelled(i)
            is_used = name in names or (name == own_name and i != token.id)
            names[f"token_id:{i}" if is_used else name] = logprob
        return names

    def _spelled(self, token: int) -> str:
        """The text of a token; of one that is no whole characters its bytes, as OpenAI has them."""
        raw = self.text.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class TokenPlaces:
    """Where in a choice's text, in characters, each of its tokens begins; several may be one character.

    echoed: the prompt's text, where the choice's begins with that; visible: special tokens that are text.
    """

    def __init__(self, text: TextSide, echoed: str, visible: Collection[int]) -> None:
        self._text, self._echoed, self._visible = text, echoed, visible
        self._special = text.special_ids()
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def add(self, token: int) -> int:
        """The place of the next token."""
        begin, piece = self._at, self._decoder.decode(self._text.token_bytes(token))
        if begin < len(self._echoed):
            # A BOS, and the space that SentencePiece puts first, are not in the text that the client sent.
            texts = (piece, piece.removeprefix(" "), "" if token in self._special else piece)
            piece = next((text for text in texts if self._echoed.startswith(text, begin)), piece)
        elif token in self._special and token not in self._visible:
            piece = ""
        self._at += len(piece)
        return begin
