"""uvicorn's HTTP/1.1 reader with a bound on what may be held before the headers are complete, and on how long."""

import asyncio
from http import HTTPStatus

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from roofline.common.errors import RequestError
from roofline.server.errors import error_body
from roofline.server.limits import Limits


class BoundedProtocol(HttpToolsProtocol):
    """Closes a connection whose request line and headers grow or wait beyond the limits.

    The parser collects a header until its end arrives, so an endless one must be counted here, in raw bytes.
    """

    limits = Limits()
    _pending = 0  # raw bytes since the last complete headers
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        self._pending += len(data)
        super().data_received(data)
        if self._pending > self.limits.header_bytes + 64 and not self.transport.is_closing():
            self._refuse(431, "headers_too_large", f"The headers are larger than {self.limits.header_bytes} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait()

    def on_headers_complete(self) -> None:
        self._pending = 0
        self._stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._pending = 0
        super().on_body(body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(self.limits.read_seconds, self._expire)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        if not self.transport.is_closing():
            self._refuse(408, "request_timeout", f"No request came within {self.limits.read_seconds:g} seconds.")

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "invalid_http", "This is not a request of HTTP/1.1.")

    def _refuse(self, status: int, code: str, message: str) -> None:
        body = msgspec.json.encode(error_body(RequestError(status, code, message)))
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()
