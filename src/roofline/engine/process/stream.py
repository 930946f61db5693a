"""What comes from an engine that runs in another process or thread: its messages, and the events of one request."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable

from roofline.common.errors import RequestError
from roofline.engine.events import Event
from roofline.engine.process import messages
from roofline.engine.process.messages import StepReport, ToOwner

# The tokens that an unfinished answer counts for, since its length is not known. A conversation of some hundred tokens
# stays with the engine that has its pages while a few more answers are made there, but not while dozens are.
ANSWER_TOKENS = 64
EVENTS_AT_ONCE = 512


async def incoming(reader: asyncio.StreamReader) -> AsyncGenerator[ToOwner, None]:
    """The messages of an engine. Raises IncompleteReadError where it has ended.

    Reading gives up the loop only where nothing has arrived. Where more comes than can be worked off, those who wait
    for events get a turn between EVENTS_AT_ONCE of them, and what they have no time for stays with the engine.
    """
    events = 0
    while True:
        message = await messages.read(reader)
        yield message
        events += len(message.events) if isinstance(message, StepReport) else 0
        if events >= EVENTS_AT_ONCE:
            events = 0
            await asyncio.sleep(0)


class EventStream:
    """The events of one request, in order, to the last of its n answers. Iterate it, then or before call `aclose`.

    uncomputed: prompt tokens still to be computed, as far as is known here: 0 from the first answered id on.
    """

    def __init__(self, abort: Callable[[str, int | None], None], request_id: str, n: int, uncomputed: int = 0) -> None:
        self.request_id, self.uncomputed = request_id, uncomputed
        self.open = set(range(n))  # answers whose last event has not arrived
        self._abort = abort
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._detached = False

    @property
    def outstanding(self) -> int:
        """Tokens still to be computed for it, as far as is known here."""
        return self.uncomputed + ANSWER_TOKENS * len(self.open)

    def __aiter__(self) -> "EventStream":
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if not self.open or self._detached:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._events.popleft()

    async def taken(self) -> None:
        """Wait until the engine has compiled the request's constraint. Raises RequestError where it cannot be; this
        stream is closed then, as it is where the caller is cancelled."""
        if not self._events and self.open:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except BaseException:
                await self.aclose()
                raise
            finally:
                self._waiter = None
        if self._events and (field := self._events[0].refused) is not None:
            message = self._events[0].error or ""
            await self.aclose()
            raise RequestError(400, "invalid_value", message, param=field)

    def abort(self, index: int | None = None) -> None:
        """End the request, or one answer; the stream still delivers the last events."""
        if self.open if index is None else index in self.open:
            self._abort(self.request_id, index)

    def move(self, abort: Callable[[str, int | None], None]) -> None:
        """Another engine computes the request from now on."""
        self._abort = abort

    async def aclose(self) -> None:
        """Stop listening; what is unfinished is aborted and its pages are free after the engine's current step."""
        self.abort()
        self._detached = True
        self._events.clear()
        self._wake()

    def deliver(self, event: Event) -> None:
        """An event from the engine."""
        if event.ids:
            self.uncomputed = 0
        if event.finish_reason is not None:
            self.open.discard(event.index)
        if not self._detached:
            self._events.append(event)
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
