"""How TGI's API writes an answer: one object with details, or an event for each token.

The stop string that ended an answer is part of its text, as in TGI.
"""

from collections.abc import Sequence
from typing import ClassVar

from roofline.common.errors import RequestError
from roofline.common.json_types import JsonObject
from roofline.engine.answers import AnswerPiece
from roofline.server.answers import Answers
from roofline.server.errors import message_of
from roofline.server.response import sse
from roofline.server.routes.tgi.read import TgiGeneration

KINDS = {429: "overloaded"}


def error_body(error: RequestError) -> JsonObject:
    """An error as TGI's clients read it; its message names the field at fault."""
    kind = KINDS.get(error.status, "validation" if error.status < 500 else "generation")
    return {"error": message_of(error), "error_type": kind}


class TgiForm:
    """An AnswerForm. The texts of tokens that are not special, joined, are the generated text."""

    media_type: ClassVar[str] = "text/event-stream"

    def __init__(self, answers: Answers) -> None:
        generation = answers.generation
        assert isinstance(generation, TgiGeneration), "its own reader made it"
        self.answers, self.text, self.generation = answers, answers.context.text, generation
        (self._choice,) = answers.choices
        self._decoder = self.text.stream((), at_start=generation.at_start)  # stop strings are part of the text here
        self._special = self.text.special_ids()
        self._told: list[str] = []  # texts of the tokens that were told

    def complete(self, pieces: Sequence[AnswerPiece]) -> JsonObject:
        return {"generated_text": self._full_text(), "details": self._details() if self.generation.details else None}

    def begin(self) -> bytes:
        return b""

    def add(self, index: int, piece: AnswerPiece) -> bytes:
        ended = piece.finish_reason is not None
        first, tokens = len(self._told), self._new_tokens(ended)
        events = []
        for number, token in enumerate(tokens, first):
            event: JsonObject = {"index": number + 1, "token": token, "generated_text": None, "details": None}
            if self._wants_top:
                event["top_tokens"] = self._top(number)
            events.append(event)
        if ended and events:
            events[-1]["generated_text"] = self._full_text()
            events[-1]["details"] = {**self._end(), "input_length": self.generation.prompt_tokens}
        return b"".join(map(sse, events))

    def end(self) -> bytes:
        return b""

    def failure(self, error: RequestError) -> bytes:
        return sse(error_body(error))

    def _new_tokens(self, ended: bool) -> list[JsonObject]:
        """The tokens of the answer that were not told yet; the last of all has what is left of the text."""
        logprobs, tokens = self._choice.logprobs, []
        assert logprobs is not None, "they were asked for"
        for number in range(len(self._told), len(self._choice.ids)):
            token = self._choice.ids[number]
            special = token in self._special
            text = "" if special else self._decoder.push([token]).text
            if ended and number == len(self._choice.ids) - 1:
                rest = self._choice.text[sum(map(len, self._told)) :]
                text = rest if rest or not special else ""
            self._told.append(text)
            shown = self._spelling(token) if special and not text else text
            tokens.append({"id": token, "text": shown, "logprob": logprobs[number].logprob, "special": special})
        return tokens

    def _details(self) -> JsonObject:
        tokens = self._new_tokens(ended=True)
        top = [self._top(number) for number in range(len(tokens))] if self._wants_top else None
        return {**self._end(), "prefill": [], "tokens": tokens, "top_tokens": top, "best_of_sequences": None}

    @property
    def _wants_top(self) -> bool:
        return bool(self.generation.params.logprobs)

    def _top(self, number: int) -> list[JsonObject]:
        assert self._choice.logprobs is not None, "they were asked for"
        return [
            {"id": token, "text": self._spelling(token), "logprob": logprob, "special": token in self._special}
            for token, logprob in self._choice.logprobs[number].top
        ]

    def _spelling(self, token: int) -> str:
        return self.text.token_bytes(token).decode("utf-8", "replace")

    def _full_text(self) -> str:
        return self.generation.prefix + self._choice.text

    def _end(self) -> JsonObject:
        reason = "stop_sequence" if isinstance(self._choice.stop, str) else "eos_token"
        return {
            "finish_reason": "length" if self._choice.finish_reason == "length" else reason,
            "generated_tokens": len(self._choice.ids),
            "seed": self.generation.params.seed,
        }
