"""The outermost layer: every request of every route, known or not, passes here first.

Default-deny: without a key only routes that declare themselves open answer (server/scopes.py). Sizes are bounded while
bytes arrive, not after.
"""

import asyncio
import re
from collections.abc import Callable, Collection
from types import MappingProxyType

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from roofline.common import log
from roofline.common.errors import RequestError
from roofline.common.loopback import LOOPBACK
from roofline.server.context import Context
from roofline.server.cors import AllowedOrigins
from roofline.server.errors import ErrorForms, error_form, from_exception
from roofline.server.keys import ANYBODY, LOCAL, NOBODY, Principal
from roofline.server.options import is_loopback
from roofline.server.scopes import ScopeTable, unknown_route

LOG = log.get("server")
HOST = re.compile(rb"([A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\])(:[0-9]{0,5})?")
SINGLE_HEADERS = {b"host": "Host", b"authorization": "Authorization", b"x-api-key": "X-Api-Key", b"origin": "Origin"}


class Gate:
    """ASGI middleware that checks who asks and how much they send."""

    def __init__(
        self,
        app: ASGIApp,
        context: Context,
        error_forms: ErrorForms = MappingProxyType({}),
        scopes: ScopeTable | None = None,
        uploads: Collection[str] = (),
    ) -> None:
        self.app, self.context, self.error_forms = app, context, error_forms
        self.uploads = uploads  # paths whose bodies are files
        self.scopes = ScopeTable(()) if scopes is None else scopes
        self.origins = AllowedOrigins(context.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # no websockets here: refuse before the handshake
            return await send({"type": "websocket.close", "code": 1008})
        started, headers = False, dict(scope["headers"])

        async def watched_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self.origins.mark(message, headers)
            await send(message)

        try:
            self._check_headers(scope)
            preflight = self.origins.preflight(scope["method"], headers)
            if preflight is not None:  # browsers send it without the key that the request itself will have
                return await preflight(scope, receive, watched_send)
            self._admit(scope)
            await self.app(scope, self._bounded(scope, receive), watched_send)
        except ClientDisconnect:  # in the middle of its body: nobody is there to be told
            LOG.debug("a client left before its request was complete")
        except Exception as error:
            if started:
                raise  # half an answer is out: the connection must break, which uvicorn does
            await from_exception(error, error_form(scope["path"], self.error_forms))(scope, receive, watched_send)

    def _check_headers(self, scope: Scope) -> None:
        """Raise RequestError unless these headers can be read in one way only."""
        limit = self.context.limits.header_bytes
        if sum(len(name) + len(value) for name, value in scope["headers"]) > limit:
            raise RequestError(431, "headers_too_large", f"The headers are larger than {limit} bytes.")
        names = [name for name, _ in scope["headers"]]
        for name, spelling in SINGLE_HEADERS.items():
            if names.count(name) > 1:  # one of them may be checked, another one believed
                raise RequestError(400, "invalid_header", f"There is more than one {spelling} header.")
        if not HOST.fullmatch(dict(scope["headers"]).get(b"host", b"").strip()):
            raise RequestError(400, "invalid_header", "The Host header is not a name and perhaps a port.")

    def _admit(self, scope: Scope) -> None:
        """Say in the scope's state who asks. Raise RequestError unless they may, and the body may be read."""
        headers = dict(scope["headers"])
        scope.setdefault("state", {})["principal"] = self._principal(scope, headers)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            raise RequestError(400, "invalid_header", "content-length is not a number.")
        if int(length) > self._most_bytes(scope):
            raise self._too_large(scope)
        if scope["method"] == "POST":
            coding = headers.get(b"content-encoding", b"identity").strip().lower()
            if coding not in (b"", b"identity"):
                problem = "The body has a content encoding, and none is unpacked here: send it as it is."
                raise RequestError(415, "unsupported_media_type", problem)
            kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
            if kind != b"application/json" and b"origin" in headers:
                # A page in a browser may send other types across sites unasked; browsers then name the page.
                raise RequestError(415, "unsupported_media_type", "The content type must be application/json.")

    def _principal(self, scope: Scope, headers: dict[bytes, bytes]) -> Principal:
        """Who asks, where they may ask for this path. Looks at the path as it is routed by, and at no other header."""
        keys, path = self.context.keys, scope["path"]
        if not keys.required and is_loopback(self.context.host):
            named = b"host" in headers or scope["http_version"] != "1.0"  # no browser sends HTTP/1.0, or no Host
            if named and _host_name(headers) not in (*LOOPBACK, self.context.host):
                # A name that resolves to this machine from a foreign page (DNS rebinding).
                raise RequestError(403, "host_not_allowed", "Without an API key only local host names are served.")
            return LOCAL
        principal = keys.identify(_key(headers)) if keys.required else ANYBODY
        if self.scopes.is_open(path):
            return principal or NOBODY
        if principal is None:
            raise RequestError(401, "invalid_api_key", "Give the API key as: Authorization: Bearer KEY.")
        if lacking := self.scopes.lacking(path, principal.scopes):
            if not self.scopes.knows(path):
                raise unknown_route(scope["method"], path)
            scopes = " or ".join(map(repr, lacking))
            raise RequestError(403, "insufficient_scope", f"This route needs a key with the scope {scopes}.")
        return principal

    def _bounded(self, scope: Scope, receive: Receive) -> Callable:
        """`receive` that refuses a body beyond the bound, and a sender that is silent within it or drips it."""
        limits, received, complete = self.context.limits, 0, False
        seconds = limits.upload_seconds if scope["path"] in self.uploads else limits.body_seconds
        end = asyncio.get_running_loop().time() + seconds

        async def bounded() -> Message:
            nonlocal received, complete
            if complete:
                return await receive()  # waits for the disconnect, however long the answer takes
            rest = end - asyncio.get_running_loop().time()
            try:
                message = await asyncio.wait_for(receive(), max(0, min(rest, limits.read_seconds)))
            except TimeoutError as error:
                slow = f"did not arrive within {seconds:g} seconds"
                silent = f"stopped arriving for {limits.read_seconds:g} seconds"
                problem = slow if rest < limits.read_seconds else silent
                raise RequestError(408, "request_timeout", f"The body of the request {problem}.") from error
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                complete = not message.get("more_body", False)
                if received > self._most_bytes(scope):
                    raise self._too_large(scope)
            return message

        return bounded

    def _most_bytes(self, scope: Scope) -> int:
        limits = self.context.limits
        return limits.upload_bytes if scope["path"] in self.uploads else limits.body_bytes

    def _too_large(self, scope: Scope) -> RequestError:
        limit = self._most_bytes(scope)
        return RequestError(413, "body_too_large", f"The body of a request may have at most {limit} bytes.")


def _host_name(headers: dict[bytes, bytes]) -> str:
    """'localhost:8000' -> 'localhost', '[::1]:80' -> '::1'."""
    host = headers.get(b"host", b"").decode("latin-1").strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _key(headers: dict[bytes, bytes]) -> bytes:
    """The key that a request gives, in OpenAI's header or else in Anthropic's; empty where it gives none."""
    if b"authorization" not in headers:
        return headers.get(b"x-api-key", b"").strip()
    scheme, _, key = headers[b"authorization"].partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
