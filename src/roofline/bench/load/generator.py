"""The load generator: sends the requests of a plan at their moments, and writes down what happens to each.

A closed loop has workers that send their next request when the last one was answered. An open loop sends each request
at its planned moment whatever became of those before; what is late, because this process was busy, shows as the time
from `scheduled` to `dispatched`.
"""

import asyncio
import gc
import resource
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, cycle
from typing import Protocol

import msgspec

from roofline.bench.load.connection import Address, Clock, Connection
from roofline.bench.load.events import Events, EventsHead, RequestEvents
from roofline.bench.load.plan import Plan
from roofline.bench.load.progress import SECONDS_BETWEEN, Progress, Tally
from roofline.bench.load.schedule import count_in_time, planned_moments
from roofline.bench.load.unread import UnreadClients, is_beside
from roofline.bench.traffic.traffic import Traffic, TrafficRequest
from roofline.common.processes import signal_handlers_as_before
from roofline.common.units import now_utc

PATHS = {"completions": "/completions", "chat": "/chat/completions"}
Session = list[int]  # numbers of requests in the traffic, one after the other


class Sender(Protocol):
    """Sends one request after the other, and puts what happens into their records."""

    async def send(self, body: bytes, record: RequestEvents, timeout: float) -> str: ...
    def close(self) -> None: ...


