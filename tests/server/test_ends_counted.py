"""What a request was at when its client left: each answer of it is counted once by the time that its record is written,
and it has left nothing behind."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from roofline.server.app import create_app
from roofline.server.keys import NOBODY
from roofline.server.limits import Limits
from tests.server.test_metrics import figures_of

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "n": 2}
STREAM = {**CHAT, "stream": True}
MESSAGES = {"model": "tiny", "messages": CHAT["messages"], "stream": True, "max_tokens": 9}
TEXTS = {"model": "tiny", "prompt": ["Once", "Twice"]}
LARGE = " " * 20_000  # behind a body: it is read on a thread
REASONS = {
    f'vllm:request_success_total{{finished_reason="{reason}",}}': reason for reason in ("stop", "length", "abort")
}
COUNTERS = {**REASONS, "roofline:request_failure_total": "error"}


class Visit:
    """A request by a client that leaves at a moment that the test chooses.

    stuck: what a part of the answer contains that the client does not take; padding: what stands behind the body. When
    the request's record was written there were so many `ended` answers, by reason, `admitted` requests, requests
    `waiting` in the queue, and requests `running` in the engine.
    """

    def __init__(self, context, path: str, body: dict[str, Any], stuck: bytes | None = None, padding: str = "") -> None:
        self.context, self.stuck = context, stuck
        self.app = create_app(context, spans=self._record)
        self.left, self.sending, self.records = asyncio.Event(), False, 0
        self.ended, self.admitted, self.waiting, self.running = dict[str, int](), 0, 0, 0
        content = (json.dumps(body) + padding).encode()
        self._messages = [{"type": "http.request", "body": content, "more_body": False}]
        headers = {"host": "127.0.0.1", "content-type": "application/json", "content-length": str(len(content))}
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }

    def cut_off(self) -> None:
        """Only half of the body arrives."""
        (whole,) = self._messages
        self._messages = [{**whole, "body": whole["body"][:40], "more_body": True}]

    def _record(self, record) -> None:
        figures = figures_of(self.context.metrics.exposition({}, up=True).decode())
        self.ended = {reason: int(figures[name]) for name, reason in COUNTERS.items() if figures[name]}
        self.admitted, self.records = int(figures["vllm:request_params_n_count"]), self.records + 1
        self.waiting, self.running = self.app.state.queue.waiting, len(self.context.engine.open)

    async def _receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop(0)
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if self.stuck is not None and self.stuck in message.get("body", b""):
            self.sending = True
            await asyncio.Event().wait()

    async def run(self, happened: Callable[["Visit"], bool]) -> None:
        """Leave once something has happened, and wait until the request is over."""
        task = asyncio.create_task(self.app(self.scope, self._receive, self._send))
        async with asyncio.timeout(20):
            while not happened(self) and not task.done():
                await asyncio.sleep(0)
            self.left.set()
            await task


def held(visit: Visit) -> bool:
    return visit.app.state.queue.held > 0


def computed(visit: Visit) -> bool:
    return bool(visit.context.engine.open)


def sending(visit: Visit) -> bool:
    return visit.sending


def read(visit: Visit) -> bool:
    return not visit._messages


def never(visit: Visit) -> bool:
    return False


CHATS = "/v1/chat/completions"
PHASES = {
    # what the request was at: its path and body, what the client does not take, when it leaves, how its answers ended
    "its body is read": (CHATS, CHAT, None, read, {}),
    "its large body is parsed": (CHATS, CHAT, None, read, {"abort": 2}),
    "held in the queue": (CHATS, STREAM, None, held, {"abort": 2}),
    "sent to the engine": (CHATS, STREAM, None, computed, {"abort": 2}),
    "computed, for an object": (CHATS, CHAT, None, computed, {"abort": 2}),
    "computed, of two prompts": ("/v1/completions", TEXTS, None, computed, {"abort": 2}),
    "its first part is sent": (CHATS, STREAM, b'"role":"assistant"', sending, {"abort": 2}),
    "a token is sent": (CHATS, STREAM, b'"content":"H"', sending, {"abort": 2}),
    "a token is sent, as messages": ("/v1/messages", MESSAGES, b'"text":"H"', sending, {"abort": 1}),
    "the end of its first answer is sent": (CHATS, STREAM, b'"finish_reason":"stop"', sending, {"stop": 1, "abort": 1}),
    "its stop string is sent": (
        CHATS,
        {**STREAM, "stop": "ell", "n": 1},
        b'"finish_reason":"stop"',
        sending,
        {"stop": 1},
    ),
    "the last line is sent": (CHATS, STREAM, b"[DONE]", sending, {"stop": 2}),
    "the object is sent": (CHATS, CHAT, b"Hello, world.", sending, {"stop": 2}),
    "it is over": (CHATS, {**STREAM, "max_tokens": 3}, None, never, {"length": 2}),
}


@pytest.mark.parametrize("name", PHASES)
def test_a_client_that_leaves(engine, make_context, name):
    path, body, stuck, when, ended = PHASES[name]

    async def run():
        visit = Visit(make_context(), path, body, stuck, LARGE if name == "its large body is parsed" else "")
        before = [visit.app.state.queue.enter(NOBODY, 512) for _ in range(8 if when is held else 0)]
        if when is computed:
            engine.gate.clear()
        if name == "its body is read":
            visit.cut_off()
        await visit.run(when)
        assert visit.ended == ended
        assert visit.admitted == bool(ended)
        assert (visit.records, visit.waiting, visit.running) == (1, len(before), 0)

    asyncio.run(run())


def test_one_that_waits_for_its_deadline_or_for_a_stopping_server(engine, make_context):
    engine.gate.clear()

    async def run():
        late = Visit(make_context(limits=Limits(total_seconds=0.01)), CHATS, CHAT)
        await late.run(never)
        assert (late.ended, late.admitted, late.waiting, late.running) == ({"abort": 2}, 1, 0, 0)
        stopped = Visit(make_context(), CHATS, STREAM)

        def stop(visit: Visit) -> bool:
            if computed(visit):
                visit.app.state.queue.stop()
            return False

        await stopped.run(stop)
        assert (stopped.ended, stopped.admitted, stopped.waiting, stopped.running) == ({"abort": 2}, 1, 0, 0)

    asyncio.run(run())
