"""OpenAI-shaped errors: the only way an error leaves the server. Causes that are ours are logged, not sent."""

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from roofline.common import log
from roofline.common.errors import CapacityError, ConfigError, RequestError, RooflineError

LOG = log.get("server")
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
ENGINE_FAILED = "The engine failed while this request was running; it was not completed."


def error_body(status: int, code: str, message: str, param: str | None = None) -> dict:
    """The object that OpenAI clients read."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message[:2048], "type": kind, "param": param and param[:256], "code": code}}


def error_response(
    status: int, code: str, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """An error as an HTTP response."""
    content = msgspec.json.encode(error_body(status, code, message, param))
    return Response(content, status, dict(headers or {}), media_type="application/json")


class Overloaded(RequestError):
    """429 with the seconds after which a retry makes sense."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(429, "overloaded", message)
        self.retry_after = retry_after


def from_exception(error: Exception) -> Response:
    """The response of an exception. Anything but the errors a request can cause is a bug of ours: 500, no details."""
    known = as_request_error(error)
    if known is None:
        LOG.exception("unexpected error while answering", exc_info=error)
        return error_response(500, "internal_error", "The server made a mistake; its log has the cause.")
    headers = {}
    if isinstance(known, Overloaded):
        headers["Retry-After"] = str(known.retry_after)
    elif known.status == 503:
        headers["Retry-After"] = "1"
    elif known.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return error_response(known.status, known.code, str(known), known.param, headers)


def as_request_error(error: Exception) -> RequestError | None:
    """What a client may be told about `error`; None when nothing."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, CapacityError):
        return RequestError(400, "context_length_exceeded", str(error))
    if isinstance(error, RooflineError) and not isinstance(error, ConfigError):
        return RequestError(400, "unsupported", str(error))
    return None
