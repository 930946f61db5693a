"""Pages of other sites in browsers: none may read an answer but those of the origins that the operator names."""

import re

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import Message

METHODS = "GET, POST, DELETE"
NAMES = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+( *, *[!#$%&'*+.^_`|~0-9A-Za-z-]+)*")  # of headers, as in a list
ANSWER_HEADERS = "retry-after, x-request-id"
SECONDS = "600"  # for which browsers remember the answer to a preflight


class AllowedOrigins:
    """The origins whose pages may read answers. A page gives the key itself: browsers are not told to add cookies."""

    def __init__(self, origins: frozenset[str]) -> None:
        self._origins = origins

    def preflight(self, method: str, headers: dict[bytes, bytes]) -> Response | None:
        """The answer to a browser that asks whether a page's request may be sent; None: it does not ask, or not for a
        page of an allowed origin."""
        if method != "OPTIONS" or b"access-control-request-method" not in headers or not self._allows(headers):
            return None
        allowed = {
            "Access-Control-Allow-Methods": METHODS,
            "Access-Control-Max-Age": SECONDS,
        }
        names = headers.get(b"access-control-request-headers", b"").strip()
        if NAMES.fullmatch(names):  # all that a page's client sends, such as x-stainless-os and anthropic-version
            allowed["Access-Control-Allow-Headers"] = names.decode("ascii")
        return Response(status_code=204, headers=allowed)

    def mark(self, message: Message, headers: dict[bytes, bytes]) -> None:
        """Add what lets the page of an allowed origin read the answer that begins with `message`."""
        if not self._origins:
            return
        answer = MutableHeaders(scope=message)
        answer.add_vary_header("Origin")  # so that no cache gives one origin's answer to another one
        if self._allows(headers):
            answer["Access-Control-Allow-Origin"] = headers[b"origin"].decode("latin-1")
            answer["Access-Control-Expose-Headers"] = ANSWER_HEADERS

    def _allows(self, headers: dict[bytes, bytes]) -> bool:
        return headers.get(b"origin", b"").decode("latin-1") in self._origins
