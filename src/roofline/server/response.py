"""Responses: one JSON object, or a stream of server-sent events. Both end at once when the client disconnects."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from roofline.common.json_types import JsonObject
from roofline.server.errors import as_request_error, error_body

DONE = b"data: [DONE]\n\n"


def sse(content: JsonObject) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def json_response(content: JsonObject) -> Response:
    """200 with a JSON object."""
    return Response(msgspec.json.encode(content), media_type="application/json")


class CancelledWithClient(Response):
    """Sends what `content` returns, or what `chunks` yields; a client that disconnects cancels the work on it.

    The status line of a stream waits for its first chunk, so that a request that fails before it gets a real status.
    """

    def __init__(
        self,
        request: Request,
        content: Callable[[], Awaitable[JsonObject]] | None = None,
        chunks: Callable[[], AsyncIterator[bytes]] | None = None,
    ) -> None:
        super().__init__()
        assert (content is None) != (chunks is None)
        self._request, self._content, self._chunks = request, content, chunks

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
        try:
            async for chunk in chunks:
                if not started:
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            if not started:
                raise
            failure = sse(error_body(as_request_error(error))) + DONE
            await send({"type": "http.response.body", "body": failure, "more_body": True})
        finally:
            with contextlib.suppress(RuntimeError):
                await chunks.aclose()  # type: ignore[attr-defined]
        await send({"type": "http.response.body", "body": b"", "more_body": False})


STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
