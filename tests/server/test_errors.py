"""What a client is told about each kind of error, and when it should come back."""

import re

import msgspec
import pytest

from roofline.common.errors import CapacityError, ConfigError, RequestError, RooflineError
from roofline.server.adapters import named_path
from roofline.server.errors import Overloaded, error_body, error_form, from_exception, message_of

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


LONG = "".join(chr(97 + i % 26) for i in range(300))
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
RESPONSE = {"model": "tiny", "input": "Hi"}
# (method, path, body, the beginning of the message): what a client wrote is repeated up to a length.
REPEATED = [
    ("GET", f"/{LONG}", None, f"There is no route GET /{LONG[:199]}."),
    ("GET", f"/page/{LONG}", None, f"There is no route GET /page/{LONG[:194]}."),
    ("ABCDEFGHIJKLMNOPQRST", f"/{LONG}", None, f"There is no route ABCDEFGHIJKLMNOP /{LONG[:199]}."),
    ("ABCDEFGHIJKLMNOPQRST", f"/v1/models/{LONG}", None, f"ABCDEFGHIJKLMNOP /v1/models/{LONG[:189]} is not a method"),
    ("GET", f"/v1/models/{LONG}", None, f"The model {LONG[:100]!r} is not served here; 'tiny' is."),
    ("GET", f"/v1/adapters/{LONG}", None, f"There is no adapter {LONG[:100]!r}."),
    ("DELETE", f"/v1/adapters/{LONG}", None, f"There is no adapter {LONG[:100]!r}."),
    ("GET", f"/v1/responses/{LONG}", None, f"There is no stored response {LONG[:100]!r}."),
    (
        "POST",
        "/v1/chat/completions",
        CHAT | {"model": LONG},
        f"The model {LONG[:100]!r} is not served here; 'tiny' is.",
    ),
    ("POST", "/v1/chat/completions", CHAT | {LONG: 1}, f"Unknown field: {LONG[:100]}."),
    ("POST", "/v1/responses", RESPONSE | {"reasoning": {LONG: 1}}, f"Unknown field: reasoning.{LONG[:100]}."),
    ("POST", "/v1/responses", RESPONSE | {"tools": [{"type": LONG}]}, f"tools.0.type: {LONG[:64]!r} is not supported"),
    ("POST", "/v1/responses", RESPONSE | {"input": [{"type": LONG}]}, f"input.0.type: items of type {LONG[:64]!r} are"),
    (
        *("POST", "/v1/responses", RESPONSE | {"input": [{"role": "user", "content": [{"type": LONG}]}]}),
        f"input.0.content.0: the model reads text, and no parts of type {LONG[:64]!r}.",
    ),
    (
        *("POST", "/v1/responses", RESPONSE | {"previous_response_id": LONG[:200]}),
        f"previous_response_id: {LONG[:100]!r} cannot be gone on from: it is not stored.",
    ),
    (
        *("POST", "/v1/batches", {"endpoint": LONG, "input_file_id": "f", "completion_window": "1h"}),
        f"endpoint: {LONG[:100]!r} is not one of /v1/",
    ),
]


REPEATED_404 = re.compile("There is no|The model|previous_response_id")


@pytest.mark.parametrize(
    ("method", "path", "body", "message"),
    REPEATED,
    ids=[f"{m[:4]} {p[:20]} {i}" for i, (m, p, *_) in enumerate(REPEATED)],
)
def test_what_a_client_wrote_is_repeated_up_to_a_length(call, make_context, tmp_path, method, path, body, message):
    answer = call(method, path, json=body, context=make_context(batch_folder=tmp_path))
    error = answer.json()["error"]
    assert error["message"].startswith(message)
    assert answer.status_code == (405 if "is not a method" in message else 404 if REPEATED_404.match(message) else 400)
    if message.startswith("Unknown field"):
        assert error["param"] == message.removeprefix("Unknown field: ").rstrip(".")


def test_other_forms_repeat_no_more(call):
    ollama = call("POST", "/api/chat", json={"model": LONG, "messages": []})
    assert ollama.json()["error"].endswith(f"model '{LONG[:100]}' not found")
    body = {"text_input": "Hi", LONG: 1, "parameters": {LONG: 1}}
    triton = call("POST", "/v2/models/tiny/generate", json=body)
    assert triton.json()["error"] == f"parameters.{LONG[:100]}: stands beside parameters, or there."
    assert message_of(RequestError(400, "c", "Too long.", param=LONG)) == f"{LONG[:256]}: Too long."
    with pytest.raises(ConfigError) as refused:
        named_path(LONG)
    assert str(refused.value).startswith(f"adapter {LONG[:100]!r}: give it as NAME=PATH")


USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TURN = {"role": "assistant", "content": "a", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "7", "tool_call_id": "c"}
# The place of a name in the last message -> that message with it there.
NAMES = {
    "name": lambda name: {**USER, "name": name},
    "tool_calls.0.id": lambda name: {**TURN, "tool_calls": [{**CALL, "id": name}]},
    "tool_calls.0.function.name": lambda name: {
        **TURN,
        "tool_calls": [{**CALL, "function": {"name": name, "arguments": "{}"}}],
    },
    "tool_call_id": lambda name: {**RESULT, "tool_call_id": name},
}


def problem(answer) -> tuple[str, str]:
    """The field and the words of a refusal; empty where there is none, or one of how messages follow each other."""
    error = {} if answer.status_code == 200 else answer.json()["error"]
    error = {"param": error.partition(":")[0], "message": error} if isinstance(error, str) else error
    message = error.get("message", "")
    return (error["param"], message) if "should have at most" in message else ("", "")


@pytest.mark.parametrize("place", NAMES)
def test_names_in_a_conversation_are_bounded(call, place):
    for length, refused in ((1, ""), (256, ""), (257, f"messages.1.{place}")):
        body = {**CHAT, "messages": [USER, NAMES[place]("n" * length)]}
        assert problem(call("POST", "/v1/chat/completions", json=body))[0] == refused


@pytest.mark.parametrize(("count", "status"), [(0, 200), (1, 200), (1024, 200), (1025, 400)])
def test_a_message_has_so_many_parts(call, engine, count, status):
    engine.description = msgspec.structs.replace(engine.description, max_model_len=10_000)
    parts = [{"type": "text", "text": ""}] * count
    answer = call("POST", "/v1/chat/completions", json={**CHAT, "messages": [{"role": "user", "content": parts}]})
    assert answer.status_code == status


@pytest.mark.parametrize(("count", "status"), [(1, 200), (128, 200), (129, 400)])
def test_a_message_calls_so_many_tools(call, engine, count, status):
    engine.description = msgspec.structs.replace(engine.description, max_model_len=10_000)
    calls = [{**CALL, "id": f"c{i}"} for i in range(count)]
    results = [{**RESULT, "tool_call_id": each["id"]} for each in calls]
    messages = [*CHAT["messages"], {**TURN, "tool_calls": calls}, *results]
    assert call("POST", "/v1/chat/completions", json={**CHAT, "messages": messages}).status_code == status


OLLAMA_CALL = {"function": {"name": "f", "arguments": {}}}
OLLAMA_NAMES = {
    "tool_calls.0.id": lambda name: {**TURN, "tool_calls": [{**OLLAMA_CALL, "id": name}]},
    "tool_calls.0.function.name": lambda name: {
        **TURN,
        "tool_calls": [{"function": {"name": name, "arguments": {}}}],
    },
    "tool_name": lambda name: {"role": "tool", "content": "7", "tool_name": name},
    "tool_call_id": lambda name: {"role": "tool", "content": "7", "tool_call_id": name},
}


@pytest.mark.parametrize("place", OLLAMA_NAMES)
def test_names_in_ollamas_conversations_are_bounded(call, place):
    for length, refused in ((1, ""), (256, ""), (257, f"messages.1.{place}")):
        body = {"model": "tiny", "stream": False, "messages": [USER, OLLAMA_NAMES[place]("n" * length)]}
        assert problem(call("POST", "/api/chat", json=body))[0] == refused


def test_a_message_of_ollamas_calls_so_many_tools(call):
    for count, refused in ((128, ""), (129, "messages.1.tool_calls")):
        turn = {**TURN, "tool_calls": [OLLAMA_CALL] * count}
        body = {"model": "tiny", "stream": False, "messages": [USER, turn]}
        assert problem(call("POST", "/api/chat", json=body))[0] == refused


@pytest.mark.parametrize(("salt", "status"), [("", 400), ("s", 200)])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_salt_has_a_character(call, path, salt, status):
    body = CHAT if "chat" in path else RESPONSE if "responses" in path else {"model": "tiny", "prompt": "Hi"}
    assert call("POST", path, json={**body, "cache_salt": salt}).status_code == status


def test_the_form_of_errors_is_that_of_the_path_or_of_what_it_begins_with():
    forms = {"/a": message_of, "/b/*": str, "/b/c/*": repr}
    for path, form in (("/a", message_of), ("/a/", error_body), ("/b/", str), ("/b/c/d", str), ("/b", error_body)):
        assert error_form(path, forms) is form
    assert error_form("/b.", forms) is error_body
