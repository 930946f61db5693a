"""RemoteEngine: `facade.AsyncEngine` over one engine in a process, or a thread, of its own.

    submit ──> Stream <── events ── one Report a step <── engine process
                                                            │ dies
               open requests, with their ids so far ──> a fresh process

Streams see a pause. A process that answers nothing any more is ended, which makes it one that died. One that died
without an id is followed by one that must first answer a request of ours: so what ends processes is told from what
cannot compute at all, which is given up in the end.

The pair of sockets has no name: nothing on disk to protect, to collide with, or to clean up.
"""

import asyncio
import contextlib
import socket
import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Unpack

import msgspec

from roofline.common import log
from roofline.common.errors import RequestError, RooflineError, UnsupportedError
from roofline.common.processes import describe_end, is_stopped
from roofline.engine.adapter_info import AdapterInfo
from roofline.engine.checks import RequestOptions, check_request, check_unused, request_parts
from roofline.engine.params import SamplingParams, fresh_seed
from roofline.engine.pooling import check_able
from roofline.engine.process import messages
from roofline.engine.process.canary import Canary
from roofline.engine.process.messages import (
    Abort,
    AdapterLoaded,
    Checked,
    Close,
    EngineLost,
    EngineSpec,
    LoadAdapter,
    LoadRefused,
    Ping,
    Pong,
    Ready,
    StepReport,
    Submit,
    UnloadAdapter,
    closing_seconds,
)
from roofline.engine.process.recovery import OpenRequest, Recovery
from roofline.engine.process.remote_adapters import RemoteAdapters
from roofline.engine.process.stream import EventStream, incoming
from roofline.engine.process.watchdog import Stall, Watchdog, tree_time
from roofline.engine.process.worker import ProcessWorker, Worker, ended
from roofline.engine.stats import EngineStats

DIED = "the engine process died"
CLOSED = "the engine was closed"
MAX_PAUSE = 1.0  # seconds before a restart


