"""A server of a small model, asked once for an answer with its receipt."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from roofline.backends.options import LoadOptions
from roofline.bundle import load
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.process.thread import engine_in_thread
from roofline.server.app import create_app
from roofline.server.context import Context
from roofline.server.text_side import TextSide
from roofline.text.replies.reply_format import reply_format


def path_of(body: dict[str, Any]) -> str:
    """Where a body is sent."""
    return "/v1/responses" if "input" in body else "/v1/chat/completions" if "messages" in body else "/v1/completions"


def ask_server(
    model: Path,
    *bodies: dict[str, Any],
    adapter: str | None = None,
    calls: str | None = None,
    thinks: bool | None = None,
    ranks: int = 1,
) -> list[dict[str, Any]]:
    """The answers of a server that computes in chunks of 7 tokens and with guesses. adapter: served under "own"; calls,
    thinks: which formats the server was told, as by --tool-call-parser and --reasoning-parser; ranks: of the model."""
    places = 0 if adapter is None else 2
    config = EngineConfig(max_batch_tokens=7, speculate="ngram", speculate_always=True, max_adapters=places)
    options = LoadOptions(cache_tokens=512, threads=ranks, max_adapters=places, tensor_parallel=ranks)
    loaded = load(str(model), config.prepare_load(options))

    async def ask() -> list[httpx.Response]:
        engine = engine_in_thread("small", LocalEngine(loaded.executable, config))
        await engine.start()
        assert loaded.tokenizer is not None
        assert loaded.chat_template is not None
        text = TextSide(loaded.tokenizer, loaded.chat_template, partial(reply_format, calls=calls, thinks=thinks))
        context = Context(engine, text, "small", 1)
        if adapter is not None:
            await context.adapters.load("own", adapter)
        transport = httpx.ASGITransport(create_app(context))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            responses = [await client.post(path_of(body), json=body, timeout=60) for body in bodies]
        await engine.close()
        return responses

    responses = asyncio.run(ask())
    if ranks > 1:
        loaded.executable.close()  # what this process computes next may have ranks too
    for response in responses:
        assert response.status_code == 200, response.text
    return [response.json() for response in responses]
