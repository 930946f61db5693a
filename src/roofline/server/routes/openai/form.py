"""What OpenAI's two forms of answers share: the head of every object, server-sent events, the usage at the end."""

import time
from collections.abc import Iterable, Sequence
from typing import ClassVar

from roofline.common.errors import RequestError
from roofline.common.json_types import JsonObject
from roofline.engine.answers import AnswerPiece
from roofline.engine.events import PromptProgress
from roofline.server.answers import Answers
from roofline.server.errors import error_body
from roofline.server.receipts import receipt_of
from roofline.server.response import sse

DONE = b"data: [DONE]\n\n"


class OpenAIForm:
    """An AnswerForm; what a choice looks like is the subclass's."""

    media_type: ClassVar[str] = "text/event-stream"
    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    event_object_name: ClassVar[str]  # in the events of a stream

    def __init__(self, answers: Answers) -> None:
        self.answers, self.text = answers, answers.context.text
        generation = answers.generation
        self.with_logprobs = generation.params.logprobs is not None and not generation.hides_logprobs
        self._created = int(time.time())
        self._usage = generation.usage
        self._told: dict[int, int] = {}  # ids of each choice that its events have told

    def choice(self, index: int, piece: AnswerPiece) -> JsonObject:
        """A complete choice."""
        raise NotImplementedError

    def deltas(self, index: int, piece: AnswerPiece) -> Iterable[JsonObject]:
        """What a piece adds to a choice: each becomes an event of the stream."""
        raise NotImplementedError

    def complete(self, pieces: Sequence[AnswerPiece]) -> JsonObject:
        told = enumerate(self._best(pieces))
        choices = [self.choice(index, pieces[at]) | self.ids_of(at, pieces[at]) for index, at in told]
        receipt = receipt_of(self.answers, self._created)
        tail = {} if receipt is None else {"receipt": receipt}
        return {**self._head(self.object_name), "choices": choices, "usage": self.answers.usage(), **tail}

    def begin(self) -> bytes:
        return b""

    def add(self, index: int, piece: AnswerPiece) -> bytes:
        head = self._head(self.event_object_name)
        tail: JsonObject = (
            {} if self._usage == "none" else {"usage": self.answers.usage() if self._usage == "every" else None}
        )
        events = []
        for number, delta in enumerate(self.deltas(index, piece)):
            ids = self.ids_of(index, piece) if number == 0 else {}
            events.append(sse({**head, "choices": [delta | ids], **tail}))
        return b"".join(events)

    def progress(self, index: int, progress: PromptProgress) -> bytes:
        """llama.cpp's `prompt_progress`, with the choice that it is of."""
        of = {"index": index, "total": progress.total, "cache": progress.cached, "processed": progress.processed}
        of["time_ms"] = round(progress.seconds * 1000)
        tail: JsonObject = {} if self._usage == "none" else {"usage": None}
        return sse({**self._head(self.event_object_name), "choices": [], "prompt_progress": of, **tail})

    def end(self) -> bytes:
        head: JsonObject = {**self._head(self.event_object_name), "choices": []}
        usage = b"" if self._usage == "none" else sse({**head, "usage": self.answers.usage()})
        receipt = receipt_of(self.answers, self._created)
        return usage + (b"" if receipt is None else sse({**head, "receipt": receipt})) + DONE

    def failure(self, error: RequestError) -> bytes:
        return sse(error_body(error)) + DONE

    def ids_of(self, index: int, piece: AnswerPiece) -> JsonObject:
        """The ids that a piece brings, where the request wants them, and before the first those of the prompt."""
        generation, told = self.answers.generation, self._told.get(index, 0)
        if not generation.with_ids or not (piece.tokens or piece.finish_reason):
            return {}
        ids = self.answers.choices[index].ids[told:]  # also those of steps whose text was kept back
        self._told[index] = told + len(ids)
        prompt = generation.prompts[index // generation.params.n]
        return {"token_ids": ids} | ({"prompt_token_ids": list(prompt)} if told == 0 else {})

    def prompt_logprobs(self, prompt: int) -> list[JsonObject | None]:
        """vLLM's form: of each token of a prompt it and its alternatives by id. A token that is not among those has no
        rank, and the first, which nothing stands before, has nothing."""
        told: list[JsonObject | None] = []
        for token in self.answers.prompt_logprobs(prompt):
            if token is None:
                told.append(None)
                continue
            top = token.top[: self.answers.generation.prompt_logprobs]
            entries = {token.id: self._ranked(token.id, token.logprob, None)}
            entries |= {i: self._ranked(i, logprob, rank) for rank, (i, logprob) in enumerate(top, 1)}
            told.append({str(i): entry for i, entry in entries.items()})
        return told

    def _ranked(self, token: int, logprob: float, rank: int | None) -> JsonObject:
        return {"logprob": logprob, "rank": rank, "decoded_token": self.token_text(token)}

    def token_text(self, token: int) -> str:
        """The characters of a token by itself."""
        return self.text.token_bytes(token).decode("utf-8", "replace")

    def _best(self, pieces: Sequence[AnswerPiece]) -> list[int]:
        """Which of the computed choices are told: all, or of each prompt those whose tokens are the likeliest."""
        best, n = self.answers.generation.best, self.answers.generation.params.n
        if best is None:
            return list(range(len(pieces)))

        def mean(index: int) -> float:
            logprobs = [token.logprob for token in pieces[index].logprobs]
            return sum(logprobs) / len(logprobs) if logprobs else 0.0

        firsts = range(0, len(pieces), n)
        return [at for first in firsts for at in sorted(range(first, first + n), key=mean, reverse=True)[:best]]

    def _head(self, object_name: str) -> JsonObject:
        return {
            "id": f"{self.id_prefix}-{self.answers.id}",
            "object": object_name,
            "created": self._created,
            "model": self.answers.generation.model,
            "system_fingerprint": self.answers.generation.fingerprint,
        }
