"""From a validated request to pieces of text: submit every prompt, build the answers, count and time them."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from roofline.common import log
from roofline.common.errors import RequestError
from roofline.common.json_types import JsonObject
from roofline.engine.answers import AnswerBuilder, Piece
from roofline.engine.events import Event
from roofline.server.context import Context
from roofline.server.errors import ENGINE_FAILED, Overloaded
from roofline.server.validate import Generation

LOG = log.get("server")


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
        self.cached_tokens = 0
        params = generation.params
        self.choices = [
            AnswerBuilder(context.text.stream(params.stop, at_start=generation.at_start), params.logprobs is not None)
            for _ in range(len(generation.prompts) * params.n)
        ]
        self._token_times: dict[AnswerBuilder, float] = {}  # when the latest token of a choice came
        self._queued = False
        sizes = len(generation.prompts), generation.prompt_tokens, params.n
        LOG.debug("%s: prompts %d, prompt tokens %d, n %d, stream %s", self._label(), *sizes, generation.stream)

    def usage(self) -> JsonObject:
        """What is billed: ids that became text or ended an answer; surplus ids after a stop string are not."""
        prompt, completion = self.generation.prompt_tokens, sum(len(choice.ids) for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """(choice, piece) as they come; each choice ends with a piece that has a finish reason. Raises RequestError."""
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
                    if any(choice.finish_reason is None for choice in self._choices_of(prompt)):
                        raise RequestError(503, "engine_failed", ENGINE_FAILED)
                    continue
                if isinstance(event, Exception):
                    raise event
                piece = self._piece(prompt, event)
                if piece.text or piece.logprobs or piece.finish_reason:
                    yield prompt * n + event.index, piece
            context.metrics.request_ended(self.generation.prompt_tokens, time.monotonic() - self.arrived)
        finally:
            self._leave_queue(with_token=False)
            for task in tasks:
                task.cancel()
            for i in range(len(tasks)):
                if any(choice.finish_reason is None or choice.running for choice in self._choices_of(i)):
                    context.engine.abort(self._request_id(i))
            for choice in self.choices:
                if choice.finish_reason is None:
                    context.metrics.answer_ended("abort", len(choice.ids))

    async def complete(self) -> list[Piece]:
        """The choices in order, each as a single piece: all of `pieces` joined."""
        parts: list[list[Piece]] = [[] for _ in self.choices]
        async for choice, piece in self.pieces():
            parts[choice].append(piece)
        return [
            Piece(
                "".join(piece.text for piece in pieces),
                sum(piece.tokens for piece in pieces),
                [token for piece in pieces for token in piece.logprobs],
                pieces[-1].finish_reason,
            )
            for pieces in parts
        ]

    async def _listen(self, prompt: int, ids: Sequence[int], events: asyncio.Queue) -> None:
        """Submit a prompt and pass its events on; at their end None, or what went wrong."""
        try:
            stream = await self.context.engine.submit(
                ids, self.generation.params, eos_ids=self.context.text.eos_ids, request_id=self._request_id(prompt)
            )
            try:
                async for event in stream:
                    events.put_nowait((prompt, event))
            finally:
                await stream.aclose()
            events.put_nowait((prompt, None))
        except Exception as error:
            events.put_nowait((prompt, error))

    def _request_id(self, prompt: int) -> str:
        return f"{self.id}-{prompt}"

    def _choices_of(self, prompt: int) -> list[AnswerBuilder]:
        n = self.generation.params.n
        return self.choices[prompt * n : (prompt + 1) * n]

    def _label(self) -> str:
        """This request in a log line; %r keeps line breaks of a client's label out of the log."""
        user = self.generation.user
        return f"request {self.id}" if user is None else f"request {self.id} of {user!r}"

    def _piece(self, prompt: int, event: Event) -> Piece:
        """Apply one event of the engine, and count and time what it adds."""
        choice = self._choices_of(prompt)[event.index]
        unfinished = choice.finish_reason is None
        piece = choice.push(event)
        if piece.finish_reason == "error":
            LOG.error("%s: prompt %d failed in the engine: %s", self._label(), prompt, event.error)
            self.context.metrics.answer_ended("error", len(choice.ids))
            raise RequestError(503, "engine_failed", ENGINE_FAILED)
        if unfinished and event.usage is not None and event.index == 0:
            self.cached_tokens += event.usage.cached_tokens
        if piece.tokens:
            self._count(choice, piece.tokens)
        if piece.finish_reason is not None:
            if choice.running:  # ended by a stop string: the engine need not go on with it
                self.context.engine.abort(self._request_id(prompt), event.index)
            self.context.metrics.answer_ended(piece.finish_reason, len(choice.ids))
        return piece

    def _count(self, choice: AnswerBuilder, tokens: int) -> None:
        now, metrics, before = time.monotonic(), self.context.metrics, self._token_times.get(choice)
        if before is None:
            metrics.first_token(now - self.arrived)
            self._leave_queue(with_token=True)
        else:
            for _ in range(tokens):  # those of one step share its time
                metrics.next_token((now - before) / tokens)
        self._token_times[choice] = now
        metrics.sent(tokens)

    def _leave_queue(self, with_token: bool) -> None:
        if self._queued:
            self._queued = False
            self.queue.leave(with_token)
