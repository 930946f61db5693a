"""Who begins next: requests wait here, by key, and are handed to the engine in the order of fair shares.

    enter ──> held, by key ──turn──> ahead: the engine has it, no token yet ──began──> running ──leave──>
                 └── pushed out: 429, where a key with a smaller share of the queue needs the place

The engine is given only what its next steps have room for. Prompts that are longer than half of that have a room of
their own: the engine lets short ones overtake them, so these must not wait here until long ones have begun. Each key
has a clock of tokens: prompts when they are handed over, generated tokens as they come, divided by the key's weight.
The key with the lowest clock is next, so keys that always have requests waiting get shares in proportion to their
weights, whatever the sizes of their requests; the clock of a key that had none waiting is set to the lowest of the
others first, so that nobody saves up. Within a key the lowest priority comes first, and of equal ones the oldest.

Requests of batches (`Principal.background`) have queues and clocks of their own. They are handed over only while no
other request is open; `idle` and `busy` say when that is, and whoever runs batches withdraws what it has there.
"""

import asyncio
import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from roofline.common.errors import RequestError
from roofline.server.errors import Overloaded
from roofline.server.keys import Principal
from roofline.server.limits import Limits

LEAST_AHEAD = 8  # requests of either kind that the engine may have without a token, however long their prompts are
LEAST_TOKENS = 16  # what a request counts as at least: a step has room for so many only
MAX_IDLE_KEYS = 1024  # whose clocks are remembered


class Pace:
    """How fast something happens, by the latest times that it did."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=32)

    def note(self) -> None:
        self._times.append(time.monotonic())

    def seconds(self, count: float) -> int:
        """In how many seconds it should have happened so often; 1 to 60, and 5 while that is not known."""
        if len(self._times) < 2:
            return 5
        pace = (len(self._times) - 1) / max(time.monotonic() - self._times[0], 1e-3)
        return int(min(60, max(1, count / pace)))


@dataclass(eq=False)
class KeyQueue:
    """The requests of one key. clock: tokens that were computed for it, divided by its weight."""

    principal: Principal
    clock: float = 0.0
    waiting: "list[Ticket]" = field(default_factory=list)  # the next one first
    open: int = 0
    ends: Pace = field(default_factory=Pace)

    @property
    def background(self) -> bool:
        """Whether it is of a key's batches."""
        return self.principal.background

    def share(self, more: int = 0) -> float:
        """Its part of the queue, with so many more requests, in relation to its weight."""
        return (len(self.waiting) + more) / self.principal.weight


class Ticket:
    """The place of one request; `leave` whatever happens."""

    def __init__(self, queue: "Queue", key: KeyQueue, tokens: int, priority: int) -> None:
        self._queue, self.key, self.tokens = queue, key, max(tokens, LEAST_TOKENS)
        self.priority = priority
        self.long = self.tokens > queue.half_window
        self._decided = asyncio.Event()
        self._refusal: Overloaded | None = None
        self.waits, self.ahead, self.left = True, False, False
        self.entered = time.monotonic()
        self.takes_room = False  # among what the engine has been given

    async def turn(self) -> None:
        """Wait until the engine is to have the request. Raises Overloaded for one that is pushed out."""
        await self._decided.wait()
        if self._refusal is not None:
            raise self._refusal

    def charge(self, tokens: int) -> None:
        """Count tokens that were computed for it; negative: that the cache had after all."""
        self.key.clock += tokens / self.key.principal.weight

    def prepare(self, under_way: bool) -> None:
        """Its form is being compiled: meanwhile the engine has room for others. May be called again."""
        if self.ahead and self.waits:
            self._queue.count(self, not under_way)

    def began(self) -> None:
        """Its first token has come. May be called again."""
        if self.waits:
            self._queue.begin(self)

    def leave(self) -> None:
        """It has ended, however. May be called again."""
        if not self.left:
            self._queue.end(self)

    def hand_over(self) -> None:
        self.ahead = True
        self._decided.set()

    def push_out(self, error: Overloaded) -> None:
        self._refusal = error
        self._decided.set()


