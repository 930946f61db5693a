"""What a client is told about each kind of error, and when it should come back."""

import pytest

from roofline.common.errors import CapacityError, ConfigError, RequestError, RooflineError
from roofline.server.errors import Overloaded, error_body, from_exception, message_of

KINDS = [
    (CapacityError("the prompt", 3, 2, "pages", "Shorten it."), 400, "context_length_exceeded"),
    (RooflineError("this cannot be done"), 400, "unsupported"),
    (ConfigError("ours"), 500, "internal_error"),
    (ValueError("ours"), 500, "internal_error"),
    (RequestError(418, "teapot", "short and stout"), 418, "teapot"),
]


@pytest.mark.parametrize(("error", "status", "code"), KINDS, ids=lambda value: type(value).__name__)
def test_an_error_has_the_status_of_its_kind(error, status, code):
    response = from_exception(error)
    assert response.status_code == status
    assert f'"code":"{code}"'.encode() in response.body
    assert (b"ours" in response.body) is False


@pytest.mark.parametrize(
    ("status", "kind", "headers"),
    [
        (400, "invalid_request_error", {}),
        (401, "authentication_error", {"www-authenticate": "Bearer"}),
        (403, "permission_error", {}),
        (404, "not_found_error", {}),
        (429, "rate_limit_error", {}),
        (499, "invalid_request_error", {}),
        (500, "server_error", {}),
        (503, "server_error", {"retry-after": "1"}),
    ],
)
def test_a_status_has_its_type_and_headers(status, kind, headers):
    error = RequestError(status, "some_code", "Words.", param="field")
    assert error_body(error) == {"error": {"message": "Words.", "type": kind, "param": "field", "code": "some_code"}}
    sent = dict(from_exception(error).headers)
    assert {name: sent.get(name) for name in ("retry-after", "www-authenticate") if name in sent} == headers


def test_a_full_queue_says_when_to_come_back():
    response = from_exception(Overloaded("Full.", 17))
    assert (response.status_code, response.headers["retry-after"]) == (429, "17")


def test_words_of_any_length_stay_short():
    body = error_body(RequestError(400, "c", "x" * 3000, param="y" * 300))["error"]
    assert (len(body["message"]), len(body["param"])) == (2048, 256)
    assert error_body(RequestError(400, "c", "x"))["error"]["param"] is None


def test_forms_without_a_place_for_the_field_have_it_in_the_message():
    assert message_of(RequestError(400, "c", "Too long.", param="inputs")) == "inputs: Too long."
    assert message_of(RequestError(400, "c", "inputs: too long.", param="inputs")) == "inputs: too long."
    assert message_of(RequestError(400, "c", "Too long.")) == "Too long."
    assert len(message_of(RequestError(400, "c", "x" * 3000, param="y" * 300))) == 2048
