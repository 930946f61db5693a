"""What both generation routes share: read and validate the body, then answer with one object or a stream of events."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from typing import Protocol

from fastapi import Request, Response

from roofline.common.json_types import JsonObject
from roofline.engine.answers import Piece
from roofline.server import context
from roofline.server.answers import Answers
from roofline.server.context import Context
from roofline.server.response import DONE, CancelledWithClient, sse
from roofline.server.text_side import TextSide
from roofline.server.validate import Generation

# Larger bodies take milliseconds to parse and encode: on a thread, so that open streams go on meanwhile.
INLINE_BYTES = 16 << 10


class AnswerForm(Protocol):
    """How a route writes the choices of one request."""

    id_prefix: str
    object_name: str
    event_object_name: str  # in the events of a stream

    def choice(self, index: int, piece: Piece) -> JsonObject:
        """A complete choice."""

    def deltas(self, index: int, piece: Piece) -> Iterable[JsonObject]:
        """What a piece adds to a choice: each becomes an event of the stream."""


async def respond(
    request: Request,
    validate: Callable[[bytes, Context], Generation],
    make_form: Callable[[TextSide, bool], AnswerForm],
) -> Response:
    """The response to a generation request. Raises RequestError for anything that cannot be honoured.

    make_form: (text, whether log-probabilities were asked for) -> the form of this request's answers.
    """
    server = context.of(request)
    raw = await request.body()
    if len(raw) <= INLINE_BYTES:
        generation = validate(raw, server)
    else:
        generation = await asyncio.to_thread(validate, raw, server)
    answers = Answers(server, generation, request.app.state.queue)
    form = make_form(server.text, generation.params.logprobs is not None)
    if generation.stream:
        return CancelledWithClient(request, chunks=lambda: _events(answers, form))
    return CancelledWithClient(request, content=lambda: _object(answers, form))


async def _object(answers: Answers, form: AnswerForm) -> JsonObject:
    choices = [form.choice(index, piece) for index, piece in enumerate(await answers.complete())]
    return {**_head(answers, form, form.object_name), "choices": choices, "usage": answers.usage()}


async def _events(answers: Answers, form: AnswerForm) -> AsyncIterator[bytes]:
    head = _head(answers, form, form.event_object_name)
    include_usage = answers.generation.include_usage
    tail = {"usage": None} if include_usage else {}
    async with aclosing(answers.pieces()) as pieces:
        async for index, piece in pieces:
            for delta in form.deltas(index, piece):
                yield sse({**head, "choices": [delta], **tail})
    if include_usage:
        yield sse({**head, "choices": [], "usage": answers.usage()})
    yield DONE


def _head(answers: Answers, form: AnswerForm, object_name: str) -> JsonObject:
    return {
        "id": f"{form.id_prefix}-{answers.id}",
        "object": object_name,
        "created": int(time.time()),
        "model": answers.generation.model,
        "system_fingerprint": answers.generation.fingerprint,
    }
