"""Clients that have ended their side of a connection: some still read, and some are gone.

Both send the same, a FIN. Only of one that is gone the system answers further bytes with a reset. So a connection whose
answer takes long is sent, byte by byte, what that answer begins with in any case: the client notices nothing, and what
is computed for nobody is known at once.
"""

import asyncio
import select
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_STATUS_LINE = b"HTTP/1.1 "  # the beginning of every answer
_CHUNK_LINE = b"0"  # the size of a chunk, the last one's too, may begin with zeros
_FIRST_PERIOD = 1.0  # seconds until the next byte
_FIRST_PAUSE = 0.005  # seconds until the reset to a byte is looked for


class BegunTransport(asyncio.Transport):
    """A transport of which the next message's beginning has been sent already."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport, self._sent = transport, 0

    def begin(self) -> None:
        """Send one more byte of the next message, as far as it is known."""
        self._transport.write(_STATUS_LINE[self._sent : self._sent + 1])
        self._sent = min(self._sent + 1, len(_STATUS_LINE))

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._transport.write(data[self._sent :])
        self._sent = 0

    def close(self) -> None:
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


def probe(cycle: RequestResponseCycle) -> None:
    """Send a byte of an answer that is not complete, where one is known."""
    if cycle.response_started:
        if cycle.chunked_encoding:
            cycle.transport.write(_CHUNK_LINE)
        return
    if not isinstance(cycle.transport, BegunTransport):
        cycle.transport = BegunTransport(cycle.transport)
    cycle.transport.begin()


async def abort_when_gone(transport: asyncio.Transport, running: Callable[[], RequestResponseCycle | None]) -> None:
    """Abort a connection as soon as nobody reads it any more; returns then. Cancel it when the connection ends.

    running: the request that is being answered.
    """
    hung_up = select.poll()
    hung_up.register(transport.get_extra_info("socket").fileno(), 0)
    period = _FIRST_PERIOD
    while True:
        cycle = running()
        if cycle is not None and transport.get_write_buffer_size() == 0:
            probe(cycle)
        pause, waited = _FIRST_PAUSE, 0.0
        while waited < period:
            await asyncio.sleep(pause)
            if hung_up.poll(0):
                return transport.abort()
            waited += pause
            pause *= 2
        period *= 2
