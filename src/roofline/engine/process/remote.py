"""RemoteEngine: `facade.AsyncEngine` over one engine in a process, or a thread, of its own.

    submit ──> Stream <── events ── one Report a step <── engine process
                 │                                          │ dies
                 └── one error event an open answer <───────┴──> a fresh process, after a pause

The pair of sockets has no name: nothing on disk to protect, to collide with, or to clean up.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterable
from typing import NoReturn, Unpack

from roofline.common import log
from roofline.common.errors import RequestError, RooflineError
from roofline.engine.checks import RequestOptions, check_request, check_unused, request_parts
from roofline.engine.events import Event
from roofline.engine.params import SamplingParams
from roofline.engine.process import messages
from roofline.engine.process.messages import Abort, Close, EngineSpec, Ready, Refused, Report, Submit, ToOwner
from roofline.engine.process.stream import Stream
from roofline.engine.process.worker import ProcessWorker, Worker
from roofline.engine.stats import EngineStats

DIED = "the engine process died"
CLOSED = "the engine was closed"


class RemoteEngine:
    """Starts an engine, keeps it alive, and sends it requests.

    Use it from one event loop, whose thread must live as long as the engine (the kernel ends the process with it).

    Args:
        worker: where the engine runs; None: a process of its own.
        max_restarts: restarts in a row, without a token between them, before giving up.
        backoff: seconds before the first restart; doubled for each further one in a row.
    """

    def __init__(
        self, spec: EngineSpec, *, worker: Worker | None = None, max_restarts: int = 5, backoff: float = 0.2
    ) -> None:
        self.spec, self.max_restarts, self.backoff = spec, max_restarts, backoff
        self.description: Ready | None = None
        self.restarts = 0
        self.last_token_at: float | None = None  # time.monotonic()
        self.failure: str | None = None  # why no process will be started any more
        self.engines: tuple[RemoteEngine, ...] = ()
        self._worker = worker or ProcessWorker(spec)
        self._stats = EngineStats()
        self.streams: dict[str, Stream] = {}  # the requests that have not ended, by id
        self._settled = asyncio.Event()  # set while ready, and for good once closed or given up
        self.ready = self._closing = False
        self._socket: socket.socket | None = None  # our end to a process that no event loop reads from yet
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._worker.pid

    @property
    def outstanding(self) -> int:
        return sum(stream.outstanding for stream in self.streams.values())

    async def settled(self) -> None:
        """Wait until requests are computed, or never will be any more (`failure`)."""
        await self._settled.wait()

    def launch(self) -> None:
        with contextlib.suppress(OSError):  # `start` tries again, and reports
            self._socket = self._worker.spawn()

    async def start(self) -> Ready:
        assert self._supervisor is None, "an engine starts once"
        first: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(first))
        return await first

    async def submit(
        self, ids: Iterable[int], params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Stream:
        prompt, params, eos, name, salt = request_parts(ids, params, **options)
        assert self._supervisor is not None, "start comes before submit"
        await self.settled()
        if not self.ready or self.description is None or self._writer is None:
            raise RequestError(503, "engine_unavailable", self.failure or CLOSED)
        check_request(prompt, params, eos, self.description.vocab_size, self.description.max_model_len)
        check_unused(name, self.streams)
        stream = self.streams[name] = Stream(self.abort, name, params.n, len(prompt))
        self._writer.write(messages.frame(Submit(name, prompt, params, eos, salt)))
        return stream

    def abort(self, request_id: str, index: int | None = None) -> None:
        if request_id in self.streams and self.ready and self._writer is not None:
            self._writer.write(messages.frame(Abort(request_id, index)))

    def stats(self) -> EngineStats:
        return self._stats

    async def close(self, timeout: float = 5.0) -> None:
        if self._closing:
            return
        if self._supervisor is None:
            await self._reap()
            return
        self._closing = True
        if self.ready and self._writer is not None:
            self._writer.write(messages.frame(Close()))
            await asyncio.wait([self._supervisor], timeout=timeout)
        if not self._supervisor.done():
            self._worker.kill()  # loading, or stuck in a step
        self._supervisor.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._supervisor
        await self._reap()
        self._give_up(CLOSED)

    async def _supervise(self, first: asyncio.Future[Ready]) -> None:
        """Keep a process running until closed, or until it cannot be kept running."""
        failures = 0
        try:
            while not self._closing:
                reason, productive = await self._life(first)
                self.ready = False
                if self._closing:
                    return
                self._settled.clear()
                status = await self._reap()
                reason += f" (exit status {status})"
                self._fail_streams(reason)
                failures = 1 if productive else failures + 1
                if self.description is None:  # what cannot be loaded the first time is not tried again
                    return self._give_up(reason)
                if failures > self.max_restarts:
                    return self._give_up(f"{reason}; given up after {self.max_restarts} restarts")
                log.get("engine").error("%s, restart %d", reason, failures)
                await asyncio.sleep(self.backoff * 2 ** (failures - 1))
                self.restarts += 1
        finally:
            if not first.done():
                first.set_exception(RooflineError(self.failure or CLOSED))

    async def _life(self, first: asyncio.Future[Ready]) -> tuple[str, bool]:
        """One process from start to end: why it ended, and whether it produced a token."""
        try:
            reader, self.description = await self._connect()
        except RooflineError as error:
            if self.description is None:
                first.set_exception(error)
                return f"the model could not be loaded: {error}", False
            return f"the model could not be loaded again: {error}", False
        except (OSError, asyncio.IncompleteReadError):
            return f"{DIED} while loading", False
        self.ready, self._stats = True, EngineStats()
        self._settled.set()
        if not first.done():
            first.set_result(self.description)
        produced = self.last_token_at
        try:
            await self._pump(reader)
        except (OSError, asyncio.IncompleteReadError):
            return DIED, self.last_token_at != produced
        except Exception as error:  # a message that cannot be read: no stream may be left waiting
            log.get("engine").exception("the engine's messages cannot be read")
            return f"the engine's messages cannot be read: {error}", False

    async def _connect(self) -> tuple[asyncio.StreamReader, Ready]:
        """A fresh process, or the one launched before, with its model loaded."""
        ours, self._socket = self._socket or self._worker.spawn(), None
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        message = await _read(reader)
        if isinstance(message, Refused):
            raise messages.as_error(message)
        assert isinstance(message, Ready), "the engine's first message is Ready or Refused"
        return reader, message

    async def _pump(self, reader: asyncio.StreamReader) -> NoReturn:
        """Deliver reports; ends by the exception that the end of the stream raises."""
        while True:
            report = await _read(reader)
            assert isinstance(report, Report), "a ready engine sends reports"
            self._stats = report.stats
            for event in report.events:
                if event.ids:
                    self.last_token_at = time.monotonic()
                stream = self.streams.get(event.request_id)
                if stream is not None:
                    stream.deliver(event)
                    if not stream.open:
                        del self.streams[event.request_id]

    async def _reap(self) -> int | None:
        """Close the connection and wait for the worker's end; its exit status."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        return await asyncio.to_thread(self._worker.end)

    def _fail_streams(self, error: str) -> None:
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            for index in sorted(stream.open):
                stream.deliver(Event(stream.request_id, index, [], finish_reason="error", error=error))

    def _give_up(self, reason: str) -> None:
        self.ready, self.failure = False, reason
        self._fail_streams(reason)
        self._settled.set()


async def _read(reader: asyncio.StreamReader) -> ToOwner:
    (length,) = messages.LENGTH.unpack(await reader.readexactly(messages.LENGTH.size))
    return messages.owner_decoder.decode(await reader.readexactly(length))