class Queue:
    """Counts requests, holds those that the engine has no room for, and ends all that run when the server ends.

    window: how many tokens of prompts the engine is given before the first token of their answers.
    """

    def __init__(self, limits: Limits, window: Callable[[], int]) -> None:
        self._limits, self._window = limits, window
        self.waiting = 0  # requests without a first token, those that are ahead too
        self.stopped = False
        self.ends: set[Callable[[RequestError], None]] = set()  # one for each request that runs
        self.idle, self.busy = asyncio.Event(), asyncio.Event()  # whether no request is open but those of batches
        self.idle.set()
        self._foreground = 0  # requests that are open and of no batch
        self._waiters: dict[Ticket, None] = {}  # those that `waiting` counts, the oldest first
        self._keys: dict[str, KeyQueue] = {}
        self._clocks = {False: 0.0, True: 0.0}  # of the key that was served last, and of the batches' key
        self._ahead, self._ahead_tokens = {False: 0, True: 0}, {False: 0, True: 0}  # of short and of long prompts
        self._begins = Pace()

    def stop(self) -> None:
        """End all requests with an error, so that no answer looks complete that is not, and admit no more."""
        self.stopped = True
        for end in self.ends:
            end(_stopping())

    def enter(self, principal: Principal, tokens: int, priority: int = 0) -> Ticket:
        """A place for a request of so many prompt tokens. Raises Overloaded when there is none."""
        if self.stopped:
            raise _stopping()
        key = self._key(principal)
        streams = principal.streams if principal.streams is not None else self._limits.streams
        if key.open >= streams:
            message = f"This key has {key.open} requests open, and may have {streams}."
            raise Overloaded(message, key.ends.seconds(1), "too_many_streams")
        if self.waiting >= self._limits.queued and not principal.background:
            self._make_room(key)
        ticket = Ticket(self, key, tokens, priority)
        if not key.waiting:
            background = principal.background
            rivals = [key.clock for key in self._keys.values() if key.waiting and key.background == background]
            key.clock = max(key.clock, min(rivals, default=self._clocks[background]))
        insort(key.waiting, ticket, key=lambda waiter: waiter.priority)  # of equal ones the latest last
        key.open += 1
        if not principal.background:
            self.waiting += 1
            self._waiters[ticket] = None
            self._open(1)
        self._hand_over()
        return ticket

    @property
    def half_window(self) -> int:
        """Tokens of the longest prompt that counts as short."""
        return self._window() // 2

    @property
    def held(self) -> int:
        """Requests that the engine has no room for yet, without those of batches."""
        return sum(len(key.waiting) for key in self._keys.values() if not key.background)

    @property
    def oldest_seconds(self) -> float:
        """How long the request that came first of those without a first token has waited; 0 where none waits."""
        oldest = next(iter(self._waiters), None)
        return 0.0 if oldest is None else time.monotonic() - oldest.entered

    def retry_after(self) -> int:
        """Seconds in which half of the queue should have moved on, at the latest pace."""
        return self._begins.seconds(self.waiting / 2)

    def begin(self, ticket: Ticket) -> None:
        self._begins.note()
        self._no_longer_waits(ticket)
        self._hand_over()

    def end(self, ticket: Ticket) -> None:
        ticket.left, key = True, ticket.key
        if ticket.waits:
            self._no_longer_waits(ticket)
        key.open -= 1
        key.ends.note()
        if not key.background:
            self._open(-1)
        self._hand_over()

    def _open(self, change: int) -> None:
        """Count the requests that are open and of no batch."""
        self._foreground += change
        now, before = (self.busy, self.idle) if self._foreground else (self.idle, self.busy)
        now.set()
        before.clear()

    def _no_longer_waits(self, ticket: Ticket) -> None:
        ticket.waits = False
        if not ticket.key.background:
            self.waiting -= 1
            del self._waiters[ticket]
        self._count(ticket, False)
        if not ticket.ahead:
            ticket.key.waiting.remove(ticket)

    def count(self, ticket: Ticket, takes_room: bool) -> None:
        """Whether a ticket that is ahead takes room of the engine."""
        self._count(ticket, takes_room)
        self._hand_over()

    def _count(self, ticket: Ticket, takes_room: bool) -> None:
        if ticket.takes_room != takes_room:
            sign = 1 if takes_room else -1
            self._ahead[ticket.long] += sign
            self._ahead_tokens[ticket.long] += sign * ticket.tokens
        ticket.takes_room = takes_room

    def _hand_over(self) -> None:
        """Give the engine what it has room for."""
        while ticket := self._next():
            key = ticket.key
            key.waiting.remove(ticket)
            self._count(ticket, True)
            self._clocks[key.background] = max(self._clocks[key.background], key.clock)
            ticket.charge(ticket.tokens)
            ticket.hand_over()

    def _next(self) -> Ticket | None:
        """The first request, of the key whose turn it is, that the engine has room for."""
        window = self._window()
        rooms = [long for long in (False, True) if self._ahead[long] < LEAST_AHEAD or self._ahead_tokens[long] < window]
        waiting = (key for key in self._keys.values() if key.waiting and not (key.background and self._foreground))
        for key in sorted(waiting, key=lambda key: key.clock) if rooms else ():
            ticket = next((waiter for waiter in key.waiting if waiter.long in rooms), None)
            if ticket is not None:
                return ticket
        return None

    def _make_room(self, key: KeyQueue) -> None:
        """Push out the last request of the key with the largest share of the queue, unless that is this one, or would
        be. Raises Overloaded then."""
        refusal = Overloaded(f"{self.waiting} requests are already waiting.", self.retry_after())
        largest = max((key for key in self._keys.values() if not key.background), key=KeyQueue.share)
        if largest.share() <= key.share(1) or not largest.waiting:
            raise refusal
        ticket = largest.waiting[-1]
        self._no_longer_waits(ticket)
        ticket.push_out(refusal)

    def _key(self, principal: Principal) -> KeyQueue:
        """The queue of a key, which has the principal's present weight and limits."""
        name = (
            f"{principal.name} in the background" if principal.background else principal.name
        )  # no key's name: spaces
        if len(self._keys) >= MAX_IDLE_KEYS and name not in self._keys:
            self._keys = {each: key for each, key in self._keys.items() if key.open}
        key = self._keys.setdefault(name, KeyQueue(principal))
        key.principal = principal
        return key


def _stopping() -> RequestError:
    return RequestError(503, "server_stopping", "The server stopped before this answer was complete.")