class Generator:
    """A run of a plan. key: sent as a bearer token; on_progress: called every half second; connect: makes what sends
    requests, None: connections to the plan's servers. Ended early by `stop`, it gives the events up to there."""

    def __init__(
        self,
        plan: Plan,
        traffic: Traffic,
        key: str | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        connect: Callable[[Clock], Sender] | None = None,
    ) -> None:
        self._plan, self._traffic = plan, traffic
        self._addresses = addresses = [Address(url, PATHS[plan.route], key) for url in (plan.url, *plan.further_urls)]
        self._alone = connect is None  # in its process: an engine beside it needs collections
        self._connects = [connect] if connect else [partial(Connection, address) for address in addresses]
        self._idle: list[list[Sender]] = [[] for _ in self._connects]  # of each server
        self._servers = cycle(range(len(self._connects)))
        self._unread, self._begun = UnreadClients(self.clock, plan.unread_seconds), 0
        self._records: list[RequestEvents] = []
        self._sessions = _sessions(plan, traffic)
        self._bodies = {n: self._body([], traffic.requests[n]) for session in self._sessions for n in session[:1]}
        self._origin = 0
        self._last = 0  # when there was nothing left to send
        self._probes_sent = 0
        self._dispatched = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_progress = on_progress
        self._tally = Tally()
        self.stopped = False

    def clock(self) -> int:
        """Nanoseconds since the run began."""
        return time.perf_counter_ns() - self._origin

    def stop(self) -> None:
        """End the run: what is under way stays unfinished."""
        self.stopped = True
        for task in self._tasks:
            task.cancel()

    async def run(self) -> Events:
        """Send everything, and return what happened."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        ways: dict[str, Callable[[], Awaitable[None]]] = {"closed": self._closed, "batch": self._batches}
        started = now_utc()
        if self._alone:
            gc.collect()
            gc.freeze()
            gc.disable()  # a collection would stand between two moments
        self._origin, used = time.perf_counter_ns(), _cpu_seconds()
        reporting = loop.create_task(self._report(used))
        await ways.get(self._plan.arrivals, self._open)()
        reporting.cancel()
        await self._unread.close()
        spent, wall = _cpu_seconds() - used, max(self.clock(), 1) / 1e9
        if self._alone:
            gc.enable()
        for connection in chain(*self._idle):
            connection.close()
        plan, last = self._plan, self._last or self.clock()
        is_open = plan.arrivals not in ("closed", "batch", "trace")
        head = EventsHead(
            traffic=self._traffic.name,
            traffic_sha256=self._traffic.sha256,
            arrivals=plan.arrivals,
            target=",".join((plan.url, *plan.further_urls)),
            started=started,
            begin=0,
            end=last,
            concurrency=None if is_open or plan.arrivals == "trace" else plan.concurrency,
            rate=plan.rate if is_open else None,
            stop=self._traffic.stop,
            client_cpu=spent / wall,
            interrupted=self.stopped,
            unread_share=plan.unread,
            unread=self._unread.records,
        )
        return Events(head, self._records)

    async def _report(self, used: float) -> None:
        """Tell how far the run is. used: seconds of the processor before it."""
        while self._on_progress is not None:
            await asyncio.sleep(SECONDS_BETWEEN)
            self._on_progress(self._tally.report(self.clock() / 1e9, _cpu_seconds() - used))

    # The ways to send.

    async def _closed(self) -> None:
        sessions = iter(self._sessions)
        await self._gather([self._worker(sessions) for _ in range(self._plan.concurrency)])

    async def _worker(self, sessions: Iterator[Session]) -> None:
        while not self.stopped and self.clock() < self._plan.seconds * 1e9:
            session = next(sessions, None)
            if session is None:
                break
            if (probe := self._probe_in_turn()) is not None:
                await probe
            await self._converse(session, self.clock())
        self._last = self._last or self.clock()

    async def _batches(self) -> None:
        sessions, size = self._sessions, self._plan.concurrency
        for at in range(0, len(sessions), size):
            if self.stopped or self.clock() >= self._plan.seconds * 1e9:
                break
            now, batch = self.clock(), sessions[at : at + size]
            probes = [probe for _ in batch if (probe := self._probe_in_turn()) is not None]
            await self._gather([*(self._converse(session, now) for session in batch), *probes])
        self._last = self.clock()

    async def _open(self) -> None:
        sessions = self._sessions[: count_in_time(self._plan, len(self._sessions))]
        moments = planned_moments(self._plan, [self._traffic.requests[session[0]] for session in sessions])
        for session, moment in zip(sessions, moments, strict=True):
            if moment > self._plan.seconds * 1e9 + 1:  # rounded
                break
            await self._until(moment)
            if self.stopped:
                break
            self._start(self._converse(session, moment))
            if (probe := self._probe_in_turn()) is not None:
                self._start(probe)
        await asyncio.sleep(0)  # what was started last is dispatched
        self._last = self.clock()
        await self._gather([])

    async def _until(self, moment: int) -> None:
        """Sleep until a moment, in short pieces so that a signal is noticed."""
        while not self.stopped and (rest := moment - self.clock()) > 0:
            await asyncio.sleep(min(rest / 1e9, 0.25))

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _gather(self, work: Sequence[Awaitable[None]]) -> None:
        """Wait for this work and all that is under way. Raises what failed but for being cancelled."""
        for each in work:
            self._start(each)
        while self._tasks:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled():
                    task.result()

    # Single requests.

    async def _converse(self, session: Session, scheduled: int) -> None:
        """Send the turns of a session, each when the one before was answered; the first at its planned moment."""
        plan, history, server = self._plan, list[dict[str, str]](), next(self._servers)
        self._unread_beside(session[0])
        for number in session:
            request = self._traffic.requests[number]
            body = self._bodies[number] if not history else self._body(history, request)
            record = RequestEvents(request=number, scheduled=scheduled, dispatched=self.clock(), server=server)
            text = await self._send(body, record)
            if plan.keep_text:
                record.text = text
            if record.error is not None:
                return
            history += [{"role": "user", "content": request.prompt}, {"role": "assistant", "content": text}]
            scheduled = self.clock()

    def _unread_beside(self, number: int) -> None:
        """Send a request that nobody reads beside this one, where it is its turn. Its prompt begins with a number of
        its own, so that no cache makes one of the two faster than it would be alone."""
        plan, count = self._plan, self._begun
        self._begun += 1
        if not is_beside(plan.seed, count, plan.unread):
            return
        request, server = self._traffic.requests[number], count % len(self._addresses)
        most, ignored = plan.unread_tokens or request.max_tokens, self._traffic.stop == "ignored"
        body = self._encode([], f"{count} {request.prompt}", most, ignored=ignored or bool(plan.unread_tokens))
        self._unread.start(self._addresses[server], body, number, server)

    def _probe_in_turn(self) -> Awaitable[None] | None:
        """The next probe, where it is its turn."""
        plan, count = self._plan, self._dispatched
        self._dispatched += 1
        if not plan.probes or count % plan.probe_every:
            return None
        self._probes_sent += 1
        return self._probe((self._probes_sent - 1) % len(plan.probes))

    async def _probe(self, at: int) -> None:
        now, probe = self.clock(), self._plan.probes[at]
        record = RequestEvents(request=at, scheduled=now, dispatched=now, server=next(self._servers), probe=True)
        record.text = await self._send(self._encode([], probe.prompt, probe.max_tokens, ignored=False), record)

    async def _send(self, body: bytes, record: RequestEvents) -> str:
        self._records.append(record)
        tally = self._tally
        tally.begun += 1
        number = tally.begun
        tally.under_way[number] = record.chunks
        tally.slip = record.dispatched - record.planned
        idle = self._idle[record.server]
        connection = idle.pop() if idle else self._connects[record.server](self.clock)
        text = await connection.send(body, record, self._plan.timeout)
        idle.append(connection)
        del tally.under_way[number]
        tally.tokens += record.completion_tokens or len(record.chunks)
        tally.failed += record.error is not None
        tally.completed += record.error is None
        return text

    def _body(self, history: Sequence[dict[str, str]], request: TrafficRequest) -> bytes:
        return self._encode(history, request.prompt, request.max_tokens, ignored=self._traffic.stop == "ignored")

    def _encode(self, history: Sequence[dict[str, str]], prompt: str, most: int, ignored: bool) -> bytes:
        content: dict[str, object] = {"model": self._plan.model, "max_tokens": most, "temperature": 0, "stream": True}
        content["stream_options"] = {"include_usage": True}
        if ignored:
            content["ignore_eos"] = True
        if self._plan.route == "chat":
            content["messages"] = [*history, {"role": "user", "content": prompt}]
        else:
            content["prompt"] = " ".join([*(turn["content"] for turn in history), prompt])
        return msgspec.json.encode(content)


def run_on_fast_loop(generator: Generator) -> Events:
    """The generator's events, from uvloop's event loop where it is installed; from the main thread only."""
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with suppress(ImportError):
        import uvloop

        new_loop = uvloop.new_event_loop
    with signal_handlers_as_before(), asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(generator.run())


def _sessions(plan: Plan, traffic: Traffic) -> list[Session]:
    """The requests that are sent, those of a conversation together, in the order of the traffic."""
    count, sessions, of_conversation = len(traffic.requests), list[Session](), dict[tuple[int, int], Session]()
    for place in range(plan.first, plan.first + plan.requests):
        number, lap = place % count, place // count
        session = traffic.requests[number].session
        if session is None:
            sessions.append([number])
        elif (lap, session) in of_conversation:
            of_conversation[lap, session].append(number)
        else:
            of_conversation[lap, session] = [number]
            sessions.append(of_conversation[lap, session])
    return sessions


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
