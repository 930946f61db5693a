"""POST /v1/chat/completions"""

import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

from fastapi import APIRouter, Request

from roofline.engine.events import TokenLogprob
from roofline.server import context, validate
from roofline.server.answers import Answers
from roofline.server.facade import TextSide
from roofline.server.reply import DONE, Answer, sse
from roofline.server.routes.body import open_answers

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Answer:
    """Answer a conversation. Body and answer are OpenAI's, with the extensions of `schema.Sampling`."""
    answers = await open_answers(request, validate.chat)
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
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": {"content": _logprobs(piece.logprobs, text), "refusal": None} if wanted else None,
        }
        for piece in await answers.whole()
    ]
    return {**_head(answers, "chat.completion"), "choices": choices, "usage": answers.counts.usage()}


async def _chunks(answers: Answers, text: TextSide) -> AsyncIterator[bytes]:
    head = _head(answers, "chat.completion.chunk")
    wanted = answers.generation.params.logprobs is not None
    include_usage = answers.generation.include_usage

    def chunk(index: int, delta: dict, finish: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return sse({**head, "choices": [choice], **({"usage": None} if include_usage else {})})

    begun: set[int] = set()
    async for piece in answers.pieces():
        if piece.choice not in begun:
            begun.add(piece.choice)
            yield chunk(piece.choice, {"role": "assistant", "content": ""})
        if piece.text or piece.logprobs:
            logprobs = {"content": _logprobs(piece.logprobs, text), "refusal": None} if wanted else None
            yield chunk(piece.choice, {"content": piece.text}, logprobs=logprobs)
        if piece.finish is not None:
            yield chunk(piece.choice, {}, piece.finish)
    if include_usage:
        yield sse({**head, "choices": [], "usage": answers.counts.usage()})
    yield DONE


def _head(answers: Answers, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answers.id}",
        "object": kind,
        "created": int(time.time()),
        "model": answers.generation.model,
        "system_fingerprint": answers.generation.fingerprint,
    }


def _logprobs(found: Iterable[TokenLogprob], text: TextSide) -> list[dict[str, Any]]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = text.token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

    return [
        {**entry(token.id, token.logprob), "top_logprobs": [entry(i, logprob) for i, logprob in token.top]}
        for token in found
    ]
