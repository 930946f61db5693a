"""The outermost layer: every request of every route, known or not, passes here first.

Default-deny: without the key only /health answers. Sizes are bounded while bytes arrive, not after.
"""

import asyncio
import hmac
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from roofline.common.errors import RequestError
from roofline.server.context import Context
from roofline.server.errors import from_exception

OPEN_PATHS = frozenset({"/health"})
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class Gate:
    """ASGI middleware that checks who asks and how much they send."""

    def __init__(self, app: ASGIApp, context: Context) -> None:
        self.app, self.context = app, context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # no websockets here: refuse before the handshake
            return await send({"type": "websocket.close", "code": 1008})
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            self._admit(scope)
            await self.app(scope, self._bounded(scope, receive), watched_send)
        except Exception as error:
            if started:
                raise  # half an answer is out: the connection must break, which uvicorn does
            await from_exception(error)(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        """Raise RequestError unless these headers may go on."""
        limits, headers = self.context.limits, dict(scope["headers"])
        if sum(len(name) + len(value) for name, value in scope["headers"]) > limits.header_bytes:
            raise RequestError(431, "headers_too_large", f"The headers are larger than {limits.header_bytes} bytes.")
        self._check_key(scope, headers)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            raise RequestError(400, "invalid_header", "content-length is not a number.")
        if int(length) > limits.body_bytes:
            raise self._too_large()
        if scope["method"] == "POST":
            kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
            if kind != b"application/json":
                # A page in a browser may send other types across sites unasked.
                raise RequestError(415, "unsupported_media_type", "The content type must be application/json.")

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if self.context.api_key is None:
            if self.context.host in LOOPBACK and _host_name(headers) not in LOOPBACK:
                # A name that resolves to this machine from a foreign page (DNS rebinding).
                raise RequestError(403, "host_not_allowed", "Without an API key only local host names are served.")
            return
        if scope["path"] in OPEN_PATHS:
            return
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        right = hmac.compare_digest(key.strip(), self.context.api_key.encode())
        if scheme.lower() != b"bearer" or not right:
            raise RequestError(401, "invalid_api_key", "Give the API key as: Authorization: Bearer KEY.")

    def _bounded(self, scope: Scope, receive: Receive) -> Callable:
        """`receive` that refuses a body beyond the bound and a sender that falls silent in the middle of one."""
        limits, received, complete = self.context.limits, 0, False

        async def bounded() -> Message:
            nonlocal received, complete
            if complete:
                return await receive()  # waits for the disconnect, however long the answer takes
            try:
                message = await asyncio.wait_for(receive(), limits.read_seconds)
            except TimeoutError as error:
                raise RequestError(408, "request_timeout", "The body of the request stopped arriving.") from error
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                complete = not message.get("more_body", False)
                if received > limits.body_bytes:
                    raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> RequestError:
        limit = self.context.limits.body_bytes
        return RequestError(413, "body_too_large", f"The body of a request may have at most {limit} bytes.")


def _host_name(headers: dict[bytes, bytes]) -> str:
    """'localhost:8000' -> 'localhost', '[::1]:80' -> '::1'."""
    host = headers.get(b"host", b"").decode("latin-1").strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
