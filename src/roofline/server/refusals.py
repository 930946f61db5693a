"""Requests that are refused before, or within, what the application sees of them: their answers and log lines."""

from collections.abc import Iterable
from http import HTTPStatus

import msgspec
from uvicorn._types import HTTPScope

from roofline.common.errors import RequestError
from roofline.server.errors import error_body
from roofline.server.record import RecordSink, RequestRecord, request_id

# What the parser's words for a cause leave out.
REMEDIES = {
    "Invalid method encountered": "its method is none that is known; methods have capital letters alone",
    "Duplicate Content-Length": "it has two headers Content-Length",
    "Expected CRLF after version": "its request line does not end with CR LF behind the version",
}


def unknown_version() -> RequestError:
    """The refusal of a request of another version of HTTP."""
    return RequestError(505, "http_version_not_supported", "Requests are of HTTP/1.1 or HTTP/1.0.")


def unreadable(cause: str) -> RequestError:
    """The refusal of bytes that are no request. cause: in the parser's words."""
    return RequestError(400, "invalid_http", f"This is not a request of HTTP/1.1: {REMEDIES.get(cause, cause)}.")


def refusal(error: RequestError, identity: str) -> bytes:
    """The answer with which a connection ends. identity: the request's id."""
    body = msgspec.json.encode(error_body(error))
    head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
    lines = f"connection: close\r\nx-request-id: {identity}\r\ncontent-length: {len(body)}\r\n\r\n"
    return (head + lines).encode() + body


def mark(scope: HTTPScope, error: RequestError) -> str:
    """Have the log line of a request that the application may have begun with say what it was refused with; its id."""
    state = scope.setdefault("state", {})
    state["refused"] = error.status
    record = state.get("record")
    identity: str = record.id if record is not None else request_id(dict(scope["headers"]))
    state["request_id"] = identity
    return identity


def record_unseen(
    identity: str,
    request_line: bytes,
    headers: Iterable[tuple[bytes, bytes]],
    error: RequestError,
    sinks: Iterable[RecordSink],
) -> None:
    """Tell of a request that the application has not seen, as far as it can be read. identity: its id."""
    method, _, target = request_line.partition(b" ")
    path = target.partition(b" ")[0].partition(b"?")[0]
    record = RequestRecord(
        id=identity,
        method=method.decode("latin-1"),
        path=path.decode("latin-1"),
        headers=dict(headers),
        status=error.status,
        complete=True,
    )
    for sink in sinks:
        sink(record)