class RemoteEngine:
    """Starts an engine, keeps it alive, and sends it requests.

    Use it from one event loop, whose thread must live as long as the engine (the kernel ends the process with it).

    Args:
        worker: where the engine runs; None: a process of its own.
        max_restarts: restarts in a row, without a token between them, before giving up.
        backoff: seconds before the first restart; doubled for each further one in a row, up to MAX_PAUSE.
        ping_seconds: after this much silence a process is asked for an answer.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        worker: Worker | None = None,
        max_restarts: int = 10,
        backoff: float = 0.2,
        ping_seconds: float = 5.0,
    ) -> None:
        self.spec, self.max_restarts, self.backoff = spec, max_restarts, backoff
        self.description: Ready | None = None
        self.restarts = 0
        self.last_token_at: float | None = None  # time.monotonic()
        self._ready_at = 0.0  # the same clock: when the present process had its model
        self.failure: str | None = None  # why no process will be started any more
        self.problem: str | None = None  # why there is no process at the moment, after the first one
        self._ending = ""  # why we end the present process ourselves
        self.checked: Checked | None = None  # what came of comparing the weights with their hash; None: not known yet
        self.engines: tuple[RemoteEngine, ...] = ()
        self.heir: Callable[[], RemoteEngine | None] | None = None  # chooses who goes on when this one is given up
        self._worker = worker or ProcessWorker(spec)
        self._stall, self._canary = Stall(), Canary()
        self._watchdog = Watchdog(
            ping_seconds, lambda: tree_time(self.pid), lambda: self.pid is not None and is_stopped(self.pid)
        )
        self._stats = EngineStats()
        self._recovery = Recovery()
        self._adapters = RemoteAdapters(self._tell, self._used_adapters)
        self._productive = False  # whether the present process has given an id
        self._settled = asyncio.Event()  # set while ready, and for good once closed or given up
        self._given_up = asyncio.Event()
        self.ready = self._closing = False
        self._socket: socket.socket | None = None  # our end to a process that no event loop reads from yet
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._worker.pid

    @property
    def outstanding(self) -> int:
        return sum(request.stream.outstanding for request in self.requests.values())

    @property
    def requests(self) -> dict[str, OpenRequest]:
        """Those that have not ended, by id."""
        return self._recovery.requests

    async def settled(self) -> None:
        """Wait until requests are computed, or never will be any more (`failure`)."""
        await self._settled.wait()

    async def failed(self) -> str:
        await self._given_up.wait()
        return self.failure or CLOSED

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
    ) -> EventStream:
        prompt, params, eos, name, salt, adapter, priority = request_parts(ids, params, **options)
        assert self._supervisor is not None, "start comes before submit"
        await self.settled()
        while not self.ready and self.failure is None and not self._closing:  # it died again in the same moment
            await asyncio.sleep(0)
            await self.settled()
        if not self.ready or self.description is None or self._writer is None:
            raise RequestError(503, "engine_unavailable", self.failure or CLOSED)
        loaded = self.description
        check_able(params.pooling, loaded.gives_hidden, adapter, loaded.encoder)
        sizes = loaded.vocab_size, loaded.max_model_len
        longest = check_request(prompt, params, eos, *sizes, loaded.encoder, loaded.media_ids)
        check_unused(name, self.requests)
        self._adapters.check(adapter)
        stream = EventStream(self.abort, name, params.n, len(prompt))
        params = replace(params, seed=fresh_seed() if params.seed is None else params.seed, max_tokens=longest)
        self._recovery.add(
            OpenRequest(
                prompt=array("i", prompt),
                params=params,
                eos_ids=eos,
                salt=salt,
                stream=stream,
                adapter=adapter,
                priority=priority,
            )
        )
        self._send(self._recovery.due())
        if params.constraint is not None:
            await stream.taken()
        return stream

    async def load_adapter(self, path: str, max_bytes: int | None = None) -> AdapterInfo:
        if not self.ready:
            raise RequestError(503, "engine_not_ready", "The engine is not ready. Try again in a moment.")
        return await self._adapters.load(path, max_bytes)

    def unload_adapter(self, digest: str) -> None:
        self._adapters.unload(digest)

    def _used_adapters(self) -> set[str]:
        return {request.adapter for request in self.requests.values()}

    @property
    def _busy(self) -> bool:
        """Whether ids are expected."""
        return bool(self.requests) or self._canary.runs

    def _send(self, requests: Iterable[Submit]) -> None:
        for request in requests:
            if self._writer is not None:
                self._stall.asked()
                self._writer.write(messages.frame(request))

    def _tell(self, message: LoadAdapter | UnloadAdapter) -> None:
        if self._writer is not None:
            self._writer.write(messages.frame(message))

    def trouble(self, patience: float) -> str | None:
        waited = self._stall.seconds
        if self.ready and waited > patience:
            waiting = f"{len(self.requests)} requests wait" if self.requests else "it was asked for a sign of life"
            return f"the engine has computed nothing for {waited:.0f} s while {waiting}"
        return self._canary.problem

    def prove(self, seconds: float) -> None:
        latest = max(self._ready_at, self.last_token_at or 0.0)
        if self.ready and not self._busy and time.monotonic() - latest >= seconds:
            self._send([self._canary.request(self.description)])

    def abort(self, request_id: str, index: int | None = None) -> None:
        if self._recovery.abort(request_id, index) and self._writer is not None:
            self._writer.write(messages.frame(Abort(request_id, index)))

    def adopt(self, requests: Iterable[OpenRequest]) -> None:
        """Go on with requests of another engine, which computes the same and is given up."""
        for request in requests:
            request.stream.move(self.abort)
            self._recovery.add(request)
        if self.ready:
            self._send(self._recovery.due())

    def stats(self) -> EngineStats:
        return self._stats

    async def close(self, timeout: float = 5.0) -> None:
        if self._closing:
            return
        if self._supervisor is None:
            await self._reap()
            return
        self._closing = True
        for request_id in list(self.requests):
            self._recovery.abort(request_id)  # those that no process computes end here, the others by Close
        if self.ready and self._writer is not None:
            self._writer.write(messages.frame(Close()))
            await asyncio.wait([self._supervisor], timeout=closing_seconds(self.spec, self.description, timeout))
        if not self._supervisor.done():
            self._worker.kill()  # loading, or stuck in a step
        self._supervisor.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._supervisor
        await self._reap()
        self._give_up(CLOSED)

    async def reload(self, source: str, options: Mapping[str, object]) -> None:
        """Go on, with what is open, in a fresh process that loads `source` with these options beside the others."""
        if not isinstance(self._worker, ProcessWorker):
            raise UnsupportedError("loading a model again", "it lives in this process")
        self.spec = msgspec.structs.replace(self.spec, source=source, options={**self.spec.options, **options})
        restarts, self._worker.spec, self._ending = self.restarts, self.spec, "the model is loaded with other options"
        self._worker.kill()
        while self.restarts == restarts and self.failure is None:
            await asyncio.sleep(0.01)
        await self.settled()

    async def _supervise(self, first: asyncio.Future[Ready]) -> None:
        """Keep a process running until closed, or until it cannot be kept running."""
        failures = 0
        try:
            while not self._closing:
                reason = await self._life(first, doubtful=failures > 0 and not self._productive)
                self.ready = False
                if self._closing:
                    return
                self._settled.clear()
                self._adapters.died()
                status = await self._reap()
                if reason.startswith(DIED):
                    reason += f" ({describe_end(status)})"
                self.problem = reason
                failures = 1 if self._productive else failures + 1
                if self.description is None:  # what cannot be loaded the first time is not tried again
                    return self._give_up(reason)
                self._recovery.outlive(reason)
                if failures > self.max_restarts:
                    return self._give_up(f"{reason}; given up after {self.max_restarts} restarts")
                log.get("engine").error("%s, restart %d, %d requests wait", reason, failures, len(self.requests))
                await asyncio.sleep(min(MAX_PAUSE, self.backoff * 2 ** (failures - 1)))
                self.restarts += 1
        except Exception as error:  # whatever it is: no stream may be left waiting
            log.get("engine").exception("the engine process is not looked after any more")
            self._worker.kill()
            self._give_up(f"the engine process is not looked after any more: {type(error).__name__}: {error}")
        finally:
            if not first.done():
                first.set_exception(RooflineError(self.failure or CLOSED))

    async def _life(self, first: asyncio.Future[Ready], doubtful: bool) -> str:
        """One process from start to end: why it ended. doubtful: it must first give a token to the canary."""
        self._productive, self._ending = False, ""
        try:
            reader, self.description = await self._connect()
        except RooflineError as error:
            if self.description is None:
                first.set_exception(error)
                return f"the model could not be loaded: {error}"
            return f"the model could not be loaded again: {error}"
        except (OSError, asyncio.IncompleteReadError):
            return f"{DIED} while loading"
        except msgspec.MsgspecError as error:  # of another version than this process, say
            self._worker.kill()
            return f"the engine's first message cannot be read: {error}"
        self._stats, self.checked = EngineStats(), None
        self._ready_at = time.monotonic()
        self._stall.settled()
        self._canary = Canary()
        self._adapters.restore()
        watch = asyncio.create_task(self._watch())
        try:
            if doubtful:
                self._send([self._canary.request(self.description)])
            else:
                self._open()
            if not first.done():
                first.set_result(self.description)
            return await self._pump(reader)
        except (OSError, asyncio.IncompleteReadError):
            return self._ending or (watch.result() if watch.done() and watch.exception() is None else DIED)
        except Exception as error:  # a message that cannot be read: no stream may be left waiting
            log.get("engine").exception("the engine's messages cannot be read")
            return f"the engine's messages cannot be read: {error}"
        finally:
            watch.cancel()

    def _open(self) -> None:
        """Requests are computed from now on, those of the process before first."""
        self.ready, self.problem = True, None
        self._send(self._recovery.due())
        self._settled.set()

    async def _watch(self) -> str:
        """Ends a process that answers nothing any more, and says so. One without a process id is left alone."""
        self._watchdog.heard()
        while True:
            await asyncio.sleep(self._watchdog.tick_seconds)
            reason = self._watchdog.tick() if self.pid is not None and not self._closing else None
            if reason is not None:
                self._worker.kill()
                return reason
            if self._watchdog.silent == 1 and self._writer is not None:
                self._stall.asked()
                self._writer.write(messages.frame(Ping()))

    async def _connect(self) -> tuple[asyncio.StreamReader, Ready]:
        """A fresh process, or the one launched before, with its model loaded."""
        ours, self._socket = self._socket or self._worker.spawn(), None
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        message = await messages.read(reader)
        if isinstance(message, LoadRefused):
            raise messages.as_error(message)
        assert isinstance(message, Ready), "the engine's first message is Ready or Refused"
        return reader, message

    async def _pump(self, reader: asyncio.StreamReader) -> str:
        """Deliver reports until the process says why it ends; raises what the end of the stream raises."""
        async for report in incoming(reader):
            self._watchdog.heard()
            if isinstance(report, Pong):
                if not self._busy:
                    self._stall.settled()
                continue
            if isinstance(report, Checked):
                self.checked = report
                continue
            if isinstance(report, AdapterLoaded):
                self._adapters.told(report)
                continue
            if isinstance(report, EngineLost):
                return f"the engine process ended itself: {report.reason}"
            assert isinstance(report, StepReport), "a ready engine sends reports"
            self._take(report)
        raise AssertionError("messages come until the stream's end is raised")

    def _take(self, report: StepReport) -> None:
        stepped, self._stats = report.stats.steps > self._stats.steps, report.stats
        for event in report.events:
            if event.ids or event.vector is not None:
                self.last_token_at, self._productive = time.monotonic(), True
            self._canary.told(event)
            self._recovery.take(event)
        self._adapters.forget_idle()
        if not self._busy:
            self._stall.settled()
        elif stepped:
            self._stall.computed()
        if not self.ready and not self._canary.runs:  # it has answered
            self._open()
        else:
            self._send(self._recovery.due())

    async def _reap(self) -> int | None:
        """Close the connection and wait for the worker's end; its exit status."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        return await ended(self._worker)

    def _give_up(self, reason: str) -> None:
        self.ready, self.failure, self.problem = False, reason, reason
        if self.heir is not None and not self._closing and (heir := self.heir()) is not None:
            heir.adopt(self._recovery.leave())
        self._recovery.fail(reason)
        self._adapters.died()
        self._given_up.set()
        self._settled.set()
