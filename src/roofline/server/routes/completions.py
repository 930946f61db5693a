"""POST /v1/completions"""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request

from roofline.engine.events import TokenLogprob
from roofline.server import context, validate
from roofline.server.answers import Answers
from roofline.server.facade import TextSide
from roofline.server.reply import DONE, Answer, sse
from roofline.server.routes.body import open_answers

router = APIRouter()


@router.post("/v1/completions")
async def completions(request: Request) -> Answer:
    """Continue one or several prompts, given as text or as token ids; special tokens in text are plain text."""
    answers = await open_answers(request, validate.completion)
    text = context.of(request).text
    if answers.generation.stream:
        return Answer(request, chunks=lambda: _chunks(answers, text))
    return Answer(request, whole=lambda: _whole(answers, text))


async def _whole(answers: Answers, text: TextSide) -> dict[str, Any]:
    wanted = answers.generation.params.logprobs is not None
    choices = [
        {
            "index": piece.choice,
            "finish_reason": piece.finish,
            "text": piece.text,
            "logprobs": _logprobs(piece.logprobs, text, 0) if wanted else None,
        }
        for piece in await answers.whole()
    ]
    return {**_head(answers), "choices": choices, "usage": answers.counts.usage()}


async def _chunks(answers: Answers, text: TextSide) -> AsyncIterator[bytes]:
    head = _head(answers)
    wanted = answers.generation.params.logprobs is not None
    include_usage = answers.generation.include_usage
    offsets: dict[int, int] = {}  # characters that each choice has sent in tokens
    async for piece in answers.pieces():
        logprobs = None
        if wanted:
            logprobs = _logprobs(piece.logprobs, text, offsets.get(piece.choice, 0))
            offsets[piece.choice] = offsets.get(piece.choice, 0) + sum(len(token) for token in logprobs["tokens"])
        choice = {"index": piece.choice, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}
        yield sse({**head, "choices": [choice], **({"usage": None} if include_usage else {})})
    if include_usage:
        yield sse({**head, "choices": [], "usage": answers.counts.usage()})
    yield DONE


def _head(answers: Answers) -> dict[str, Any]:
    return {
        "id": f"cmpl-{answers.id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": answers.generation.model,
        "system_fingerprint": answers.generation.fingerprint,
    }


def _logprobs(found: Sequence[TokenLogprob], text: TextSide, offset: int) -> dict[str, list]:
    """OpenAI's older form: parallel lists; offsets count characters of the tokens as shown."""

    def shown(token: int) -> str:
        return text.token_bytes(token).decode("utf-8", "replace")

    lists: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in found:
        name = shown(token.id)
        lists["tokens"].append(name)
        lists["token_logprobs"].append(token.logprob)
        lists["top_logprobs"].append({shown(i): logprob for i, logprob in token.top})
        lists["text_offset"].append(offset)
        offset += len(name)
    return lists
