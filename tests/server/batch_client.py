"""Lines of requests, and a client of a server that has batches over a fake engine."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import openai

from roofline.server.app import create_app

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def line(custom_id: str, url: str = TEXT, **changes) -> dict:
    body = {"model": "tiny", "prompt": "Hi", "temperature": 0, "max_tokens": 100}
    if url == CHAT:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    if url == RESPONSES:
        body = {"model": "tiny", "input": "Hi"}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**body, **changes}}


def jsonl(*lines: dict) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


async def until(check, seconds=60.0):
    async with asyncio.timeout(seconds):
        while not check():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def serve(make_context, folder, key="none", **changes):
    """(application, client of OpenAI's for it) with its batches in `folder`, until the block ends as a server does."""
    app = create_app(make_context(batch_folder=folder, **changes))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60)
    async with client, app.router.lifespan_context(app):
        url = "http://127.0.0.1/v1"
        yield app, openai.AsyncOpenAI(api_key=key, base_url=url, http_client=client, max_retries=0)


def stop_at(engine, count: int) -> None:
    """The engine computes no request from the one with this number on, until its gate opens."""

    class Submitted(list):
        def append(self, each):
            super().append(each)
            if len(self) == count:
                engine.gate.clear()

    engine.submitted = Submitted()


async def ended(client, batch):
    async with asyncio.timeout(60):
        while batch.status not in ("completed", "failed", "cancelled", "expired"):
            await asyncio.sleep(0.005)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def lines_of(client, file_id) -> dict[str, dict]:
    content = await client.files.content(file_id)
    return {each["custom_id"]: each for each in map(json.loads, content.text.splitlines())}


async def create(client, *lines, endpoint=TEXT, **options):
    file = await client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options)
