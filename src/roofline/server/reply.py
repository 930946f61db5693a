"""How answers leave: one JSON object, or a stream of server-sent events. Both notice at once when the client goes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from roofline.common.errors import RequestError
from roofline.server.errors import LOG, as_request_error, error_body

DONE = b"data: [DONE]\n\n"


def sse(chunk: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def json_response(content: Any) -> Response:
    """200 with a JSON object."""
    return Response(msgspec.json.encode(content), media_type="application/json")


class Answer(Response):
    """Runs `whole`, or iterates `chunks`, while listening for the client's disconnect; that cancels the work.

    The status line of a stream waits for its first chunk, so that a request that fails before it gets a real status.
    """

    def __init__(
        self,
        request: Request,
        whole: Callable[[], Awaitable[Any]] | None = None,
        chunks: Callable[[], AsyncIterator[bytes]] | None = None,
    ) -> None:
        super().__init__()
        assert (whole is None) != (chunks is None)
        self._request, self._whole, self._chunks = request, whole, chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._send_whole(scope, receive, send) if self._whole else self._send_chunks(send))
        gone = asyncio.create_task(_disconnected(self._request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (work, gone):
                task.cancel()
            # The work's own clean-up (the abort) must be over before this request is.
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await work

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._whole is not None
        content = await self._whole()
        await json_response(content)(scope, receive, send)

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
            known = as_request_error(error)
            if known is None:
                LOG.exception("unexpected error in the middle of a stream", exc_info=error)
                known = RequestError(500, "internal_error", "The server made a mistake; its log has the cause.")
            failed = error_body(known.status, known.code, str(known), known.param)
            await send({"type": "http.response.body", "body": sse(failed) + DONE, "more_body": True})
        finally:
            with contextlib.suppress(RuntimeError):
                await chunks.aclose()  # type: ignore[attr-defined]
        await send({"type": "http.response.body", "body": b"", "more_body": False})


STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
