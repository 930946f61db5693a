"""Responses: one JSON object, or a stream of server-sent events. Both end at once when the client disconnects."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from roofline.common.errors import RequestError
from roofline.common.json_types import JsonObject
from roofline.server.errors import as_request_error

PING = b": ping\n\n"
# Line ends to Python's readers of lines and to JavaScript's parsers before 2019, though not to JSON.
SEPARATORS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def json_line(content: JsonObject) -> bytes:
    """JSON that is one line to every reader of lines, without its end."""
    return one_line(msgspec.json.encode(content))


def one_line(encoded: bytes) -> bytes:
    """JSON without characters that some readers take for the end of a line: they are escaped."""
    for separator, escape in SEPARATORS:
        encoded = encoded.replace(separator, escape)
    return encoded


def sse(content: JsonObject, event: str | None = None) -> bytes:
    """One server-sent event; `event`: its type, where the API names types."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + json_line(content) + b"\n\n"


def json_response(content: JsonObject) -> Response:
    """200 with a JSON object."""
    return Response(msgspec.json.encode(content), media_type="application/json")


class CancelledWithClient(Response):
    """Sends what `content` returns, or what `chunks` yields; a client that disconnects cancels the work on it.

    The status line of a stream waits for its first chunk, which may be empty: a request that is refused before gets a
    real status, and one that is taken has its headers before its first token.

    Args:
        failure: the last bytes of a stream that cannot be completed.
        media_type: of a stream.
        ping_seconds: of silence in a stream of events, before it says that it is there; 0: never.
    """

    def __init__(
        self,
        request: Request,
        content: Callable[[], Awaitable[JsonObject]] | None = None,
        chunks: Callable[[], AsyncIterator[bytes]] | None = None,
        failure: Callable[[RequestError], bytes] = lambda error: b"",
        media_type: str = "text/event-stream",
        ping_seconds: float = 0.0,
    ) -> None:
        super().__init__()
        assert (content is None) != (chunks is None)
        self._request, self._content, self._chunks, self._failure = request, content, chunks, failure
        is_events = media_type == "text/event-stream"  # other streams have no comments
        self._ping_seconds = ping_seconds if is_events else 0.0
        self._stream_headers = [(b"content-type", f"{media_type}; charset=utf-8".encode()), *STREAM_HEADERS]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_all = self._send_content(scope, receive, send) if self._content else self._send_chunks(send)
        work = asyncio.create_task(send_all)
        disconnect = asyncio.create_task(_disconnect(self._request))
        try:
            await asyncio.wait({work, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (work, disconnect):
                task.cancel()
            # The work's own clean-up (the abort) must be over before this request is.
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await work

    async def _send_content(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._content is not None
        await json_response(await self._content())(scope, receive, send)

    async def _send_chunks(self, send: Send) -> None:
        assert self._chunks is not None
        started = False
        chunks = self._chunks()
        stream = KeptAlive(send, self._ping_seconds)
        try:
            async for chunk in chunks:
                if not started:
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": self._stream_headers})
                await stream.send(chunk)
        except Exception as error:
            if not started:
                raise
            await stream.send(self._failure(as_request_error(error)))
        finally:
            stream.stop()
            with contextlib.suppress(RuntimeError):
                await chunks.aclose()  # type: ignore[attr-defined]
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class KeptAlive:
    """A stream that says `: ping` whenever it was silent for so many seconds: proxies cut what is silent for a minute,
    and clients skip comments. Use it around all that is sent after the headers; chunks must be complete events.

    seconds: 0: never.
    """

    def __init__(self, send: Send, seconds: float) -> None:
        self._send, self._seconds = send, seconds
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()
        self._pinging: asyncio.Task[None] | None = None

    async def send(self, chunk: bytes) -> None:
        """Send a part of the stream."""
        if self._pinging is None and self._seconds:
            self._pinging = asyncio.create_task(self._ping())
        self._sent_at = self._loop.time()
        if chunk:
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    def stop(self) -> None:
        """No ping comes after this."""
        if self._pinging is not None:
            self._pinging.cancel()

    async def _ping(self) -> None:
        while True:
            silent = self._loop.time() - self._sent_at
            if silent >= self._seconds:
                await self.send(PING)
            else:
                await asyncio.sleep(self._seconds - silent)


STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
