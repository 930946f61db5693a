"""A connection to a server: HTTP/1.1 as bytes, kept alive, with a moment for everything that happens."""

import asyncio
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

import httptools

from roofline.bench.load.answer_stream import MOST_ERROR, AnswerStream
from roofline.bench.load.events import RequestEvents
from roofline.common.addresses import why_unreachable

Clock = Callable[[], int]  # nanoseconds since the run began


class Address:
    """Where requests go. url: of the API; path: below it, such as /completions."""

    def __init__(self, url: str, path: str, key: str | None = None) -> None:
        parts = urlsplit(url)
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if self.tls else 80)
        authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        self._head = (
            f"POST {parts.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\n"
            f"Content-Type: application/json\r\nAccept: text/event-stream\r\n{authorization}Content-Length: "
        ).encode()

    def message(self, body: bytes) -> bytes:
        """A request with that body, as it is sent."""
        return b"%s%d\r\n\r\n%s" % (self._head, len(body), body)


class Lost(Exception):
    """The server closed a connection before it answered on it."""


class Connection(asyncio.Protocol):
    """Sends one request after the other; opens itself anew where the server has closed it."""

    def __init__(self, address: Address, clock: Clock) -> None:
        self._address, self._clock = address, clock
        self._transport: asyncio.WriteTransport | None = None
        self._record: RequestEvents | None = None
        self._stream: AnswerStream | None = None
        self._refusal = b""
        self._is_framed = False  # whether the answer's head says where it ends; else it is where the connection ends
        self._done: asyncio.Future[None] | None = None
        self._moment = 0

    async def send(self, body: bytes, record: RequestEvents, timeout: float) -> str:
        """Send a request, put what happens into its record, and return the answer's text. What fails is told by the
        record's `error`; nothing is raised but asyncio's CancelledError."""
        message = self._address.message(body)
        text = ""
        try:
            async with asyncio.timeout(timeout):
                for is_last_try in (self._transport is None, True):
                    try:
                        text = await self._exchange(message, record)
                        break
                    except Lost:  # of a connection that was idle: the server may close it as we write
                        if is_last_try:
                            raise
        except TimeoutError:
            record.error = f"no complete answer within {timeout:g} s"
        except Lost:
            record.error = "the server closed the connection without an answer"
        except OSError as error:
            record.error = f"no connection: {why_unreachable(error)}"
        except asyncio.CancelledError:
            self.close()
            raise
        if record.error is not None:
            record.end = self._clock()
            self.close()
        return text

    async def _exchange(self, message: bytes, record: RequestEvents) -> str:
        loop = asyncio.get_running_loop()
        if self._transport is None:
            address = self._address
            await loop.create_connection(lambda: self, address.host, address.port, ssl=address.tls)
            record.connected = self._clock()
        assert self._transport is not None, "connection_made has been called"
        self._record, self._stream, self._refusal = record, AnswerStream(record), b""
        self._is_framed = False
        self._parser = httptools.HttpResponseParser(self)
        self._done = loop.create_future()
        self._transport.write(message)
        record.sent = self._clock()
        try:
            await self._done
        finally:
            self._done = None
        return self._stream.text

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports derive from none of asyncio's

    def data_received(self, data: bytes) -> None:
        self._moment = self._clock()
        if self._done is None:
            self.close()  # nothing was asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the answer is no HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        done, record = self._done, self._record
        if done is None or done.done() or record is None:
            return
        if record.headers is None:
            done.set_exception(Lost())
        elif self._is_framed:
            self._fail("the server closed the connection in the middle of the answer")
        elif record.status == 200 and not (self._stream is not None and self._stream.complete):
            self._fail("the server closed the connection before [DONE]")
        else:
            self._moment = self._clock()
            self.on_message_complete()

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        is_chunked = name == b"transfer-encoding" and value.lower().endswith(b"chunked")
        self._is_framed = self._is_framed or is_chunked or name == b"content-length"

    def on_headers_complete(self) -> None:
        assert self._record is not None, "parsing begins with a request"
        self._record.headers = self._moment
        self._record.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        assert self._record is not None, "parsing begins with a request"
        assert self._stream is not None, "which has a stream"
        if self._record.status == 200:
            self._stream.feed(body, self._moment)
        elif len(self._refusal) < MOST_ERROR:
            self._refusal += body

    def on_message_complete(self) -> None:
        record, stream = self._record, self._stream
        assert record is not None, "parsing begins with a request"
        assert stream is not None, "which has a stream"
        record.end = self._moment
        if record.status != 200:
            refusal = " ".join(self._refusal.decode("utf-8", "replace")[:MOST_ERROR].split())
            refusal = "a page of HTML, as no LLM server answers" if refusal[:1] == "<" else refusal
            record.error = f"status {record.status}: {refusal}"
        elif not stream.complete and record.error is None:
            record.error = "the answer is no stream that ends with [DONE]"
        if not self._parser.should_keep_alive():
            self.close()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, cause: str) -> None:
        assert self._record is not None
        self._record.error = self._record.error or cause
        if self._done is not None and not self._done.done():
            self._done.set_result(None)
