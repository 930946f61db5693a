"""Every field is honoured or refused; every refusal is OpenAI-shaped and names its cause."""

import json

import pytest

from roofline.server.limits import Limits
from roofline.server.schema import NEUTRAL_CHAT, NEUTRAL_COMPLETION, NEUTRAL_MESSAGE
from roofline.server.validate import json_depth_within

USER = {"role": "user", "content": "Hi"}
CHAT = {"model": "tiny", "messages": [USER]}
TEXT = {"model": "tiny", "prompt": "Hi"}
BAD_CHAT = [
    ({"surprise": 1}, "surprise", "unknown_parameter"),
    ({"messages": [{**USER, "extra": 1}]}, "messages.0.extra", "unknown_parameter"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": [USER] * 1025}, "messages", "invalid_value"),
    ({"messages": "Hi"}, "messages", "invalid_value"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages.0.role", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "missing_parameter"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0.type",
        "invalid_value",
    ),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "invalid_value"),
    ({"messages": [{**USER, "name": "Ann"}]}, "messages.0.name", "unsupported_parameter"),
    ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    ({"store": True}, "store", "unsupported_parameter"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "unsupported_parameter"),
    ({"metadata": {"a": "b"}}, "metadata", "unsupported_parameter"),
    ({"user": 5}, "user", "invalid_value"),
    ({"user": "x" * 257}, "user", "invalid_value"),
    ({"safety_identifier": "x" * 257}, "safety_identifier", "invalid_value"),
    ({"model": "other"}, "model", "model_not_found"),
    ({"model": None}, "model", "invalid_value"),
    ({"temperature": "1"}, "temperature", "invalid_value"),
    ({"temperature": -0.1}, "temperature", "invalid_value"),
    ({"temperature": 2.1}, "temperature", "invalid_value"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"n": 17}, "n", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": True}, "n", "invalid_value"),
    ({"n": 1.5}, "n", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
    ({"max_tokens": 999}, "max_tokens", "context_length_exceeded"),
    ({"messages": [{"role": "user", "content": "x" * 1000}]}, "messages", "context_length_exceeded"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "invalid_value"),
    ({"logprobs": 1}, "logprobs", "invalid_value"),
    ({"top_logprobs": 1}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"stop": ["x"] * 17}, "stop", "invalid_value"),
    ({"stop": "ä" * 129}, "stop", "invalid_value"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop_token_ids": [300]}, "stop_token_ids", "invalid_value"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "invalid_value"),
    ({"logit_bias": {"300": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "invalid_value"),
    ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"seed": 2**64}, "seed", "invalid_value"),
]


def check(response, status, code, param=None):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert 0 < len(error["message"]) <= 2048
    assert len(response.content) <= Limits().error_bytes


@pytest.mark.parametrize(
    ("change", "param", "code"), BAD_CHAT, ids=[f"{p}-{i}" for i, (_, p, _) in enumerate(BAD_CHAT)]
)
def test_bad_field_is_refused_by_name(call, engine, change, param, code):
    status = 404 if code == "model_not_found" else 400
    check(call("POST", "/v1/chat/completions", json={**CHAT, **change}), status, code, param)
    assert not engine.submitted


def test_long_prompt_is_refused_with_counts(call):
    body = {**CHAT, "messages": [{"role": "user", "content": "x" * 1500}]}
    message = call("POST", "/v1/chat/completions", json=body).json()["error"]["message"]
    assert "1506" in message
    assert "1000" in message


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": ["a"] * 9, "n": 16}, "n"),
        ({"prompt": [1.5]}, "prompt.0"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [True]}, "prompt.0"),
    ],
)
def test_bad_completion_is_refused(call, engine, change, param):
    check(call("POST", "/v1/completions", json={**TEXT, **change}), 400, "invalid_value", param)
    assert not engine.submitted


@pytest.mark.parametrize("change", [{"echo": True}, {"best_of": 2}, {"suffix": "x"}])
def test_completion_fields_we_lack_are_refused(call, change):
    name = next(iter(change))
    check(call("POST", "/v1/completions", json={**TEXT, **change}), 400, "unsupported_parameter", name)


