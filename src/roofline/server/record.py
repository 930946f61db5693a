"""What is known of each request when it has ended: of that its log line and its span are made.

Nothing of prompts and answers is kept here but how long they are.
"""

import re
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from roofline.server.answers import Answers
from roofline.server.keys import ANYBODY, LOCAL, NOBODY

REQUEST_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
KEYLESS = (LOCAL, ANYBODY, NOBODY)
RecordSink = Callable[["RequestRecord"], None]
CLIENT_LEFT = 499  # nginx's number for a client that left before there was a status


@dataclass
class RequestRecord:
    """One request. Times in seconds, `began_at` since 1970.

    id: the client's X-Request-Id where that is sane, else a fresh one; the answer has it in its headers.
    status: CLIENT_LEFT where nothing was sent. complete: whether the last byte of the answer was handed over.
    """

    id: str
    method: str
    path: str
    headers: dict[bytes, bytes]
    began_at: float = field(default_factory=lambda: time.time())
    arrived: float = field(default_factory=lambda: time.monotonic())
    status: int = CLIENT_LEFT
    complete: bool = False
    seconds: float = 0.0
    principal: str | None = None  # the name of the key
    answers: Answers | None = None  # where tokens were to be generated


def request_id(headers: dict[bytes, bytes]) -> str:
    """What a request is named by: as its client says, where that is sane."""
    name = headers.get(b"x-request-id", b"")
    return name.decode() if REQUEST_ID.fullmatch(name) is not None else uuid.uuid4().hex


def record_of(request: Request) -> RequestRecord:
    """The record of a request that is being answered."""
    return request.state.record


class Recorder:
    """ASGI middleware around all others: names each request, and tells `sinks` what came of it."""

    def __init__(self, app: ASGIApp, sinks: Iterable[RecordSink]) -> None:
        self.app, self.sinks = app, tuple(sinks)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        state = scope.setdefault("state", {})
        identity = state.get("request_id") or request_id(headers)  # the former where it was refused already
        record = RequestRecord(identity, scope["method"], scope["path"], headers)
        state["record"] = record

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", record.id.encode())]}
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                record.complete = True

        try:
            await self.app(scope, receive, marked)
        finally:
            record.seconds = time.monotonic() - record.arrived
            if record.status == CLIENT_LEFT and "refused" in state:  # by `protocol.py`, within the body
                record.status, record.complete = state["refused"], True
            principal = state.get("principal")  # none where the request was refused before anybody looked at its key
            if principal is not None and principal not in KEYLESS:
                record.principal = principal.name
            for sink in self.sinks:
                sink(record)
