"""From a validated request to pieces of text: submit every prompt, build the answers, count and time them."""

import asyncio
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from roofline.common import log
from roofline.common.errors import RequestError
from roofline.common.json_types import JsonObject
from roofline.engine.answers import AnswerBuilder, AnswerPiece
from roofline.engine.beams import BeamSearch
from roofline.engine.checks import RequestOptions
from roofline.engine.events import Event, PromptProgress, TokenLogprob, Usage
from roofline.engine.process.beam_stream import beam_stream
from roofline.server.admission import Queue, Ticket
from roofline.server.body import renamed
from roofline.server.context import Context
from roofline.server.errors import ENGINE_FAILED, Overloaded
from roofline.server.generation import Generation
from roofline.server.keys import NOBODY, Principal

if TYPE_CHECKING:
    from roofline.engine.process.stream import EventStream

LOG = log.get("server")
ACCEPTED = (0, AnswerPiece(""))
EVENTS_AT_ONCE = 1024  # before others get a turn; more than the engine's owner delivers of a request in one
VECTORS_AT_ONCE = 16  # of one request, that the engine has: it computes in the order of arrival, so others get between


class Answers:
    """The choices of one request: prompts x n, in that order. Iterate `pieces` once; leaving it aborts what runs."""

    def __init__(
        self,
        context: Context,
        generation: Generation,
        queue: Queue,
        principal: Principal = NOBODY,
        timeout: float | None = None,
    ) -> None:
        self.context, self.generation, self.queue, self.principal = context, generation, queue, principal
        self._timeout = timeout  # the client's, in seconds
        self.id = uuid.uuid4().hex
        self.arrived = time.monotonic()
        self.cached_tokens = 0
        self.usages: list[Usage] = []  # what the engine said of each answer that it is done with
        self.first_token_seconds: float | None = None  # from the arrival, of whichever choice was the first
        params = generation.params
        self.choices = [
            AnswerBuilder(
                context.text.stream(
                    params.stop or (),
                    at_start=generation.at_start and params.constraint is None,  # of a form every byte counts
                    shown=generation.shown,
                    include_stop=generation.include_stop,
                    min_tokens=params.min_tokens,
                    reply=generation.parser(),
                ),
                params.logprobs is not None,
                params.prompt_logprobs is not None and number % params.n == 0,
            )
            for number in range(len(generation.prompts) * params.n)
        ]
        self._uncounted = set(range(len(generation.prompts)))  # prompts of which nothing has come
        self._token_times: dict[AnswerBuilder, float] = {}  # when the latest token of a choice came
        self._ticket: Ticket | None = None
        self._sending = False  # whether a piece is being sent
        self._most_unread = context.limits.unread_tokens // (1 + (params.logprobs or 0) // 4)  # events
        self.adapter_digest: str | None = None  # of the adapter that computes the answers
        at_once = VECTORS_AT_ONCE if params.pooling is not None else len(generation.prompts)
        self._room = asyncio.Semaphore(max(1, at_once))
        sizes = len(generation.prompts), generation.prompt_tokens, params.n
        LOG.debug("%s: prompts %d, prompt tokens %d, n %d, stream %s", self._label(), *sizes, generation.stream)

    def usage(self) -> JsonObject:
        """What is billed: ids that became text or ended an answer; surplus ids after a stop string are not."""
        prompt, completion = self.generation.prompt_tokens, sum(len(choice.ids) for choice in self.choices)
        cut = {"truncated_tokens": self.generation.cut_tokens} if self.generation.cut_tokens else {}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens} | cut,
        }

    async def pieces(self) -> AsyncGenerator[tuple[int, AnswerPiece | PromptProgress], None]:
        """(choice, piece) as they come; each choice ends with a piece that has a finish reason. Before its first, where
        the request wants it, how far its prompt is. Raises RequestError.

        The engine has taken all prompts once the first comes, which is ACCEPTED where that is before the first token.
        """
        with self.context.adapters.used(self.generation.adapter) as digest:
            self.adapter_digest = digest or None
            async with aclosing(self._pieces()) as pieces:  # who leaves in the middle of a piece has ended what runs
                async for piece in pieces:
                    self._sending = True
                    yield piece
                    self._sending = False

    async def _pieces(self) -> AsyncGenerator[tuple[int, AnswerPiece | PromptProgress], None]:
        context, n = self.context, self.generation.params.n
        ticket = self._ticket = self._enter()
        context.metrics.request_taken(n, self.generation.params.max_tokens)
        events: asyncio.Queue[tuple[int, Event | Exception | str | None]] = asyncio.Queue()

        def end(error: RequestError) -> None:
            events.put_nowait((0, error))

        self.queue.ends.add(end)
        timers = self._timers(end)
        tasks = [
            asyncio.create_task(self._listen(i, prompt, events)) for i, prompt in enumerate(self.generation.prompts)
        ]
        try:
            open_prompts = unsubmitted = len(tasks)
            in_a_row = 0  # events, without a wait
            while open_prompts:
                prompt, event = await events.get()
                in_a_row = 0 if events.empty() else in_a_row + 1
                if in_a_row >= EVENTS_AT_ONCE:  # `get` and `send` give up the loop only where they wait
                    in_a_row = 0
                    await asyncio.sleep(0)
                if isinstance(event, str):
                    unsubmitted -= 1
                    if unsubmitted == 0:
                        yield ACCEPTED
                    continue
                if event is None:
                    open_prompts -= 1
                    if any(choice.finish_reason is None for choice in self._choices_of(prompt)):
                        raise RequestError(503, "engine_failed", ENGINE_FAILED)
                    continue
                if isinstance(event, Exception):
                    raise event
                if event.progress is not None:
                    yield prompt * n + event.index, event.progress
                    continue
                piece = self._piece(prompt, event)
                if piece.parts or piece.logprobs or piece.finish_reason:
                    yield prompt * n + event.index, piece
            context.metrics.request_ended(self.generation.prompt_tokens, time.monotonic() - self.arrived)
        finally:
            self.queue.ends.discard(end)
            ticket.leave()
            for timer in timers:
                timer.cancel()
            for task in tasks:
                task.cancel()
            for i in range(len(tasks)):
                if any(choice.finish_reason is None or choice.running for choice in self._choices_of(i)):
                    context.engine.abort(self._request_id(i))
            for choice in self.choices:
                if choice.finish_reason is None:
                    context.metrics.answer_ended("abort", len(choice.ids))

    def prompt_logprobs(self, prompt: int) -> Sequence[TokenLogprob | None]:
        """Those of a prompt's tokens, complete once the first piece of one of its choices has come."""
        return self._choices_of(prompt)[0].prompt_logprobs or ()

    async def complete(self) -> list[AnswerPiece]:
        """The choices in order, each as a single piece: all of `pieces` joined."""
        parts: list[list[AnswerPiece]] = [[] for _ in self.choices]
        async for each in self.pieces():
            choice, piece = each
            if (
                isinstance(piece, AnswerPiece) and each is not ACCEPTED
            ):  # which may come behind the last piece of a choice
                parts[choice].append(piece)
        return [
            AnswerPiece(
                "".join(piece.text for piece in pieces),
                sum(piece.tokens for piece in pieces),
                [token for piece in pieces for token in piece.logprobs],
                pieces[-1].finish_reason,
                [part for piece in pieces for part in piece.parts],
            )
            for pieces in parts
        ]

    async def _listen(self, prompt: int, ids: Sequence[int], events: asyncio.Queue) -> None:
        """Submit a prompt in its turn, say so, and pass its events on; at their end None, or what went wrong."""
        assert self._ticket is not None, "it was admitted"
        try:
            await self._ticket.turn()
            async with self._room:
                await self._follow(prompt, ids, events)
        except Exception as error:
            events.put_nowait((prompt, error))

    async def _follow(self, prompt: int, ids: Sequence[int], events: asyncio.Queue) -> None:
        assert self._ticket is not None, "it was admitted"
        if self.generation.params.constraint is not None:
            self._ticket.prepare(under_way=True)
        with renamed({"constraint": self.generation.form_field}):
            stream = await self._submit(prompt, ids)
        self._ticket.prepare(under_way=False)
        events.put_nowait((prompt, "submitted"))
        try:
            async for event in stream:
                events.put_nowait((prompt, event))
                if self._sending and events.qsize() > self._most_unread:  # sent is only what the client takes
                    waiting = f"{events.qsize()} parts of it waited to be read"
                    raise RequestError(408, "answer_not_read", f"The answer was ended: {waiting}. Read it as it comes.")
        finally:
            await stream.aclose()
        events.put_nowait((prompt, None))

    async def _submit(self, prompt: int, ids: Sequence[int]) -> "EventStream | AsyncGenerator[Event, None]":
        """The engine's events of a prompt. Raises as its `submit`."""
        engine, params, eos_ids = self.context.engine, self.generation.params, self.context.text.eos_ids
        name, salt, beams = self._request_id(prompt), self._salt(), self.generation.beams
        options = RequestOptions(eos_ids=eos_ids, request_id=name, salt=salt)
        if self.adapter_digest:
            options["adapter"] = self.adapter_digest
        if priority := self._priority():
            options["priority"] = priority
        if beams is None:
            return await engine.submit(ids, params, **options)
        longest = params.max_tokens or self.context.loaded().max_model_len - len(ids)
        return beam_stream(engine, ids, BeamSearch(beams, beams.ends(eos_ids), longest), name, options)

    def _enter(self) -> Ticket:
        """A place in the queue. Raises RequestError, as the queue does."""
        key, tokens, counts = self.principal.name, self.generation.prompt_tokens, self.context.key_metrics
        try:
            ticket = self.queue.enter(self.principal, tokens, self._priority())
        except Overloaded:
            counts.refused(key)
            raise
        counts.admitted(key)
        return ticket

    def _priority(self) -> int:
        """Of this request among those of its key. Raises RequestError for one that the key may not name."""
        least, named = self.principal.priority, self.generation.priority
        if named is not None and named < least:
            message = f"priority: {named} is more urgent than {least}, the most urgent one of this key."
            raise RequestError(403, "priority_not_allowed", message, param="priority")
        return max(0, least) if named is None else named

    def _timers(self, end: Callable[[RequestError], None]) -> list[asyncio.TimerHandle]:
        """What ends the request when its first token, or its last one, takes too long."""
        limits, loop = self.context.limits, asyncio.get_running_loop()
        spent = time.monotonic() - self.arrived
        total = min(self._timeout or math.inf, limits.total_seconds or math.inf)
        timers = []
        if total < math.inf:
            message = f"The answer was not complete within {total:g} seconds."
            late = RequestError(504, "deadline_exceeded", message)
            timers.append(loop.call_later(max(0, total - spent), end, late))
        if limits.first_token_seconds:
            message = f"No token was computed within {limits.first_token_seconds:g} seconds."
            none = RequestError(503, "first_token_timeout", message)
            wait = max(0, limits.first_token_seconds - spent)
            timers.append(loop.call_later(wait, lambda: end(none) if self.first_token_seconds is None else None))
        return timers

    def _salt(self) -> str:
        """What prefixes in the cache are shared under: nobody's but this key's, and of those this salt's."""
        own = self.generation.cache_salt
        return f"{self.principal.salt}/{own}" if own else self.principal.salt

    def _request_id(self, prompt: int) -> str:
        return f"{self.id}-{prompt}"

    def _choices_of(self, prompt: int) -> list[AnswerBuilder]:
        n = self.generation.params.n
        return self.choices[prompt * n : (prompt + 1) * n]

    def _label(self) -> str:
        """This request in a log line; %r keeps line breaks of a client's label out of the log."""
        user = self.generation.user
        key = f" with key {self.principal.name}" if self.principal.salt else ""
        return f"request {self.id}{key}" + ("" if user is None else f" of {user!r}")

    def _piece(self, prompt: int, event: Event) -> AnswerPiece:
        """Apply one event of the engine, and count and time what it adds."""
        choice = self._choices_of(prompt)[event.index]
        unfinished = choice.finish_reason is None
        piece = choice.push(event)
        if piece.finish_reason == "error":
            LOG.error("%s: prompt %d failed in the engine: %s", self._label(), prompt, event.error)
            self.context.metrics.answer_ended("error", len(choice.ids))
            raise RequestError(503, "engine_failed", ENGINE_FAILED)
        if event.ids or event.finish_reason not in (None, "abort"):
            self._count_prompt(prompt)
        if unfinished and event.usage is not None and event.index == 0:
            self.cached_tokens += event.usage.cached_tokens
            self._charge(-event.usage.cached_tokens)
        if event.usage is not None:
            self.usages.append(event.usage)
            self.context.metrics.answer_computed(event.usage)
        if piece.tokens:
            self._count(choice, piece.tokens)
        if event.vector is not None:
            self._begun()
        if piece.finish_reason is not None:
            if choice.running:  # ended by a stop string: the engine need not go on with it
                self.context.engine.abort(self._request_id(prompt), event.index)
            self.context.metrics.answer_ended(piece.finish_reason, len(choice.ids))
        return piece

    def _count_prompt(self, prompt: int) -> None:
        """What comes of a prompt says that it was computed: it counts, also where its client leaves later."""
        if prompt in self._uncounted:
            self._uncounted.remove(prompt)
            tokens = len(self.generation.prompts[prompt])
            self.context.metrics.prompt_computed(tokens)
            self.context.key_metrics.prompt_computed(self.principal.name, tokens)

    def _count(self, choice: AnswerBuilder, tokens: int) -> None:
        now, metrics, before = time.monotonic(), self.context.metrics, self._token_times.get(choice)
        if before is None:
            metrics.first_token(now - self.arrived)
            self._begun()
        else:
            for _ in range(tokens):  # those of one step share its time
                metrics.next_token((now - before) / tokens)
        self._token_times[choice] = now
        metrics.sent(tokens)
        self.context.key_metrics.generated(self.principal.name, tokens)
        self._charge(tokens)

    def _begun(self) -> None:
        """The first token, or vector, of one of its answers has come."""
        if self.first_token_seconds is None:
            self.first_token_seconds = time.monotonic() - self.arrived
        if self._ticket is not None:
            self._ticket.began()

    def _charge(self, tokens: int) -> None:
        if self._ticket is not None:
            self._ticket.charge(tokens)