def test_neutral_values_pass(call):
    chat = {name: allowed[-1] for name, allowed in NEUTRAL_CHAT.items()}
    message = {name: allowed[-1] for name, allowed in NEUTRAL_MESSAGE.items()}
    body = {**CHAT, **chat, "messages": [{**USER, **message}]}
    assert call("POST", "/v1/chat/completions", json=body).status_code == 200
    text = {name: allowed[-1] for name, allowed in NEUTRAL_COMPLETION.items()}
    assert call("POST", "/v1/completions", json={**TEXT, **text}).status_code == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"nul",
        b"\xff\xfe",
        b'{"model": NaN}',
        b'{"a":' * 40 + b"1" + b"}" * 40,
        b"[" * 100_000,
        b'{"model": "\\ud800"}',
    ],
)
def test_not_json(call, raw):
    response = call("POST", "/v1/chat/completions", content=raw, headers={"content-type": "application/json"})
    check(response, 400, "invalid_json")


@pytest.mark.parametrize("depth", [1, 31, 32, 33, 60])
def test_json_depth_is_exact(depth):
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}"), (b'[{"]":', b"}]")):
        per_round = len(opening.replace(b'"]"', b"").replace(b'"a"', b"").replace(b":", b""))
        nested = opening * depth + b"1" + closing * depth
        assert json_depth_within(nested, 32) == (depth * per_round <= 32)
        assert json.loads(nested)


def test_millions_of_problems_cost_one_short_error(call):
    check(call("POST", "/v1/completions", json={**TEXT, "prompt": [None] * 500_000}), 400, "invalid_value")
    check(call("POST", "/v1/completions", json={**TEXT, **{f"x{i}": 1 for i in range(5000)}}), 400, "invalid_value")


def test_brackets_in_strings_do_not_count():
    assert json_depth_within(json.dumps({"a": "[" * 1000, 'b"\\': '"]]}}'}).encode(), 1)


def test_unknown_route_and_method(call):
    check(call("GET", "/nothing"), 404, "not_found")
    wrong = call("GET", "/v1/chat/completions")
    check(wrong, 405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    check(call("GET", "/v1/models/"), 404, "model_not_found", "model")
    check(call("GET", "/docs"), 404, "not_found")
    check(call("GET", "/openapi.json"), 404, "not_found")


def test_our_own_mistake_is_500_without_details(call, engine):
    def broken(*_args, **_kwargs):
        raise ValueError("secret at 0x7fff")

    engine.submit = broken
    response = call("POST", "/v1/chat/completions", json=CHAT)
    check(response, 500, "internal_error")
    assert "secret" not in response.text


def test_content_type_and_sizes(call, make_context):
    check(call("POST", "/v1/completions", content=b"{}"), 415, "unsupported_media_type")
    small = make_context(limits=Limits(body_bytes=100, header_bytes=1000))
    check(call("POST", "/v1/completions", json={"prompt": "x" * 200}, context=small), 413, "body_too_large")
    check(call("GET", "/health", headers={"x": "y" * 1000}, context=small), 431, "headers_too_large")

    async def chunks():
        for _ in range(30):
            yield b" " * 10

    headers = {"content-type": "application/json"}
    check(call("POST", "/v1/completions", content=chunks(), headers=headers, context=small), 413, "body_too_large")


@pytest.mark.parametrize(
    "path",
    ["/v1/models", "/v1/chat/completions", "/ready", "/metrics", "/stats", "/nothing", "/docs", "//health", "/health/"],
)
def test_key_is_needed_everywhere_but_health(call, make_context, path):
    context = make_context(api_key="s3cret")
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "s3cret"},
        {"authorization": "Basic s3cret"},
        {"authorization": "Bearer s3crets"},
        {"authorization": "Bearer "},
    ):
        for method in ("GET", "POST", "DELETE", "OPTIONS"):
            response = call(method, path, headers=headers, context=context)
            check(response, 401, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
    assert call("GET", path, headers={"authorization": "Bearer s3cret"}, context=context).status_code != 401


def test_health_needs_no_key(call, make_context):
    assert call("GET", "/health", context=make_context(api_key="s3cret")).status_code == 200


@pytest.mark.parametrize(
    ("base", "status"),
    [
        ("http://localhost:8000", 200),
        ("http://127.0.0.1", 200),
        ("http://[::1]:9", 200),
        ("http://evil.example", 403),
    ],
)
def test_foreign_host_names_are_refused_without_a_key(call, base, status):
    assert call("GET", "/v1/models", base=base).status_code == status


def test_foreign_host_names_are_fine_with_a_key_or_a_public_address(call, make_context):
    public = make_context(host="0.0.0.0")
    assert call("GET", "/v1/models", base="http://a.example", context=public).status_code == 200
    keyed = make_context(api_key="k")
    headers = {"authorization": "Bearer k"}
    assert call("GET", "/v1/models", base="http://a.example", headers=headers, context=keyed).status_code == 200
