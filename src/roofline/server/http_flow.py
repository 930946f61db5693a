"""In which order and form the answers of a connection leave, and how far its client may run ahead of them."""

import asyncio

from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MOST_AHEAD = 16 << 10  # bytes that are read while a request waits for the answer before it


class OrderedFlow(FlowControl):
    """Reads little more while requests that came behind another one wait: a client is not let run ahead of its answers.

    Something is read, as only a socket that is read tells that its client has closed it.
    """

    def __init__(self, transport: asyncio.Transport, protocol: HttpToolsProtocol) -> None:
        super().__init__(transport)
        self._protocol, self._ahead = protocol, 0

    def note_ahead(self, size: int) -> None:
        """Count bytes that arrived while requests wait; with too many nothing more is read."""
        self._ahead += size
        if self._ahead > MOST_AHEAD:
            super().pause_reading()

    def pause_reading(self) -> None:
        cycle = self._protocol.cycle
        if len(cycle.body) > HIGH_WATER_LIMIT or self._ahead > MOST_AHEAD:  # else for a request that waits
            super().pause_reading()

    def resume_reading(self) -> None:
        if not self._protocol.pipeline:
            self._ahead = 0
            super().resume_reading()


class Unchunked:
    """An application whose answers have no transfer coding: HTTP/1.0 has none. The connection's end is the answer's,
    but for one that tells its length to a client that asked to keep the connection (RFC 9112, 9.3)."""

    def __init__(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._cycle, self._app = cycle, app

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        cycle = self._cycle
        open_ended = False

        async def plain(message: ASGISendEvent) -> None:
            nonlocal open_ended
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", []))
                open_ended = b"content-length" not in dict(headers)
                cycle.chunked_encoding = False if open_ended else None
                cycle.keep_alive = cycle.keep_alive and not open_ended
                if cycle.keep_alive:  # the client expects it to be said
                    message = {**message, "headers": [*headers, (b"connection", b"keep-alive")]}
            elif open_ended and message["type"] == "http.response.body":
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, plain)
