"""A server over a fake engine and a tokenizer whose ids are bytes."""

import asyncio
import contextlib
import http.server
import itertools
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from types import MappingProxyType, SimpleNamespace

import httpx
import pytest
import uvicorn

from roofline.common.errors import ConfigError, RequestError
from roofline.engine.events import Event, TokenLogprob, Usage
from roofline.engine.process.messages import Ready
from roofline.engine.stats import EngineStats
from roofline.server.app import create_app
from roofline.server.context import Context
from roofline.server.keys import Keys
from roofline.server.limits import Limits
from roofline.server.models import Models
from roofline.server.protocol import BoundedProtocol
from roofline.server.record import RequestRecord
from roofline.server.routes.page import FOLDER
from roofline.text.replies.parser import PlainReply
from roofline.text.replies.reply_format import ReplyFormat
from roofline.text.streaming.stops import TextStream
from tests.browser import CHROMIUM, MISSING, Browser, Page
from tests.server.checked_stream import CheckedStream

EOS = 256
VOCAB = 300


class BytesText:
    """Ids are bytes; 256 ends a generation."""

    eos_ids = (EOS,)
    reply_format = ReplyFormat("hermes", thinks=True, takes_tools=True)
    chosen_format: ReplyFormat | None = None
    tokenizer = property(lambda self: self)
    template = SimpleNamespace(source="")  # it knows no variables

    def complete(self):
        """Nothing is left for later."""

    def encode(self, text, most=None, *, add_special=True, parse_special=False):
        return list(text.encode())

    def decode(self, ids):
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def encode_chat(self, messages, most=None, *, tools=(), variables=MappingProxyType({}), continues=False):
        if messages[-1]["role"] == "assistant" and not continues:
            raise RequestError(400, "invalid_value", "the last message must not be the assistant's", param="messages")
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return list(("".join(f"[{tool['function']['name']}]" for tool in tools) + text).encode())

    def ends_thinking(self, ids):
        return False

    def special_ids(self, contents=None):
        return frozenset([EOS] if contents is None else [])

    def token_bytes(self, token):
        return bytes([token]) if token < 256 else b""

    def stream(self, stop: Sequence[str], *, include_stop=False, min_tokens=0, reply=None, **options):
        stream = TextStream(
            BytesTokenizer(), stop, include_stop=include_stop, min_tokens=min_tokens, reply=reply, **options
        )
        compares = min_tokens == 0 and (reply is None or isinstance(reply, PlainReply))
        return CheckedStream(stream, BytesTokenizer(), stop, include_stop=include_stop, compares=compares)


class BytesTokenizer:
    """What a stream of text asks of a tokenizer."""

    special_ids = frozenset([EOS])
    strip_space = False

    def token_bytes(self, token):
        return bytes([token]) if token < 256 else b""


class FakeEngine:
    """Answers every prompt with `answer`, an id a step, and keeps books of what runs."""

    def __init__(self, answer=b"Hello, world.", delay=0.0):
        self.answer, self.delay = answer, delay
        self.up, self.error = True, None
        self.stalled_for, self.proofs = 0.0, []
        self.description = Ready("tiny", VOCAB, 1000, "feedc0de", 12, 1024, 0.1, 7, exact=False, gives_hidden=True)
        self.problem = None
        self.engines, self.restarts, self.pid, self.checked = (), 0, 7, None
        self.outstanding = 0
        self.open: set[str] = set()
        self.aborted: list[tuple[str, int | None]] = []
        self.submitted: list = []
        self.salts: list[str] = []
        self.priorities: list[int] = []
        self.steps: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    @property
    def ready(self):
        return self.up

    async def start(self):
        self.steps.append("start")
        return self.description

    async def close(self):
        self.steps.append("close")

    async def failed(self):
        await asyncio.Event().wait()

    def abort(self, request_id, index=None):
        self.aborted.append((request_id, index))
        if index is None:
            self.open.discard(request_id)

    async def load_adapter(self, path, most_bytes):
        raise ConfigError(f"{path} is no folder of an adapter")

    def trouble(self, patience):
        return "the engine has computed nothing" if self.stalled_for > patience else None

    def prove(self, seconds):
        self.proofs.append(seconds)

    def stats(self):
        drafts = {"drafts": 4, "draft_tokens": 16, "accepted_tokens": 9, "drafts_held": 5}
        return EngineStats(running=len(self.open), pages_used=3, pages_total=12, preemptions=2, **drafts)

    async def submit(self, ids, params, *, eos_ids, request_id, salt="", priority=0) -> AsyncIterator[Event]:
        self.salts.append(salt)
        self.priorities.append(priority)
        return self._events(ids, params, request_id)

    async def _events(self, ids, params, request_id):
        self.submitted.append((list(ids), params))
        self.open.add(request_id)
        try:
            await self.gate.wait()
            if params.pooling is not None:
                await asyncio.sleep(self.delay)
                yield self._vector(ids, params.pooling, request_id)
                return
            if params.max_tokens == 0:
                for index in range(params.n):
                    yield Event(request_id, index, [], finish_reason="length", usage=Usage(len(ids), 0, 0, 7))
                return
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

    def _vector(self, ids, pooling, request_id):
        """Of hidden rows: how many ids there are, and the first; of logits: how often each id stands in the prompt."""
        numbers = [len(ids), ids[0], 3.0] if pooling.hidden else [ids.count(i) for i in pooling.ids]
        if self.error is not None:
            return Event(request_id, 0, [], finish_reason="error", error=self.error)
        usage, vector = Usage(len(ids), 0, 0, 7), struct.pack(f"<{len(numbers)}f", *numbers)
        return Event(request_id, 0, [], finish_reason="stop", usage=usage, vector=vector)

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
    def make(*, api_key: str | None = None, **changes) -> Context:
        given = {
            "engine": engine,
            "text": BytesText(),
            "name": "tiny",
            "created": 1,
            "limits": limits,
            "keys": Keys(api_key),
        }
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


