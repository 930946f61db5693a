"""Routes that lines of batches may name, and how one is called without a connection: what it answers is what a client
would have been sent."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.types import Message, Receive, Scope, Send

from roofline.common.errors import RequestError
from roofline.common.json_escapes import parsed
from roofline.server.errors import from_exception
from roofline.server.keys import Principal
from roofline.server.model_choice import answer_with_model
from roofline.server.record import RequestRecord

CHAT, EMBEDDINGS, RESPONSES = "/v1/chat/completions", "/v1/embeddings", "/v1/responses"
# Those that the application has no route for are not offered.
PATHS = (CHAT, "/v1/completions", EMBEDDINGS, RESPONSES)
Endpoint = Callable[[Request], Awaitable[Response]]
Endpoints = Mapping[str, Endpoint]


class RouteReply(NamedTuple):
    """What a route answered: its status, the id of the request, the JSON of its body."""

    status: int
    request_id: str
    body: bytes


def endpoints_of(routers: Iterable[APIRouter]) -> Endpoints:
    """The functions of these routes by path, of those that batches may name."""
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    posted = {route.path: route.endpoint for route in routes if "POST" in (route.methods or set())}
    return {path: posted[path] for path in PATHS if path in posted}


async def call(app: FastAPI, path: str, body: bytes, principal: Principal) -> RouteReply:
    """The answer of one of `endpoints_of` to a body, as a client with that key would get it; its errors are answers
    too. Cancelling the call ends the request."""
    request_id = uuid.uuid4().hex
    headers = {b"content-type": b"application/json"}
    record = RequestRecord(request_id, "POST", path, headers)
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": list(headers.items()),
        "app": app,
        "state": {"principal": principal, "record": record},
    }
    parts: list[bytes] = []
    status = 0

    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        response = await app.state.batch_endpoints[path](Request(scope, receive))
        await response(scope, receive, send)

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    try:
        refuse_other_ways(body)
        await answer_with_model(app.state.models, scope, body, _nobody_leaves, send, endpoint)
    except Exception as error:
        parts.clear()
        await from_exception(error)(scope, _nobody_leaves, send)
    return RouteReply(status, request_id, b"".join(parts))


async def _nobody_leaves() -> Message:
    """What comes after the body, from a client that does not exist."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


class _Ways(msgspec.Struct):
    """Fields that ask for another answer than one whole object."""

    stream: object = None
    background: object = None


def refuse_other_ways(body: bytes) -> None:
    """Raises RequestError for a body that asks for a stream of events, or not to be waited for."""
    try:
        ways = parsed(body, partial(msgspec.json.decode, type=_Ways))
    except (msgspec.MsgspecError, RecursionError):
        return  # the route says what is wrong with it
    for name in ("stream", "background"):
        if getattr(ways, name):
            message = f"{name} is not supported in batches, whose answers are written as whole objects. Leave it out."
            raise RequestError(400, "unsupported_parameter", message, param=name)
