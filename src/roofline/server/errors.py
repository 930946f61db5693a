"""The only way an error leaves the server, in the form of the API that was called; OpenAI's where no other is.

Causes that are ours are logged, not sent.
"""

from collections.abc import Callable, Mapping

import msgspec
from starlette.responses import Response

from roofline.common import log
from roofline.common.errors import CapacityError, ConfigError, RequestError, RooflineError
from roofline.common.json_types import JsonObject

LOG = log.get("server")
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
ENGINE_FAILED = "The engine failed while this request was running; it was not completed."


class Overloaded(RequestError):
    """429 with the seconds after which a retry makes sense."""

    def __init__(self, message: str, retry_after: int, code: str = "overloaded") -> None:
        super().__init__(429, code, message)
        self.retry_after = retry_after


def error_body(error: RequestError) -> JsonObject:
    """The object that OpenAI clients read."""
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    param = error.param and error.param[:256]
    return {"error": {"message": str(error)[:2048], "type": kind, "param": param, "code": error.code}}


def message_of(error: RequestError) -> str:
    """What is told in forms that have no place for the name of the field: the name comes first, unless it is there."""
    message = str(error)
    if error.param and error.param not in message:
        message = f"{error.param[:256]}: {message}"
    return message[:2048]


ErrorForm = Callable[[RequestError], JsonObject]  # how an API writes an error
ErrorForms = Mapping[str, ErrorForm]  # by a path, or with * at its end by all that begin so


def error_form(path: str, forms: ErrorForms) -> ErrorForm:
    """How errors of this path are written."""
    if path in forms:
        return forms[path]
    return next((form for name, form in forms.items() if name[-1] == "*" and path.startswith(name[:-1])), error_body)


def from_exception(error: Exception, form: ErrorForm = error_body) -> Response:
    """The response of an exception."""
    reason = as_request_error(error)
    headers = {}
    if isinstance(reason, Overloaded):
        headers["Retry-After"] = str(reason.retry_after)
    elif reason.status == 503:
        headers["Retry-After"] = "1"
    elif reason.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    # The rest of a body is not waited for; behind headers that two programs read in two ways nothing is read.
    if reason.status in (408, 413, 431) or reason.code == "invalid_header":
        headers["Connection"] = "close"
    content = msgspec.json.encode(form(reason))
    return Response(content, reason.status, headers, media_type="application/json")


def as_request_error(error: Exception) -> RequestError:
    """What a client is told about `error`. Any but the errors a request can cause is a bug of ours, told without
    details; the log has them."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, CapacityError):
        return RequestError(400, "context_length_exceeded", str(error))
    if isinstance(error, RooflineError) and not isinstance(error, ConfigError):
        return RequestError(400, "unsupported", str(error))
    LOG.exception("unexpected error while answering", exc_info=error)
    return RequestError(500, "internal_error", "The server made a mistake; its log has the cause.")