def protocol_of(limits: Limits, sinks: Iterable[Callable[[RequestRecord], None]] = ()) -> type[BoundedProtocol]:
    """What uvicorn reads HTTP with, within these limits. sinks: told of requests that it refuses."""
    return type("Protocol", (BoundedProtocol,), {"limits": limits, "sinks": tuple(sinks)})


class PromptServer(uvicorn.Server):
    """Looks whether it is to end, and whether its connections have, a hundred times a second instead of ten."""

    async def main_loop(self) -> None:
        ticks = itertools.count()
        while not await self.on_tick(next(ticks)):
            await asyncio.sleep(0.01)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        prompt = SimpleNamespace(**{**vars(asyncio), "sleep": lambda seconds: asyncio.sleep(seconds / 10)})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(uvicorn.server, "asyncio", prompt)
            await super().shutdown(sockets)


@contextlib.contextmanager
def serving(app, sent_bytes: int | None = None, **options) -> Iterator[str]:
    """The base address of a server of an ASGI application. sent_bytes: of the kernel's buffer for what is sent, None:
    the system's; options: of uvicorn."""
    # Without uvicorn's own handlers what goes wrong in it reaches `caplog`.
    config = uvicorn.Config(app, port=0, log_config=None, log_level="error", timeout_keep_alive=5, **options)
    server = PromptServer(config)
    listening = config.bind_socket()
    if sent_bytes is not None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sent_bytes)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        threading.Event().wait(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
    assert not thread.is_alive(), "the server did not stop"


@pytest.fixture
def live(make_context, serve_app) -> Callable[..., str]:
    """live(**context changes) -> base address of a real server on a free port of this machine.

    models_of: makes its Models of the context; sent_bytes: as of `serving`.
    """

    def start(models_of: Callable[[Context], Models] | None = None, sent_bytes: int | None = None, **changes) -> str:
        context = make_context(**changes)
        models = None if models_of is None else models_of(context)
        app = create_app(context, models=models)
        return serve_app(app, sent_bytes=sent_bytes, http=protocol_of(context.limits, app.state.record_sinks))

    return start


@pytest.fixture
def serve_app() -> Iterator:
    """serve_app(ASGI application, **options of uvicorn) -> base address of a server of it."""
    with contextlib.ExitStack() as servers:
        yield lambda app, **options: servers.enter_context(serving(app, **options))


@pytest.fixture(scope="session")
def browser(tmp_path_factory) -> Iterator[Browser]:
    """A headless Chromium for all tests of the chat page."""
    if CHROMIUM is None:
        pytest.skip(MISSING)
    running = Browser(tmp_path_factory.mktemp("profile"))
    yield running
    running.close()


@pytest.fixture
def open_page(browser, live) -> Iterator:
    """open_page(width, height, media={...}, **context changes): the chat page of a server of its own, once it knows the
    model. What goes wrong in it, such as a breach of its policy, fails the test."""
    pages: list[Page] = []

    def start(width=1200, height=800, *, address=None, media=None, wait=True, **changes) -> Page:
        page = browser.open((address or live(**changes)) + "/", width, height, **(media or {}))
        pages.append(page)
        if wait:
            page.wait("document.querySelector('#model').textContent === 'tiny'")
        return page

    yield start
    for page in pages:
        assert page.problems == []
        page.close()


@pytest.fixture(scope="session")
def module_page(browser) -> Iterator[Page]:
    """A page with the chat page's modules and no API behind it."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def translate_path(self, path):
            return str(FOLDER / path.rpartition("/")[2])

        def do_GET(self):
            if self.path != "/":
                return super().do_GET()
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            return self.wfile.write(b"<!doctype html><div id=announcer></div><div id=toasts></div>")

        def log_message(self, *_):
            """Nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    page = browser.open(f"http://127.0.0.1:{server.server_port}/")
    yield page
    page.close()
    server.shutdown()
    server.server_close()
