"""Bodies whose reading takes longer than the loop may stand still: on threads of their own, by size, in fair turns.

Bodies of one size class wait for none of another, so many large ones hold up no small one. Within a class a body waits
by the key of its request; the key of which the fewest bytes were read while it waited, in relation to its weight, is
next. Where too many bytes wait, the key with the largest share of them gives way, or the request is refused (429).
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from roofline.common.processes import return_freed_memory
from roofline.server.admission import Pace
from roofline.server.errors import Overloaded
from roofline.server.keys import Principal

Result = TypeVar("Result")
# Encoding takes some three hundred times a text's size in memory: the larger bodies are, the fewer at a time.
CLASSES = ((64 << 10, 2), (1 << 20, 2), (2 << 20, 1), (None, 1))  # up to so many bytes: threads
TRIMMED_BYTES = 256 << 10  # of a body, whose reading leaves memory worth giving back


@dataclass(eq=False)
class WaitingBody:
    """A body that waits for its turn."""

    size: int
    turn: "asyncio.Future[None]"


@dataclass(eq=False)
class KeyBodies:
    """The bodies of one key that wait. clock: bytes that were read for it, divided by its weight;
    background: they are of batches, which are refused none."""

    weight: float
    clock: float
    background: bool
    waiting: deque[WaitingBody] = field(default_factory=deque)
    size: int = 0  # of all that wait

    def share(self, more: int = 0) -> float:
        """Of what waits, in relation to its weight, with so many bytes more."""
        return (self.size + more) / self.weight


class BodyClass:
    """Reads bodies of about one size, on so many threads."""

    def __init__(self, threads: int, most_waiting: int) -> None:
        self._threads, self._most_waiting = threads, most_waiting
        self._pool: ThreadPoolExecutor | None = None
        self._busy = self._size = 0  # threads in use; bytes that wait
        self._clock = 0.0  # of the key that was served last
        self._keys: dict[tuple[str, bool], KeyBodies] = {}  # those with bodies that wait
        self._ends = Pace()

    async def read(self, principal: Principal, size: int, reader: Callable[[], Result]) -> Result:
        """What `reader` returns, in this key's turn. Raises Overloaded, and what it raises."""
        if self._busy < self._threads:
            self._busy += 1
        else:
            await self._turn(principal, size)
        loop = asyncio.get_running_loop()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "roofline-bodies")

        def over(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._release)

        reading = self._pool.submit(self._read, size, reader)
        reading.add_done_callback(over)  # also where nobody waits for it any more
        return await asyncio.wrap_future(reading)

    def _read(self, size: int, reader: Callable[[], Result]) -> Result:
        try:
            return reader()
        finally:
            if size >= TRIMMED_BYTES and not self._keys:
                return_freed_memory()

    async def _turn(self, principal: Principal, size: int) -> None:
        """Wait for one of the threads, which is taken then. Raises Overloaded."""
        clock = min((key.clock for key in self._keys.values()), default=self._clock)
        background, name = principal.background, (principal.name, principal.background)
        key = self._keys.get(name) or KeyBodies(principal.weight, clock, background)
        while self._size + size > self._most_waiting and not background:
            self._make_room(key, size)
        self._keys[name] = key
        body = WaitingBody(size, asyncio.get_running_loop().create_future())
        key.waiting.append(body)
        self._count(key, size)
        try:
            await body.turn
        except BaseException:
            if body in key.waiting:
                key.waiting.remove(body)
                self._count(key, -size)
            elif not body.turn.cancelled() and body.turn.exception() is None:  # it was given one in this moment
                self._release()
            raise

    def _make_room(self, key: KeyBodies, size: int) -> None:
        """Refuse the latest body of the key with the largest share. Raises Overloaded where that is this one."""
        refusal = Overloaded(f"{self._size} bytes of bodies wait to be read.", self._ends.seconds(len(self._keys) + 1))
        refusable = [each for each in self._keys.values() if not each.background]
        largest = max(refusable, key=KeyBodies.share, default=key)
        if largest.share() <= key.share(size):
            raise refusal
        body = largest.waiting.pop()
        self._count(largest, -body.size)
        if not body.turn.done():
            body.turn.set_exception(refusal)

    def _count(self, key: KeyBodies, size: int) -> None:
        key.size += size
        self._size += size
        self._keys = {name: each for name, each in self._keys.items() if each.waiting}

    def _release(self) -> None:
        self._busy -= 1
        self._ends.note()
        while self._keys and self._busy < self._threads:
            key = min(self._keys.values(), key=lambda each: each.clock)
            self._clock = key.clock
            body = key.waiting.popleft()
            key.clock += body.size / key.weight
            self._count(key, -body.size)
            if not body.turn.done():  # it is, where the client has left
                self._busy += 1
                body.turn.set_result(None)


class BodyReading:
    """Reads bodies of all sizes. most_waiting: bytes of each class that may wait for a thread."""

    def __init__(self, most_waiting: int) -> None:
        self._classes = [(most, BodyClass(threads, most_waiting)) for most, threads in CLASSES]

    async def read(self, principal: Principal, size: int, reader: Callable[[], Result]) -> Result:
        """What `reader` returns, which takes about as long as a body of so many bytes. Raises Overloaded, and what it
        raises."""
        chosen = next(each for most, each in self._classes if most is None or size <= most)
        return await chosen.read(principal, size, reader)
