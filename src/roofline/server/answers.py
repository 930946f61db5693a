"""From a validated request to pieces of text: submit every prompt, turn ids into characters, end at stop strings."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from roofline.common import log
from roofline.common.errors import RequestError
from roofline.engine.events import Event, TokenLogprob
from roofline.server.context import Context
from roofline.server.errors import ENGINE_FAILED, Overloaded
from roofline.server.facade import AnswerText
from roofline.server.validate import Generation

LOG = log.get("server")


@dataclass(frozen=True)
class Piece:
    """New text of one choice. `finish` is set on its last piece."""

    choice: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None


@dataclass
class Counts:
    """What is billed: ids that became text or ended an answer; surplus ids after a stop string are not."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def usage(self) -> dict:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass
class Queue:
    """How many requests wait for their first token, and how fast such waits end."""

    waiting: int = 0
    first_tokens: list[float] = field(default_factory=list)  # times of the latest ones

    def admit(self, limit: int) -> None:
        """Count one in. Raises Overloaded when the queue is full."""
        if self.waiting >= limit:
            raise Overloaded(f"{self.waiting} requests are already waiting.", self.retry_after())
        self.waiting += 1

    def leave(self, with_token: bool) -> None:
        self.waiting -= 1
        if with_token:
            self.first_tokens = [*self.first_tokens[-31:], time.monotonic()]

    def retry_after(self) -> int:
        """Seconds in which half of the queue should have moved on, at the latest pace; 1 to 60."""
        times = self.first_tokens
        if len(times) < 2:
            return 5
        pace = (len(times) - 1) / max(time.monotonic() - times[0], 1e-3)
        return int(min(60, max(1, self.waiting / 2 / pace)))


class Answers:
    """The choices of one request: prompts x n, in that order. Iterate `pieces` once; leaving it aborts what runs."""

    def __init__(self, context: Context, generation: Generation, queue: Queue) -> None:
        self.context, self.generation, self.queue = context, generation, queue
        self.id = uuid.uuid4().hex
        self.arrived = time.monotonic()
        self.counts = Counts(prompt=generation.prompt_tokens)
        n = generation.params.n
        self._choices = [
            _Choice(i, context.text.stream(generation.params.stop, at_start=generation.at_start))
            for i in range(len(generation.prompts) * n)
        ]
        self._queued = False
        LOG.debug(
            "%s: prompts %d, prompt tokens %d, n %d, stream %s",
            self._shown(),
            len(generation.prompts),
            self.counts.prompt,
            n,
            generation.stream,
        )

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces of all choices as they come. Raises RequestError; every choice that ends has one finish piece."""
        context, n = self.context, self.generation.params.n
        self.queue.admit(context.limits.queued)
        self._queued = True
        events: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._listen(i, prompt, events)) for i, prompt in enumerate(self.generation.prompts)
        ]
        try:
            open_prompts = len(tasks)
            while open_prompts:
                prompt, event = await events.get()
                if event is None:
                    open_prompts -= 1
                    if any(choice.finish is None for choice in self._choices[prompt * n : (prompt + 1) * n]):
                        raise RequestError(503, "engine_failed", ENGINE_FAILED)
                    continue
                if isinstance(event, Exception):
                    raise event
                piece = self._piece(prompt, self._choices[prompt * n + event.index], event)
                if piece is not None:
                    yield piece
            context.metrics.request_ended(self.counts.prompt, time.monotonic() - self.arrived)
        finally:
            self._leave_queue(with_token=False)
            for task in tasks:
                task.cancel()
            for i in range(len(tasks)):
                if any(c.finish is None or c.running for c in self._choices[i * n : (i + 1) * n]):
                    context.engine.abort(self._request_id(i))
            for choice in self._choices:
                if choice.finish is None:
                    context.metrics.answer_ended("abort", choice.tokens)

    async def whole(self) -> list[Piece]:
        """All of `pieces`, joined to one a choice, in order."""
        parts: dict[int, list[Piece]] = {}
        async for piece in self.pieces():
            parts.setdefault(piece.choice, []).append(piece)
        return [
            Piece(choice, "".join(p.text for p in made), tuple(t for p in made for t in p.logprobs), made[-1].finish)
            for choice, made in sorted(parts.items())
        ]

    async def _listen(self, prompt: int, ids: Sequence[int], events: asyncio.Queue) -> None:
        try:
            stream = self.context.engine.submit(
                ids, self.generation.params, eos_ids=self.context.text.eos_ids, request_id=self._request_id(prompt)
            )
            async for event in stream:
                events.put_nowait((prompt, event))
            events.put_nowait((prompt, None))
        except Exception as error:
            events.put_nowait((prompt, error))

    def _request_id(self, prompt: int) -> str:
        return f"{self.id}-{prompt}"

    def _shown(self) -> str:
        """This request in a log line; %r keeps line breaks of a client's label out of the log."""
        user = self.generation.user
        return f"request {self.id}" if user is None else f"request {self.id} of {user!r}"

    def _piece(self, prompt: int, choice: "_Choice", event: Event) -> Piece | None:
        """Apply one event of the engine. None when there is nothing to tell yet."""
        if event.finish_reason is not None:
            choice.running = False
        if choice.finish is not None:
            return None  # ids after a stop string: dropped, not billed
        if event.finish_reason == "error":
            LOG.error("%s: prompt %d failed in the engine: %s", self._shown(), prompt, event.error)
            choice.finish = "error"
            self.context.metrics.answer_ended("error", choice.tokens)
            raise RequestError(503, "engine_failed", ENGINE_FAILED)
        if event.usage is not None and event.index == 0:
            self.counts.cached += event.usage.cached_tokens
        ids = event.ids if event.stop_id is None else event.ids[:-1]  # a stop id is counted, but is not text
        delta = choice.text.push(ids)
        text, used = delta.text, delta.used if delta.stopped is not None else len(event.ids)
        if used:
            self._count(choice, used)
        if delta.stopped is not None:
            choice.finish = "stop"
            if choice.running:  # the engine need not go on with it
                self.context.engine.abort(self._request_id(prompt), event.index)
        elif event.finish_reason is not None:
            text += choice.text.finish()
            # The last half character may complete a stop string.
            choice.finish = "stop" if choice.text.stopped is not None else event.finish_reason
        if choice.finish is not None:
            self.context.metrics.answer_ended(choice.finish, choice.tokens)
        logprobs = tuple(event.logprobs[: min(used, len(ids))]) if event.logprobs else ()
        if not (text or logprobs or choice.finish):
            return None
        return Piece(choice.index, text, logprobs, choice.finish)

    def _count(self, choice: "_Choice", tokens: int) -> None:
        now, metrics = time.monotonic(), self.context.metrics
        if choice.last is None:
            metrics.first_token(now - self.arrived)
            self._leave_queue(with_token=True)
        else:
            for _ in range(tokens):  # those of one step share its time
                metrics.next_token((now - choice.last) / tokens)
        choice.last = now
        choice.tokens += tokens
        self.counts.completion += tokens
        metrics.sent(tokens)

    def _leave_queue(self, with_token: bool) -> None:
        if self._queued:
            self._queued = False
            self.queue.leave(with_token)


class _Choice:
    """One answer in the making. `running`: the engine still computes it."""

    def __init__(self, index: int, text: AnswerText) -> None:
        self.index, self.text = index, text
        self.tokens = 0
        self.last: float | None = None
        self.finish: str | None = None
        self.running = True
