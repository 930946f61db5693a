"""Connections that are closed while their client still sends (RFC 9112, 9.6).

What a closed socket has not read makes the kernel answer with a reset, upon which the client's kernel may throw the
answer away that it has received. So such a connection is closed on our side alone first, and what arrives is read and
thrown away, up to a number of bytes and of seconds.
"""

import asyncio
from collections.abc import Callable

MOST_BYTES = 32 << 20  # of a body
MOST_OTHER_BYTES = 128 << 10  # where what arrives is no body
MOST_SECONDS = 10.0


class LingeringTransport(asyncio.Transport):
    """A transport that reads on, where that is needed, when it is closed.

    to_come: gives how many bytes the client may still send of what it has begun, 0: none, and for how many seconds they
    are read.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        to_come: Callable[[], tuple[int, float]],
    ) -> None:
        super().__init__()
        self._transport, self._loop, self._to_come = transport, loop, to_come
        self._bytes = 0  # that are still thrown away
        self._timer: asyncio.TimerHandle | None = None

    @property
    def lingers(self) -> bool:
        """Whether it was closed, and what still arrives is to be given to `discard`."""
        return self._timer is not None

    def close(self) -> None:
        if self.lingers or self._transport.is_closing():
            return
        self._bytes, seconds = self._to_come()
        if self._bytes <= 0 or seconds <= 0:
            return self._transport.close()
        self._timer = self._loop.call_later(min(seconds, MOST_SECONDS), self._transport.close)
        if self._transport.can_write_eof():  # TLS has no half that could be closed
            self._transport.write_eof()
        self._transport.resume_reading()

    def discard(self, data: bytes) -> None:
        """Throw away what arrived, and close the connection with the last of it."""
        self._bytes -= len(data)
        if self._bytes <= 0:
            self._transport.close()

    def end(self) -> None:
        """Close the connection, whatever still arrives."""
        if self._timer is not None:
            self._timer.cancel()
        self._transport.close()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.lingers:
            self._transport.write(data)

    def is_closing(self) -> bool:
        return self.lingers or self._transport.is_closing()

    def abort(self) -> None:
        self._transport.abort()

    def pause_reading(self) -> None:
        if not self.lingers:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._transport.get_extra_info(name, default)
