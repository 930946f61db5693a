"""The end of a server: what runs may finish, up to a time; what cannot is ended with an error that its client sees."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator, Sequence

import uvicorn

from roofline.server.admission import Queue

STARTUP_FAILURE = 3  # uvicorn's status of a server whose application cannot start
LAST_EVENTS_SECONDS = 1.0  # for the errors of answers that are cut off to be sent


class DrainingServer(uvicorn.Server):
    """Stops accepting at the first signal and lets answers finish for `drain_seconds`, or until a second SIGINT.

    refreshes: called with False each second, and with True at SIGHUP: what they have read of files is to be read again
    where the files changed, or in any case. Without any, SIGHUP ends the process as usual. handshake_seconds: for which
    a client may take part in a TLS handshake.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        queue: Queue,
        drain_seconds: float,
        refreshes: Sequence[Callable[[bool], None]] = (),
        handshake_seconds: float = 30.0,
    ) -> None:
        super().__init__(config)
        self._handshake_seconds = handshake_seconds
        self._queue, self._drain_seconds, self._refreshes = queue, drain_seconds, refreshes
        self.when_listening: Callable[[], None] = lambda: None  # called once connections are taken
        self.when_stopping: Callable[[], None] = lambda: None  # called when no more are

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves our signals to us: uvicorn would raise one again once it has stopped, before the engine is closed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        if self._refreshes:
            loop.add_signal_handler(signal.SIGHUP, self._refresh, True)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """In place of uvicorn's, which gives a TLS handshake the loop's own time. sockets: that are bound."""
        assert sockets is not None, "they were bound before anything was loaded"
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise SystemExit(STARTUP_FAILURE)
        loop, config = asyncio.get_running_loop(), self.config

        def protocol() -> asyncio.Protocol:
            made: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return made

        seconds = None if config.ssl is None else self._handshake_seconds
        self.servers = []
        for each in sockets:
            make = loop.create_unix_server if each.family == socket.AF_UNIX else loop.create_server
            self.servers.append(
                await make(protocol, sock=each, ssl=config.ssl, backlog=config.backlog, ssl_handshake_timeout=seconds)
            )
        self.started = True
        self.when_listening()

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second; whether to end."""
        if counter % 10 == 0:
            self._refresh(False)
        return await super().on_tick(counter)

    def _refresh(self, force: bool) -> None:
        for refresh in self._refreshes:
            refresh(force)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """In place of uvicorn's, which cancels what runs: a cut-off answer then has no last event."""
        self.when_stopping()
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await self._drained(self._drain_seconds, heed_force=True)
        self._queue.stop()
        await self._drained(LAST_EVENTS_SECONDS, heed_force=False)
        for task in self.server_state.tasks:  # of clients that do not read what they are sent
            task.cancel()
        await self.lifespan.shutdown()

    async def _drained(self, seconds: float, heed_force: bool) -> None:
        """Wait until no request runs and all answers are sent, at most so long."""
        loop, state = asyncio.get_running_loop(), self.server_state
        end = loop.time() + seconds
        while (
            (state.tasks or state.connections or self._queue.ends)
            and loop.time() < end
            and not (heed_force and self.force_exit)
        ):
            await asyncio.sleep(0.02)
