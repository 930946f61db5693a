"""Clients that do not read: a load beside the measured one. Each sends a request, takes the head of its answer, and
reads nothing more.

    connect ──head of the answer──> nothing is read ──a reset, a bound in seconds, the run's end──> closed

The receive buffer is small, so that an answer soon waits in the server. That the server gave up is seen without
reading: the kernel tells a reset, or an end that came within the buffer, of a socket that nobody reads.
"""

import asyncio
import math
import random
import select
import socket

import httptools

from roofline.bench.load.connection import Address, Clock
from roofline.bench.load.events import UnreadClient
from roofline.common.addresses import why_unreachable

RECEIVE_BUFFER = 2048  # bytes; the kernel rounds it up to the least that it has


def is_beside(seed: int, number: int, share: float) -> bool:
    """Whether a client that does not read comes with the request of this number: with a share of 0.1 every tenth. The
    seed says with which the run begins."""
    phase = random.Random(seed).random()
    return math.floor((number + 1) * share + phase) > math.floor(number * share + phase)


class UnreadClients:
    """The clients of a run that do not read. seconds: after which each is closed."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds
        self._tasks: set[asyncio.Task[None]] = set()
        self.records: list[UnreadClient] = []

    def start(self, address: Address, body: bytes, request: int, server: int) -> None:
        """Send a request whose answer is not read. request: of the traffic, beside which it is sent."""
        record = UnreadClient(request=request, dispatched=self._clock(), server=server)
        self.records.append(record)
        connection = UnreadConnection(address, record, self._clock)
        task = asyncio.ensure_future(connection.hold(body, self._seconds))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End those that are still there."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class UnreadConnection(asyncio.Protocol):
    """A connection of its own whose answer is not read."""

    def __init__(self, address: Address, record: UnreadClient, clock: Clock) -> None:
        self._address, self._record, self._clock = address, record, clock
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None
        self._watch: select.epoll | None = None
        self._over = asyncio.get_running_loop().create_future()

    async def hold(self, body: bytes, seconds: float) -> None:
        """Send a request and keep its connection open until the server closes it, for so many seconds at most."""
        record = self._record
        try:
            async with asyncio.timeout(seconds):
                await self._open()
                assert self._transport is not None, "connection_made has been called"
                self._transport.write(self._address.message(body))
                await self._over
        except TimeoutError:
            record.closed_by = "client"
        except OSError as error:
            record.error = f"no connection: {why_unreachable(error)}"
        finally:
            record.end = self._clock()
            self._close()

    async def _open(self) -> None:
        loop, address = asyncio.get_running_loop(), self._address
        infos = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        for number, (family, kind, protocol, _, place) in enumerate(infos, start=1):
            connection = self._socket = socket.socket(family, kind, protocol)
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)  # before the window is told
            try:
                await loop.sock_connect(connection, place)
                break
            except OSError:
                connection.close()
                if number == len(infos):
                    raise
        name = address.host if address.tls else None
        await loop.create_connection(lambda: self, sock=self._socket, ssl=address.tls, server_hostname=name)

    def _close(self) -> None:
        if self._watch is not None:
            asyncio.get_running_loop().remove_reader(self._watch.fileno())
            self._watch.close()
            self._watch = None
        if self._transport is not None:
            self._transport.abort()
        elif self._socket is not None:
            self._socket.close()

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports derive from none of asyncio's

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._record.error = f"the answer is no HTTP: {error}"
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._over.done():
            self._record.closed_by = "server"
            if self._record.headers is None:
                self._record.error = "the server closed the connection without an answer"
            self._end()

    # What the parser calls.

    def on_headers_complete(self) -> None:
        record = self._record
        record.headers, record.status = self._clock(), self._parser.get_status_code()
        if record.status != 200:
            record.error = f"status {record.status}"
            self._end()
            return
        assert self._transport is not None, "it has sent something"
        assert self._socket is not None, "which is the connection's"
        self._transport.pause_reading()
        self._watch = select.epoll()
        self._watch.register(self._socket.fileno(), select.EPOLLRDHUP)  # and a reset, which is always told
        asyncio.get_running_loop().add_reader(self._watch.fileno(), self._hung_up)

    def on_message_complete(self) -> None:
        if self._record.error is None:
            self._record.closed_by = "answer"  # all of it came with its head
        self._end()

    def _hung_up(self) -> None:
        if not self._over.done():
            self._record.closed_by = "server"
        self._end()
