"""uvicorn's HTTP/1.1 reader, held to RFC 9112: what has two readings is refused, what is read or sent is bounded.

    idle ──first byte──> head ──end of the headers──> body ──end of the message──> idle

Of a connection's requests one is answered at a time, in order. What is wrong with a request that comes behind one that
is being answered is told when that answer has ended: nothing is ever written into an answer.
"""

import asyncio
import math
import re
import socket
import struct
from contextlib import suppress
from typing import Literal

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from roofline.common.errors import RequestError
from roofline.server.framing import ChunkedFraming
from roofline.server.half_closed import abort_when_gone
from roofline.server.http_flow import OrderedFlow, Unchunked
from roofline.server.limits import Limits
from roofline.server.lingering import MOST_BYTES, MOST_OTHER_BYTES, LingeringTransport
from roofline.server.record import RecordSink, request_id
from roofline.server.refusals import mark, record_unseen, refusal, unknown_version, unreadable

VERSIONS = ("1.0", "1.1")
PREFACE = b"PRI * HTTP/2.0"  # how a connection of HTTP/2 begins
HEAD_END = b"\r\n\r\n"
_ABSOLUTE = re.compile(rb"([^/?]*)://([^/?]*)")  # a target with scheme and host, as it is sent to proxies


class BoundedProtocol(HttpToolsProtocol):
    """Closes a connection whose request line and headers grow or wait beyond the limits, or that does not take what is
    sent to it.

    The parser collects a header until its end arrives, so an endless one must be counted here, in raw bytes.
    """

    limits = Limits()
    sinks: tuple[RecordSink, ...] = ()  # told of requests that are refused here
    _reading: Literal["idle", "head", "body", "over"] = "idle"  # over: the client has said that no other request comes
    _head = b""  # as far as it has arrived, with empty lines before it
    _body_bytes = 0  # that are still to come, of a body with a length
    _body_began = 0.0  # by the loop's clock
    _chunks: ChunkedFraming | None = None  # of a body without one
    _replaying = False  # a head that has been checked
    _refusal: bytes | None = None  # what nothing is read after any more; told once what runs is answered
    _running: RequestResponseCycle | None = None  # the request that is answered, or was last
    _deadline: asyncio.TimerHandle | None = None  # for the client to send
    _unread: asyncio.TimerHandle | None = None  # for the client to read
    _unread_bytes = 0  # that waited when the latter was set
    _ended = False  # the client's side of the connection
    _half_closed: asyncio.Task[None] | None = None  # looks whether a client that sends nothing more still reads

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.lingering = LingeringTransport(transport, self.loop, self._to_come)
        super().connection_made(self.lingering)
        self.parser = self._new_parser()
        self.flow = self.ordered = OrderedFlow(self.lingering, self)
        self._wait()

    def _new_parser(self) -> httptools.HttpRequestParser:
        """uvicorn's, which leaves it to `_check_head` which versions there are."""
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True, lenient_version=True)
        return parser

    def _to_come(self) -> tuple[int, float]:
        """How many bytes the client may still send of the request that it has begun, as far as it is waited for, and
        the seconds for which: those of a body have its deadline."""
        seconds = self.limits.read_seconds
        if self._ended:
            return 0, 0.0
        if self._reading == "body":
            seconds = min(seconds, self._body_began + self.limits.body_seconds - self.loop.time())
            return min(MOST_BYTES, self._body_bytes) if self._chunks is None else MOST_BYTES, seconds
        if self._refusal is not None and self._head.endswith(HEAD_END):
            return MOST_BYTES, seconds
        return MOST_OTHER_BYTES if self._refusal is not None or self._reading == "head" else 0, seconds

    def data_received(self, data: bytes) -> None:
        if self.lingering.lingers:
            return self.lingering.discard(data)
        if self._refusal is not None or self._reading == "over":
            return
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except RequestError as error:
            return self._refuse(error)
        except httptools.HttpParserError as error:
            return self._refuse(self._cause(error))
        if self.pipeline:
            self.ordered.note_ahead(len(data))
        if self._reading == "idle" and self._deadline is None and not self._answering:
            seconds, handler = self.timeout_keep_alive, self.timeout_keep_alive_handler
            self.timeout_keep_alive_task = self.loop.call_later(seconds, handler)

    def _cause(self, error: httptools.HttpParserError) -> RequestError:
        """What a request is refused with that the parser does not take, or that was refused while it was parsed."""
        return error.__context__ if isinstance(error.__context__, RequestError) else self._unreadable(str(error))

    def _unreadable(self, cause: str) -> RequestError:
        if self._reading == "head" and self._request_line() == PREFACE:
            return unknown_version()
        return unreadable(cause)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends nothing more. Whether the connection stays open, which is as long as it is answered."""
        self._ended = True
        if self.scheme == "https" or self.lingering.lingers:  # of the former asyncio closes both sides at once
            return False
        if self._reading in ("head", "body") and self._refusal is None:
            self._refuse(RequestError(400, "invalid_http", "The connection ended within the request."))
        if self.transport.is_closing() or not self._answering:
            return False
        if self._half_closed is None:
            if self._refusal is None:  # which would end the connection
                self.cycle.keep_alive = False  # of the latest one, which may wait for others
            self._stop_waiting()
            self._bound_kernel()
            watching = abort_when_gone(self.transport, lambda: self._running if self._answering else None)
            self._half_closed = self.loop.create_task(watching)
        return True

    def _feed(self, data: bytes) -> None:
        """Parse what arrived, each head, body and trailer apart. Raises HttpParserError and RequestError."""
        at = 0
        while at < len(data) and self._reading != "over":
            if self._reading in ("idle", "head"):
                at = self._feed_head(data, at)
            elif self._chunks is not None:
                at, part = self._chunks.part(data, at)
                self.parser.feed_data(part)
            else:
                size = min(self._body_bytes, len(data) - at)
                assert size, "the message would be complete"
                self._body_bytes -= size
                self.parser.feed_data(memoryview(data)[at : at + size])
                at += size

    def _feed_head(self, data: bytes, at: int) -> int:
        """Parse what belongs to a head; where in what arrived it ends. Raises HttpParserError and RequestError.

        The parser ends a message that offers to speak another protocol (`Upgrade: h2c`) at its headers, and would read
        its body as the next request. No offer is taken up here, so such a head is read again without it.
        """
        before, most = len(self._head), self.most_head_bytes
        self._head += data[at : at + most + 1 - before]
        empty_lines = len(self._head) - len(self._head.lstrip(b"\r\n"))
        end = self._head.find(HEAD_END, max(before - len(HEAD_END) + 1, empty_lines))
        if end >= 0:
            self._head = self._head[: end + len(HEAD_END)]
        if len(self._head) > most:
            message = f"The headers are larger than {self.limits.header_bytes} bytes."
            raise RequestError(431, "headers_too_large", message)
        until = at + len(self._head) - before
        try:
            self.parser.feed_data(memoryview(data)[at:until])
        except httptools.HttpParserUpgrade:
            self._read_without_offer()
        if end >= 0 and self._reading == "head":  # to the parser it goes on
            raise self._unreadable("its headers go on behind an empty line")
        return until

    @property
    def most_head_bytes(self) -> int:
        """Of a request line and its headers, and of trailers, as they are sent."""
        return self.limits.header_bytes + 64

    def _read_without_offer(self) -> None:
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = self._new_parser()
        self._replaying = True
        try:
            self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))
        finally:
            self._replaying = False

    # What the parser calls. What is raised here ends in `data_received`.

    def on_message_begin(self) -> None:
        self._reading = "head"
        super().on_message_begin()
        if not self._answering:
            self._wait()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading == "head":  # others are trailers, which say nothing of who asks for what (RFC 9110, 6.5.1)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._replaying:
            self._check_head(self.parser.get_method(), self.parser.get_http_version())
        if self.parser.should_upgrade():  # `_feed` goes on
            return
        super().on_headers_complete()
        self.cycle.keep_alive = self.parser.should_keep_alive()  # of HTTP/1.0 too, where the client asks for it
        self._reading, self._body_began = "body", self.loop.time()
        self._stop_waiting()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._reading = "idle" if self.parser.should_keep_alive() else "over"
        self._head, self._chunks = b"", None
        if not self._answering:
            self._stop_waiting()
        super().on_message_complete()

    def _check_head(self, method: bytes, version: str) -> None:
        """Raise RequestError for a head that other readers may take for another one."""
        if version not in VERSIONS:
            raise unknown_version()
        line = self._request_line()
        if line != b"%s %s HTTP/%s" % (method, self.url, version.encode()) or b"#" in self.url:
            problem = "The request line is not a method, a target without a fragment, and a version, one space between."
            raise RequestError(400, "invalid_http", problem)
        if not self._head.endswith(HEAD_END):
            raise RequestError(400, "invalid_http", "The headers do not end with an empty line.")
        if method == b"CONNECT":
            raise RequestError(405, "method_not_allowed", "This server is no proxy.")
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and version == "1.0":
            raise RequestError(400, "invalid_header", "HTTP/1.0 has no transfer codings.")
        if codings and codings != [b"chunked"]:
            problem = "No transfer coding but chunked is known here."
            raise RequestError(501, "unsupported_transfer_coding", problem)
        self._body_bytes = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        self._chunks = ChunkedFraming(self.most_head_bytes, self.limits.header_bytes) if codings else None
        hosts = [value.strip().lower() for name, value in self.headers if name == b"host"]
        if version == "1.1" and not hosts:
            raise RequestError(400, "invalid_header", "A request of HTTP/1.1 has a Host header.")
        target = _ABSOLUTE.match(self.url)
        if target is not None and not hosts:
            self.headers.append((b"host", target[2]))  # which is checked as such
        if target is not None and (target[1].lower() not in (b"http", b"https") or {*hosts} - {target[2].lower()}):
            problem = "A target with a host is of http or https, and names the host that the Host header names."
            raise RequestError(400, "invalid_header", problem)

    def _request_line(self) -> bytes:
        return self._head.lstrip(b"\r\n").partition(b"\r\n")[0]

    # Answers.

    @property
    def _answering(self) -> bool:
        running = self._running
        return running is not None and not (running.response_complete or running.disconnected)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        if not self.flow.write_paused:
            self._stop_unread()
        super()._start_asgi_task(cycle, Unchunked(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._limit_unread()
        if self.transport.is_closing() or self._answering:
            return
        self.flow.resume_reading()  # as far as all that was read is answered
        if self._refusal is not None:
            self._end()
        elif self._reading != "idle":
            self._unset_keepalive_if_required()
            self._wait()

    def _refuse(self, error: RequestError) -> None:
        """End the connection with an error, after what is being answered."""
        if self.transport.is_closing() or self._refusal is not None:
            return
        self._stop_waiting()
        if self._reading == "body":  # the error is this request's
            identity = mark(self.cycle.scope, error)
            self._refusal = refusal(error, identity)
            self._drop_answer(error, identity)
        else:
            headers = self.headers if self._reading == "head" else ()
            identity = request_id(dict(headers))
            self._refusal = refusal(error, identity)
            if line := self._request_line():  # else nothing was asked
                record_unseen(identity, line, headers, error, self.sinks)
        if not self._answering:
            self._end()

    def _drop_answer(self, error: RequestError, identity: str) -> None:
        """Leave the request that is being received without an answer but the refusal, unless one has begun."""
        if self.pipeline and self.pipeline[0][0] is self.cycle:  # the latest of those that wait
            self.pipeline.popleft()
            line = b"%s %s" % (self.cycle.scope["method"].encode(), self.cycle.scope["raw_path"])
            record_unseen(identity, line, self.headers, error, self.sinks)
        elif self.cycle.response_started:
            self._refusal = b""
            self.cycle.keep_alive = False
        else:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _end(self) -> None:
        if self._refusal:
            self.transport.write(self._refusal)
        self.transport.close()
        self._limit_unread()

    def shutdown(self) -> None:
        super().shutdown()
        if self.lingering.lingers:
            self.lingering.end()

    # Time.

    def _wait(self) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(self.limits.read_seconds, self._expire)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        message = f"No request came within {self.limits.read_seconds:g} seconds."
        self._refuse(RequestError(408, "request_timeout", message))

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._limit_unread()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit_unread()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread()

    def _limit_unread(self) -> None:
        """Give the client time to take what waits to be sent."""
        size = self.transport.get_write_buffer_size()
        if self._unread is None and size:
            self._unread_bytes = size
            self._unread = self.loop.call_later(self.limits.unread_seconds, self._expire_unread)

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _expire_unread(self) -> None:
        self._unread = None
        if self.transport.get_write_buffer_size() < self._unread_bytes:
            self._limit_unread()
        else:
            connection = self.transport.get_extra_info("socket")
            # Closed by a reset, after which the kernel keeps nothing of it.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()

    def _bound_kernel(self) -> None:
        """Have the kernel give up what it still holds for a client that takes nothing of it: of a connection that is
        closed nobody else would, and its window may stay shut for as long as the client likes."""
        connection = self.transport.get_extra_info("socket")
        if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
            with suppress(OSError):  # of one that was reset
                milliseconds = math.ceil(self.limits.unread_seconds * 1000)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._bound_kernel()
        self._stop_waiting()
        if self._half_closed is not None:
            self._half_closed.cancel()
        super().connection_lost(exc)
        self._stop_unread()
        running = [] if self._running is None else [self._running]
        for cycle in (*running, *(cycle for cycle, _ in self.pipeline)):  # uvicorn tells the latest one alone
            cycle.disconnected = cycle.disconnected or not cycle.response_complete
            cycle.message_event.set()
        self.pipeline.clear()
