"""What all generating routes share: read the body, then answer with one object or a stream, in the form of the API."""

import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import ClassVar, Protocol, TypeVar, runtime_checkable

from fastapi import Request, Response

from roofline.common.errors import RequestError
from roofline.common.json_types import JsonObject
from roofline.engine.answers import AnswerPiece
from roofline.engine.events import PromptProgress
from roofline.server import context
from roofline.server.answers import ACCEPTED, Answers
from roofline.server.context import Context
from roofline.server.generation import Generation
from roofline.server.reading import BodyReading
from roofline.server.record import record_of
from roofline.server.response import CancelledWithClient

TIMEOUT = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
# Larger bodies take milliseconds to parse and encode: on a thread, so that open streams go on meanwhile.
INLINE_BYTES = 16 << 10
INLINE_VECTORS = 1 << 10  # of many short texts, each of which may become a conversation


class AnswerForm(Protocol):
    """How an API writes the answers to one request: as one object, or as a stream of bytes."""

    media_type: ClassVar[str]  # of a stream

    def complete(self, pieces: Sequence[AnswerPiece]) -> JsonObject:
        """The object of all choices, each of which is a single piece."""

    def begin(self) -> bytes:
        """What a stream says before its first token, as soon as the engine has the request; may be empty."""

    def add(self, index: int, piece: AnswerPiece) -> bytes:
        """What a piece of a choice adds to a stream; may be empty."""

    def end(self) -> bytes:
        """What a stream ends with when all choices are complete."""

    def failure(self, error: RequestError) -> bytes:
        """What a stream ends with when an answer cannot be completed."""


@runtime_checkable
class ShowsProgress(Protocol):
    """An AnswerForm of an API in whose streams requests can ask for the progress of their prompts."""

    def progress(self, index: int, progress: PromptProgress) -> bytes:
        """What a stream says of a choice whose prompt is so far."""


@runtime_checkable
class KeepsAnswers(Protocol):
    """An AnswerForm of an API whose answers can be asked for again."""

    async def complete_and_keep(self, pieces: Sequence[AnswerPiece]) -> JsonObject:
        """As `complete`, once the answer is kept."""

    async def end_and_keep(self) -> bytes:
        """As `end`, once the answer is kept."""


ReadBody = Callable[[bytes, Context], Generation]
Result = TypeVar("Result")


async def respond(request: Request, read: ReadBody, make_form: Callable[[Answers], AnswerForm]) -> Response:
    """The response to a generation request. Raises RequestError for anything that cannot be honoured."""
    generation = await on_thread_if_large(request, await request.body(), read)
    return respond_to(request, generation, make_form)


async def respond_with_vectors(
    request: Request, read: ReadBody, make: Callable[[Answers, list[bytes]], JsonObject]
) -> Response:
    """As `respond`, for requests with a Pooling, which are never streamed. make: of the vectors of all prompts, the
    object; what it raises is the answer too."""
    raw = await request.body()
    more = INLINE_BYTES if len(raw) > INLINE_VECTORS else 0
    answers = answers_to(request, await on_thread_if_large(request, raw, read, more))

    async def content() -> JsonObject:
        await answers.complete()
        vectors = [choice.vector for choice in answers.choices]
        assert None not in vectors, "an answer without one has failed"
        return make(answers, [vector for vector in vectors if vector is not None])

    return CancelledWithClient(request, content=content)


def respond_to(request: Request, generation: Generation, make_form: Callable[[Answers], AnswerForm]) -> Response:
    """The response to a request that was read. Raises RequestError."""
    answers = answers_to(request, generation)
    form = make_form(answers)
    if not answers.generation.stream:

        async def content() -> JsonObject:
            pieces = await answers.complete()
            return await form.complete_and_keep(pieces) if isinstance(form, KeepsAnswers) else form.complete(pieces)

        return CancelledWithClient(request, content=content)
    return CancelledWithClient(
        request,
        chunks=lambda: _chunks(answers, form),
        failure=form.failure,
        media_type=form.media_type,
        ping_seconds=answers.context.ping_seconds,
    )


def answers_to(request: Request, generation: Generation) -> Answers:
    """The answers to a request that was read, before anything of them is computed. Raises RequestError."""
    server = context.of(request)
    timeout = _timeout(request.headers.get("x-request-timeout"))
    if generation.prompt_tokens > server.limits.prompt_tokens:
        sizes = f"have {generation.prompt_tokens} tokens together, and may have {server.limits.prompt_tokens}"
        raise RequestError(400, "prompts_too_large", f"The prompts {sizes}.", param="prompt")
    answers = Answers(server, generation, request.app.state.queue, context.principal_of(request), timeout)
    record_of(request).answers = answers
    return answers


def _timeout(text: str | None) -> float | None:
    """The seconds that a client gives its request. Raises RequestError for what is no time."""
    if text is None:
        return None
    if not TIMEOUT.fullmatch(text) or float(text) == 0:
        raise RequestError(400, "invalid_header", "X-Request-Timeout is not a number of seconds above 0.")
    return float(text)


async def on_thread_if_large(
    request: Request, raw: bytes, read: Callable[[bytes, Context], Result], more_bytes: int = 0
) -> Result:
    """What `read` makes of a body, without holding up open streams. Raises as `read` does, and
    Overloaded.

    more_bytes: that are read beside the body.
    """
    server, size = context.of(request), len(raw) + more_bytes
    if size <= INLINE_BYTES:
        return read(raw, server)
    reading: BodyReading = request.app.state.reading
    return await reading.read(context.principal_of(request), size, partial(read, raw, server))


async def _chunks(answers: Answers, form: AnswerForm) -> AsyncIterator[bytes]:
    begun = False
    async with aclosing(answers.pieces()) as pieces:
        async for event in pieces:
            if not begun:
                begun = True
                yield form.begin()  # status and headers need not wait for the first token
            index, piece = event
            if isinstance(piece, PromptProgress):
                yield form.progress(index, piece) if isinstance(form, ShowsProgress) else b""
            elif event is not ACCEPTED:
                yield form.add(index, piece)
    yield await form.end_and_keep() if isinstance(form, KeepsAnswers) else form.end()
