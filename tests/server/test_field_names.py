"""Errors name the fields that the request had, and no default that nobody gave."""

import json

import pytest

from roofline.server.routes.anthropic import read

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
LONG = {"model": "tiny", "prompt": "x" * 1001}


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (
            "/v1/chat/completions",
            {**CHAT, "max_completion_tokens": 0},
            "max_completion_tokens",
            ": 0 is not within 1 and",
        ),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 0}, "max_tokens", ": 0 is not within 1 and"),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 999_999}, "max_completion_tokens", "or lower "),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 5, "min_tokens": 6}, "min_tokens", "more than "),
        ("/v1/chat/completions", {**CHAT, "min_tokens": 999_999}, "min_tokens", "or lower "),
        ("/v1/completions", {**LONG, "prompt": "a", "min_tokens": 999_999}, "min_tokens", "or lower "),
        ("/v1/completions", {**LONG, "max_tokens": 3}, "prompt", "or lower max_tokens."),
    ],
)
def test_the_field_is_the_one_that_was_given(call, path, body, param, words):
    response = call("POST", path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    names = [name for name in ("max_completion_tokens", "max_tokens", "min_tokens") if name in error["message"]]
    told = [name for name in ("max_completion_tokens", "max_tokens", "min_tokens") if name in body]
    assert words in error["message"]
    assert set(names) <= set(told), error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", LONG),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "x" * 1000}]}),
        ("/api/generate", {"model": "tiny", "prompt": "x" * 1001, "raw": True}),
        ("/generate", {"inputs": "x" * 1001}),
        ("/v2/models/tiny/generate", {"text_input": "x" * 1001}),
    ],
)
def test_a_prompt_that_is_too_long_is_told_without_a_field_that_nobody_gave(call, path, body):
    response = call("POST", path, json=body)
    assert response.status_code == 400
    assert "Shorten the prompt." in response.text


@pytest.mark.parametrize(("room", "tokens"), [(0, 1), (1, 1), (7, 7), (400, 16)])
def test_an_answer_of_the_default_length_is_as_long_as_fits(call, engine, room, tokens):
    """A context of 1,000; the answer of a full one has no room at all."""
    engine.answer = b"0123456789abcdefghi"
    body = {"model": "tiny", "prompt": "x" * (1000 - room)}
    response = call("POST", "/v1/completions", json=body)
    if room == 0:
        assert response.status_code == 400
        return
    assert response.json()["usage"]["completion_tokens"] == tokens
    several = {**body, "prompt": ["y", body["prompt"]], "min_tokens": 1}
    assert call("POST", "/v1/completions", json=several).json()["usage"]["completion_tokens"] == 2 * tokens
    triton = call("POST", "/v2/models/tiny/generate", json={"text_input": body["prompt"]})
    assert len(triton.json()["text_output"]) == tokens


def test_more_than_the_default_may_be_the_least(call, engine):
    engine.answer = b"0123456789" * 5
    body = {"model": "tiny", "prompt": "x", "min_tokens": 30}
    assert call("POST", "/v1/completions", json=body).json()["usage"]["completion_tokens"] == 30


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/messages", {"max_tokens": 5, "tool_choice": {"type": "any"}, "tools": [{"name": "f"}]}, "tools"),
        ("/v1/messages", {"max_tokens": 5, "output_format": {"type": "json_schema"}}, "output_format.schema"),
    ],
)
def test_a_form_that_cannot_be_compiled_is_named_by_its_field(make_context, path, body, field):
    schema = {"type": "object"}
    body = {**CHAT, **body}
    for tool in body.get("tools", ()):
        tool["input_schema"] = schema
    if "output_format" in body:
        body["output_format"]["schema"] = schema
    assert read.messages(json.dumps(body).encode(), make_context()).form_field == field
