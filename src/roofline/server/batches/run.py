"""Lines of requests, several at a time, each until it has an answer: the same loop for the server and for a command."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable

import msgspec
from fastapi import FastAPI

from roofline.common.errors import RooflineError
from roofline.server.batches.endpoints import CHAT, EMBEDDINGS, RESPONSES, RouteReply, call
from roofline.server.batches.lines import Failure, Line
from roofline.server.context import Context
from roofline.server.keys import Principal

# Errors that are not the line's: it waits a moment and is sent again, however often.
LATER = frozenset({"overloaded", "too_many_streams", "engine_not_ready"})
GONE = frozenset({"engine_unavailable", "server_stopping"})  # nobody answers any more
AGAIN_SECONDS = 0.5
ENGINE_FAILURES = 3  # of the engine under a line, after which that is its answer


class Stopped(RooflineError):
    """Lines are answered no more: the server ends, or its engine is gone. What was written stays."""


class _Error(msgspec.Struct):
    class Told(msgspec.Struct):
        code: str | None = None
        message: str = ""

    error: Told


Answer = Callable[[Line], Awaitable[RouteReply]]
Record = Callable[[int, Line, RouteReply | Failure], None]  # the line's number first


def salt_of(context: Context, fingerprint: str, urls: Collection[str]) -> bytes:
    """Of the ids of answers to lines with these urls: the name and the fingerprint of the model, and of the settings
    that such answers depend on those that are not the model's own or the default."""
    parts, form = [context.name, fingerprint], context.text.chosen_format
    if form is not None and not {CHAT, RESPONSES}.isdisjoint(urls):
        parts.append(f"calls={form.calls} thinks={form.thinks}")
    kind = context.pooling.kind if context.pooling is not None else context.loaded().pooling
    if kind != "last" and EMBEDDINGS in urls:
        parts.append(f"pooling={kind}")
    return " ".join(parts).encode()


async def answer_lines(lines: Iterable[tuple[int, Line]], answer: Answer, record: Record, at_once: int) -> None:
    """Answer all lines, of which at most `at_once` have been read and not recorded. Raises what any of them raises,
    when the others have ended; cancelling ends all."""
    running: set[asyncio.Task[None]] = set()

    async def one(number: int, line: Line) -> None:
        record(number, line, await answer(line))

    try:
        for number, line in lines:
            running.add(asyncio.create_task(one(number, line)))
            if len(running) >= at_once:
                running = await _without_ended(running)
        while running:
            running = await _without_ended(running)
    finally:  # where several have failed, those that are not raised are looked at here too
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _without_ended(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """The tasks that still run once at least one has ended. Raises what an ended one raised."""
    done, rest = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return rest


class LineCaller:
    """Answers lines by the application's routes, in its idle time: while any other request is open none runs, and one
    that did is ended and begun anew. principal: whose requests they are, asked whenever one is begun."""

    def __init__(self, app: FastAPI, principal: Callable[[], Principal]) -> None:
        self._app, self._principal = app, principal

    async def answer(self, line: Line) -> RouteReply:
        """The answer to a line. Raises Stopped, and what `principal` raises."""
        failures = 0
        while True:
            reply = await self._undisturbed(line)
            error = _error_of(reply)
            if error.code in GONE:
                raise Stopped(error.message.rstrip("."))
            if error.code == "engine_failed":
                failures += 1
            if error.code not in LATER and not 0 < failures < ENGINE_FAILURES:
                return reply
            await asyncio.sleep(AGAIN_SECONDS)

    async def _undisturbed(self, line: Line) -> RouteReply:
        queue = self._app.state.queue
        while True:
            await queue.idle.wait()
            work = asyncio.create_task(call(self._app, line.url, bytes(line.body), self._principal()))
            disturbed = asyncio.create_task(queue.busy.wait())
            try:
                await asyncio.wait({work, disturbed}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    return work.result()
            finally:
                for task in (work, disturbed):
                    task.cancel()
                await asyncio.gather(work, disturbed, return_exceptions=True)


def _error_of(reply: RouteReply) -> _Error.Told:
    if reply.status == 200:
        return _Error.Told()
    try:
        return msgspec.json.decode(reply.body, type=_Error).error
    except msgspec.MsgspecError:
        return _Error.Told()
