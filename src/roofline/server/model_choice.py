"""Which of several models a request is for, and what its client sees while that model is being loaded."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from types import MappingProxyType
from urllib.parse import unquote

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from roofline.common.json_escapes import parsed
from roofline.server.context import Context
from roofline.server.errors import ErrorForms, as_request_error, error_form
from roofline.server.models import ExtraModel, Models
from roofline.server.response import STREAM_HEADERS, one_line

INLINE_BYTES = 16 << 10  # larger bodies are looked at on a thread
PROGRESS_SECONDS = 1.0  # between lines of progress
IN_PATH = re.compile(r"/v2/models/(?P<model>.+?)/(generate|generate_stream)")
# Streams of server-sent events, whose clients skip comments: what stands before the error that such a stream ends with.
EVENTS = {
    "/v1/chat/completions": b"",
    "/v1/completions": b"",
    "/v1/responses": b"event: error\n",
    "/v1/messages": b"event: error\n",
}

Inner = Callable[[Scope, Receive, Send], Awaitable[None]]


class _Choice(msgspec.Struct):
    """Fields of a body that say which model answers, and how."""

    model: object = None
    stream: object = None


class ModelChoice:
    """ASGI middleware: requests that name an extra model get its context, once it is loaded.

    uploads: paths whose bodies are files.
    """

    def __init__(self, app: ASGIApp, models: Models, error_forms: ErrorForms, uploads: Collection[str]) -> None:
        self.app, self.models, self.error_forms, self.uploads = app, models, error_forms, uploads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] in self.uploads:
            await self.app(scope, receive, send)
        else:
            body = await _read(receive)
            await answer_with_model(self.models, scope, body, receive, send, self.app, self.error_forms)


async def answer_with_model(
    models: Models,
    scope: Scope,
    body: bytes,
    receive: Receive,
    send: Send,
    inner: Inner,
    error_forms: ErrorForms = MappingProxyType({}),
) -> None:
    """Have `inner` answer a request with the model that its path or body names. Raises RequestError.

    receive: what comes after the body.
    """
    choice = await asyncio.to_thread(_choice, body) if len(body) > INLINE_BYTES else _choice(body)
    path, in_path = scope["path"], IN_PATH.fullmatch(scope["path"])
    model = models.find(unquote(in_path["model"]) if in_path else choice.model)
    if model is None:
        return await inner(scope, _replayed(body, receive), send)
    early: EarlyStream | None = None
    if model.loaded is None and choice.stream is True and path in EVENTS:
        early = EarlyStream(send, EVENTS[path])
    entering = asyncio.create_task(models.enter(model))
    try:
        scope.setdefault("state", {})["context"] = await _entered(entering, model, receive, early)
        await inner(scope, _replayed(body, receive), send if early is None else early.send)
    except Exception as error:
        if early is None or not early.begun:
            raise
        await early.fail(msgspec.json.encode(error_form(path, error_forms)(as_request_error(error))))
    finally:
        entering.cancel()
        await asyncio.gather(entering, return_exceptions=True)
        if not entering.cancelled() and entering.exception() is None:
            models.leave(model)


async def _entered(
    entering: "asyncio.Task[Context]", model: ExtraModel, receive: Receive, early: "EarlyStream | None"
) -> Context:
    """The context of a request once its model is loaded; meanwhile its client is told how far it is. Raises as `enter`
    does, and ClientDisconnect where the client leaves first."""
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        while True:
            tasks = {entering, leaving}
            done, _ = await asyncio.wait(tasks, timeout=PROGRESS_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if entering in done:
                return entering.result()
            if leaving in done:
                raise ClientDisconnect
            if early is not None:
                await early.comment(f"{model.name}: {model.status()}")
    finally:
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)


class EarlyStream:
    """A stream of events that may begin before it is known whether there will be an answer: status 200 and comments.
    An error that comes then is its last event. Without a comment nothing of what is sent changes.

    before_error: what stands before an error's data.
    """

    def __init__(self, send: Send, before_error: bytes) -> None:
        self._send, self._before_error = send, before_error
        self._refusal: list[bytes] | None = None  # parts of the body of a response that is no stream
        self.begun = False

    async def comment(self, text: str) -> None:
        """A line that clients skip."""
        if not self.begun:
            self.begun = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), *STREAM_HEADERS]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        line = f": {text}\n\n".encode()
        await self._send({"type": "http.response.body", "body": line, "more_body": True})

    async def send(self, message: Message) -> None:
        """What the application sends."""
        if not self.begun:
            return await self._send(message)
        if message["type"] == "http.response.start":
            self._refusal = None if message["status"] == 200 else []
        elif self._refusal is None:
            await self._send(message)
        else:
            self._refusal.append(message.get("body", b""))
            if not message.get("more_body", False):
                await self.fail(b"".join(self._refusal))

    async def fail(self, error: bytes) -> None:
        """End with an error, given as one line of JSON."""
        event = self._before_error + b"data: " + one_line(error) + b"\n\n"
        await self._send({"type": "http.response.body", "body": event, "more_body": False})


def _choice(body: bytes) -> _Choice:
    try:
        return parsed(body, partial(msgspec.json.decode, type=_Choice))
    except (msgspec.MsgspecError, RecursionError):
        return _Choice()  # the route says what is wrong with it


async def _read(receive: Receive) -> bytes:
    """A body. Raises ClientDisconnect."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` of a request whose body was read."""
    pending = [body]

    async def replayed() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replayed
