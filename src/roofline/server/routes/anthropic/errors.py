"""Errors as Anthropic's clients read them."""

from roofline.common.errors import RequestError
from roofline.common.json_types import JsonObject
from roofline.server.errors import message_of

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


# By this code Anthropic's packages know to send the conversation whole, without a thread.
NO_THREADS = "thread_unsupported_request"


def error_body(error: RequestError) -> JsonObject:
    """The object of an error; its message names the field at fault."""
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    content: JsonObject = {"type": kind, "message": message_of(error)}
    if error.code == NO_THREADS:
        content["details"] = {"error_code": NO_THREADS, "unsupported": ["thread"]}
    return {"type": "error", "error": content}
