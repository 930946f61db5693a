"""A server over a fake engine and a tokenizer whose ids are bytes."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from types import SimpleNamespace

import httpx
import pytest
import uvicorn

from roofline.common.errors import RequestError
from roofline.engine.events import Event, TokenLogprob, Usage
from roofline.engine.process.messages import Ready
from roofline.engine.stats import EngineStats
from roofline.server.app import create_app
from roofline.server.context import Context
from roofline.server.limits import Limits
from roofline.server.protocol import BoundedProtocol

EOS = 256
VOCAB = 300


class BytesText:
    """Ids are bytes; 256 ends a generation. Stop strings are looked for in whole text, naively."""

    eos_ids = (EOS,)

    def encode(self, text):
        return list(text.encode())

    def encode_chat(self, messages):
        if messages[-1]["role"] == "assistant":
            raise RequestError(400, "invalid_value", "the last message must not be the assistant's", param="messages")
        return list("".join(f"<{m['role']}>{m['content']}" for m in messages).encode())

    def token_bytes(self, token):
        return bytes([token]) if token < 256 else b""

    def stream(self, stop: Sequence[str], *, at_start: bool):
        return BytesStream(stop)


class BytesStream:
    def __init__(self, stop):
        self.stop, self.held, self.sent, self.stopped = stop, b"", 0, None

    def push(self, ids):
        for used, token in enumerate(ids, 1):
            self.held += bytes([token])
            text = self.held.decode("utf-8", "ignore")
            for stop in self.stop:
                if stop in text:
                    new, self.sent, self.stopped = text[self.sent : text.index(stop)], len(text), stop
                    return SimpleNamespace(text=new, stopped=stop, used=used)
        text = self.held.decode("utf-8", "ignore")
        safe = len(text) - (max(map(len, self.stop), default=1) - 1)
        new, self.sent = text[self.sent : max(safe, self.sent)], max(safe, self.sent)
        return SimpleNamespace(text=new, stopped=None, used=len(ids))

    def finish(self):
        text = self.held.decode("utf-8", "replace")
        new, self.sent = text[self.sent :], len(text)
        return new


class FakeEngine:
    """Answers every prompt with `answer`, an id a step, and keeps books of what runs."""

    def __init__(self, answer=b"Hello, world.", delay=0.0):
        self.answer, self.delay = answer, delay
        self.up, self.error = True, None
        self.description = Ready("tiny", VOCAB, 1000, "feedc0de", 12, 1024, 0.1, 7, exact=False)
        self.engines, self.restarts, self.pid = (), 0, 7
        self.open: set[str] = set()
        self.aborted: list[tuple[str, int | None]] = []
        self.submitted: list = []
        self.gate = asyncio.Event()
        self.gate.set()

    @property
    def ready(self):
        return self.up

    def abort(self, request_id, index=None):
        self.aborted.append((request_id, index))
        if index is None:
            self.open.discard(request_id)

    def stats(self):
        drafts = {"drafts": 4, "draft_tokens": 16, "accepted_tokens": 9, "drafts_held": 5}
        return EngineStats(running=len(self.open), pages_used=3, pages_total=12, preemptions=2, **drafts)

    async def submit(self, ids, params, *, eos_ids, request_id) -> AsyncIterator[Event]:
        return self._events(ids, params, request_id)

    async def _events(self, ids, params, request_id):
        self.submitted.append((list(ids), params))
        self.open.add(request_id)
        try:
            await self.gate.wait()
            limit = params.max_tokens or 1000
            for step in range(len(self.answer) + 1):
                await asyncio.sleep(self.delay)
                if request_id not in self.open:
                    return
                for index in range(params.n):
                    if self.error is not None and step == 2:
                        yield Event(request_id, index, [], finish_reason="error", error=self.error)
                        return
                    yield self._event(request_id, index, step, limit, params, len(ids))
                if step + 1 >= limit:
                    return
        finally:
            self.open.discard(request_id)

    def _event(self, request_id, index, step, limit, params, prompt):
        ended = step == len(self.answer)
        token = EOS if ended else self.answer[step]
        reason = "stop" if ended else "length" if step + 1 >= limit else None
        top = tuple((i, -1.0 - i) for i in range(params.logprobs or 0))
        logprobs = [TokenLogprob(token, -0.5, top)] if params.logprobs is not None else None
        usage = Usage(prompt, step + 1, 0, 7) if reason else None
        return Event(request_id, index, [token], logprobs, reason, EOS if ended else None, None, usage)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def limits() -> Limits:
    return Limits(read_seconds=1.0)


@pytest.fixture
def make_context(engine, limits):
    def make(**changes) -> Context:
        given = {"engine": engine, "text": BytesText(), "name": "tiny", "created": 1, "limits": limits}
        return Context(**{**given, **changes})

    return make


@pytest.fixture
def call(make_context):
    """call(method, path, **httpx arguments) -> response, through the whole application in this process."""

    def run(method, path, *, context=None, base="http://127.0.0.1", **kwargs):
        async def once():
            transport = httpx.ASGITransport(create_app(context or make_context()), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url=base) as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(once())

    return run


@pytest.fixture
def live(make_context) -> Iterator:
    """live(**context changes) -> base address of a real server on a free port of this machine."""
    servers = []

    def start(**changes) -> str:
        context = make_context(**changes)

        class Protocol(BoundedProtocol):
            limits = context.limits

        config = uvicorn.Config(create_app(context), port=0, http=Protocol, log_level="error", timeout_keep_alive=5)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        servers.append((server, thread))
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            threading.Event().wait(0.01)
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    yield start
    for server, thread in servers:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive(), "the server did not stop"
