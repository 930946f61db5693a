"""What both generation routes do first: read the body, validate it, open the answers."""

import asyncio
from collections.abc import Callable

from fastapi import Request

from roofline.server import context
from roofline.server.answers import Answers
from roofline.server.context import Context
from roofline.server.validate import Generation

# Larger bodies take milliseconds to parse and encode: on a thread, so that open streams go on meanwhile.
INLINE_BYTES = 16 << 10


async def open_answers(request: Request, validate: Callable[[bytes, Context], Generation]) -> Answers:
    """Raises RequestError on anything that cannot be honoured."""
    served = context.of(request)
    raw = await request.body()
    if len(raw) <= INLINE_BYTES:
        generation = validate(raw, served)
    else:
        generation = await asyncio.to_thread(validate, raw, served)
    return Answers(served, generation, request.app.state.queue)
