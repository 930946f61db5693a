"""How the generate extension writes an answer."""

from collections.abc import Sequence
from typing import ClassVar

from roofline.common.errors import RequestError
from roofline.common.json_types import JsonObject
from roofline.engine.answers import AnswerPiece
from roofline.server.answers import Answers
from roofline.server.errors import message_of
from roofline.server.response import sse
from roofline.server.routes.triton.read import TritonGeneration


def error_body(error: RequestError) -> JsonObject:
    """An error as Triton's clients read it; its message names the field at fault."""
    return {"error": message_of(error)}


class TritonForm:
    """An AnswerForm: an object, or an event for each piece of text."""

    media_type: ClassVar[str] = "text/event-stream"

    def __init__(self, answers: Answers) -> None:
        assert isinstance(answers.generation, TritonGeneration), "its own reader made it"
        self.generation = answers.generation

    def complete(self, pieces: Sequence[AnswerPiece]) -> JsonObject:
        (piece,) = pieces
        return self._output(self.generation.prefix + piece.text)

    def begin(self) -> bytes:
        return b""

    def add(self, index: int, piece: AnswerPiece) -> bytes:
        return sse(self._output(piece.text)) if piece.text else b""

    def end(self) -> bytes:
        return b""

    def failure(self, error: RequestError) -> bytes:
        return sse(error_body(error))

    def _output(self, text: str) -> JsonObject:
        named = {} if self.generation.id is None else {"id": self.generation.id}
        return {**named, "model_name": self.generation.model, "model_version": "1", "text_output": text}
