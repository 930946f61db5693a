"""Every field is honoured or refused; every refusal is OpenAI-shaped and names its cause."""

import json
import random
import re
import time

import pytest

from roofline.common import json_depth
from roofline.common.errors import RequestError
from roofline.common.json_depth import json_depth_within, json_structure
from roofline.common.json_names import count_names, repeated_name
from roofline.server.body import fields_of
from roofline.server.gate import Gate
from roofline.server.limits import Limits
from roofline.server.routes.openai.read import chat
from roofline.server.routes.openai.schema import INSTEAD, NEUTRAL_CHAT, NEUTRAL_COMPLETION, NEUTRAL_MESSAGE, Sampling
from tests.server.neutral import sample

USER = {"role": "user", "content": "Hi"}
CHAT = {"model": "tiny", "messages": [USER]}
TEXT = {"model": "tiny", "prompt": "Hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "f"}}
OTHER_TOOL = {"type": "function", "function": {"name": "h"}}
BAD_CHAT = [
    ({"surprise": 1}, "surprise", "unknown_parameter"),
    ({"messages": [{**USER, "extra": 1}]}, "messages.0.extra", "unknown_parameter"),
    ({"messages": [{**USER, "model": 1}]}, "messages.0.model", "unknown_parameter"),
    ({"x" * 101: 1}, "x" * 100, "unknown_parameter"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
    ({"messages": [USER] * 1025}, "messages", "invalid_value"),
    ({"messages": "Hi"}, "messages", "invalid_value"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages.0.role", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "missing_parameter"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0.type",
        "unsupported_parameter",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}
            ]
        },
        "messages.0.content.0.type",
        "unsupported_parameter",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "poem", "text": "x"}]}]},
        "messages.0.content.0.type",
        "invalid_value",
    ),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "invalid_value"),
    ({"messages": [{**USER, "name": 5}]}, "messages.0.name", "invalid_value"),
    ({"messages": [{**USER, "name": "x" * 257}]}, "messages.0.name", "invalid_value"),
    ({"messages": [{**USER, "tool_calls": [{}]}]}, "messages.0.tool_calls.0.id", "missing_parameter"),
    ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages.0.tool_calls", "invalid_value"),
    ({"messages": [{**USER, "tool_call_id": "a"}]}, "messages.0.tool_call_id", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "missing_parameter"),
    ({"messages": [{"role": "tool", "content": "1"}]}, "messages.0.tool_call_id", "missing_parameter"),
    ({"messages": [{"role": "tool", "content": "1", "tool_call_id": "a"}]}, "messages.0.tool_call_id", "invalid_value"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": [1]}}]}]},
        "messages.0.tool_calls.0.function.arguments",
        "invalid_value",
    ),
    ({"messages": [{**USER, "cache_control": {"type": "x"}}]}, "messages.0.cache_control.type", "invalid_value"),
    ({"skip_special_tokens": 0}, "skip_special_tokens", "invalid_value"),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "missing_parameter"),
    ({"tools": [{**TOOL, "type": "search"}]}, "tools.0.type", "invalid_value"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name", "invalid_value"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, "tools.0.function.name", "invalid_value"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "invalid_value"),
    ({"tools": [TOOL, TOOL]}, "tools.1.function.name", "invalid_value"),
    ({"tools": [TOOL] * 129}, "tools", "invalid_value"),
    ({"functions": [TOOL], "function_call": "none"}, "functions", "unsupported_parameter"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tool_choice": NAMED}, "tool_choice.function.name", "invalid_value"),
    (
        {"tool_choice": NAMED, "tools": [{**TOOL, "function": {"name": "h"}}]},
        "tool_choice.function.name",
        "invalid_value",
    ),
    ({"continue_final_message": True}, "continue_final_message", "invalid_value"),
    ({"add_generation_prompt": False}, "add_generation_prompt", "invalid_value"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"store": True}, "store", "unsupported_parameter"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "invalid_value"),
    ({"metadata": "x"}, "metadata", "unsupported_parameter"),
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
    assert len(response.content) <= 8192


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


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        (
            "chat/completions",
            {"messages": [USER, {"role": "user", "content": 3}]},
            "1.content: {} a string or an array.",
        ),
        ("chat/completions", {"messages": [USER, 3]}, "1: {} an object."),
        ("chat/completions", {"stop": ["a", 3]}, "stop.1: {} a string."),
        ("chat/completions", {"tool_choice": 3}, "tool_choice: {} 'none', 'auto' or 'required' or an object."),
        ("completions", {"prompt": 5}, "prompt: {} a string or an array."),
        ("completions", {"prompt": [1, "a"]}, "prompt.1: {} a whole number."),
        ("completions", {"prompt": [[1], ["a"]]}, "prompt.1.0: {} a whole number."),
        ("completions", {"prompt": [True]}, "prompt.0: {} a string, a whole number or an array."),
        ("completions", {"echo": "no"}, "echo: {} true or false."),
    ],
)
def test_a_wrong_type_is_told_with_its_place_and_all_that_it_may_be(call, path, change, message):
    body = {**(TEXT if path == "completions" else CHAT), **change}
    told = call("POST", f"/v1/{path}", json=body).json()["error"]["message"]
    assert message.format("Input should be") in told


def test_an_answer_to_no_call_is_refused_with_its_place(call):
    body = {**CHAT, "messages": [USER, {"role": "tool", "content": "1", "tool_call_id": "c"}]}
    check(call("POST", "/v1/chat/completions", json=body), 400, "invalid_value", "messages.1.tool_call_id")


@pytest.mark.parametrize("change", [{"suffix": "x"}, {"spaces_between_special_tokens": False}])
def test_completion_fields_we_lack_are_refused(call, change):
    name = next(iter(change))
    check(call("POST", "/v1/completions", json={**TEXT, **change}), 400, "unsupported_parameter", name)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_neutral_values_pass(call, place):
    chat = {name: sample(allowed[min(place, len(allowed) - 1)]) for name, allowed in NEUTRAL_CHAT.items()}
    message = {name: allowed[-1] for name, allowed in NEUTRAL_MESSAGE.items()}
    body = {**CHAT, **chat, "messages": [{**USER, **message}]}
    assert call("POST", "/v1/chat/completions", json=body).status_code == 200
    text = {name: sample(allowed[-1]) for name, allowed in NEUTRAL_COMPLETION.items()}
    assert call("POST", "/v1/completions", json={**TEXT, **text}).status_code == 200


def test_what_clients_send_by_default_is_neutral(call):
    for fields in ({"parallel_tool_calls": True}, {"parallel_tool_calls": False, "store": False}):
        assert call("POST", "/v1/chat/completions", json={**CHAT, **fields}).status_code == 200
    text = {**TEXT, "best_of": 1, "echo": False}
    assert call("POST", "/v1/completions", json=text).status_code == 200


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
    check(call("POST", "/v1/completions", json={**TEXT, "prompt": [None] * 500_000}), 400, "invalid_value", "prompt.0")
    check(call("POST", "/v1/completions", json={**TEXT, **{f"x{i}": 1 for i in range(5000)}}), 400, "invalid_value")


@pytest.mark.parametrize("item", ["s", [], {}])
def test_strings_and_containers_have_a_bound(item):
    """The parser holds up every thread while it builds them. Beside the items: the body, its list, and a name."""
    limits = Limits(json_values=1003, prompt_tokens=5000)
    assert fields_of(json.dumps({"a": [item] * 1000}).encode(), limits)
    with pytest.raises(RequestError, match="more than 1003 strings") as refused:
        fields_of(json.dumps({"a": [item] * 1001}).encode(), limits)
    assert (refused.value.status, refused.value.code) == (400, "too_many_values")


def test_numbers_have_a_bound():
    limits = Limits(json_values=100, prompt_tokens=1000)
    assert fields_of(json.dumps({"a": [1] * 1101}).encode(), limits)
    with pytest.raises(RequestError, match="more than 1100 values"):
        fields_of(json.dumps({"a": [1] * 1102}).encode(), limits)


def test_a_long_text_has_the_structure_of_its_pieces(monkeypatch):
    """Long texts are read in pieces, which may end behind any string."""
    generator = random.Random(0)
    words = ['"a"', '"\\""', '"[{,"', "[", "]", "{", "}", ",", ":", "1", '"', "\\", " "]
    for _ in range(300):
        raw = "".join(generator.choices(words, k=generator.randrange(60))).encode()
        expected = json_structure(raw)
        with monkeypatch.context() as short:
            short.setattr(json_depth, "PIECE_BYTES", 0)
            short.setattr(
                json_depth, "STRINGS", re.compile(json_depth.STRINGS.pattern.replace(b"4096", b"2"), re.DOTALL)
            )
            assert json_structure(raw) == expected


def test_brackets_in_strings_do_not_count():
    assert json_depth_within(json.dumps({"a": "[" * 1000, 'b"\\': '"]]}}'}).encode(), 1)


def test_unknown_route_and_method(call):
    check(call("GET", "/nothing"), 404, "not_found")
    wrong = call("GET", "/v1/chat/completions")
    check(wrong, 405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    check(call("GET", "/v1/models/"), 404, "model_not_found", "model")
    check(call("GET", "/docs"), 404, "not_found")
    check(call("GET", "/health/"), 404, "not_found")
    check(call("GET", "/redoc"), 404, "not_found")


def test_what_a_client_sends_is_repeated_up_to_a_length(call):
    def message(*request, **body):
        return call(*request, **body).json()["error"]["message"]

    name, repeated = "m" * 101, repr("m" * 100)
    assert message("GET", f"/v1/models/{name}") == f"The model {repeated} is not served here; 'tiny' is."
    error = message("POST", "/v1/completions", json={**TEXT, "model": name})
    assert error == f"The model {repeated} is not served here; 'tiny' is."
    assert message("GET", "/" + "x" * 200) == f"There is no route GET /{'x' * 199}."
    assert message("M" * 17, "/v1/models") == f"{'M' * 16} /v1/models is not a method of this route."


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ('{"model":"tiny","prompt":"a","prompt":"b"}', "prompt"),
        ('{"model":"tiny","prompt":"a","max_tokens":1,"stop":["x"],"max_tokens" : 2}', "max_tokens"),
        ('{"model":"tiny","prompt":"a","logit_bias":{"1":1,"1":2}}', "1"),
        ('{"model":"tiny","prompt":"a","stream_options":{"x":[1,{"a":1}]},"stream_options":{}}', "stream_options"),
        ('{"model":"tiny","prompt":"a","pr\\u006fmpt":"b"}', "prompt"),
        ('{"model":"tiny","prompt":[5,[6],{"a":":","a":{}}]}', "a"),
        ('{"model":"tiny","prompt":"a","logit_bias":{"1":1,"01":2}}', "logit_bias"),
    ],
)
def test_a_field_that_an_object_has_twice_is_refused(call, engine, body, name):
    answer = call("POST", "/v1/completions", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert name.removeprefix("logit_bias") in answer.json()["error"]["message"]
    assert not engine.submitted


def test_names_are_counted_as_often_as_they_stand():
    for text in ('{"a":1}', '[{"a":":{"},[2,[{"b":{"c":[]}}]],3]', '{"a":[1,2,{"b":1}],"b":{"b":{}}}', "[]", "3"):
        structure = json_structure(text.encode())
        assert count_names(json.loads(text), structure.containers) == structure.names
        assert repeated_name(text.encode()) is None


def test_our_own_mistake_is_500_without_details(call, engine):
    def broken(*_args, **_kwargs):
        raise ValueError("secret at 0x7fff")

    engine.submit = broken
    response = call("POST", "/v1/chat/completions", json=CHAT)
    check(response, 500, "internal_error")
    assert "secret" not in response.text


def test_content_type_and_sizes(call, make_context):
    page = {"origin": "http://evil.example"}
    for kind in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
        raw = json.dumps(TEXT).encode()
        assert call("POST", "/v1/completions", content=raw, headers=kind).status_code == 200
        check(call("POST", "/v1/completions", content=raw, headers=kind | page), 415, "unsupported_media_type")
    assert call("POST", "/v1/completions", json=TEXT, headers=page).status_code == 200
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
    [
        "/v1/models",
        "/v1/chat/completions",
        "/ready",
        "/metrics",
        "/stats",
        "/nothing",
        "/docs",
        "http://127.0.0.1//health",
        "/health/",
    ],
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


@pytest.mark.parametrize(("base", "status"), [("http://127.0.0.2", 200), ("http://evil.example", 403)])
def test_every_loopback_address_is_of_this_machine_alone(call, make_context, base, status):
    assert call("GET", "/v1/models", base=base, context=make_context(host="127.0.0.2")).status_code == status


def test_foreign_host_names_are_fine_with_a_key_or_a_public_address(call, make_context):
    public = make_context(host="0.0.0.0")
    assert call("GET", "/v1/models", base="http://a.example", context=public).status_code == 200
    keyed = make_context(api_key="k")
    headers = {"authorization": "Bearer k"}
    assert call("GET", "/v1/models", base="http://a.example", headers=headers, context=keyed).status_code == 200


def test_every_neutral_value_of_every_field_passes(call):
    for path, body, neutral in (
        ("chat/completions", CHAT, NEUTRAL_CHAT),
        ("completions", TEXT, NEUTRAL_COMPLETION),
    ):
        for name, allowed in neutral.items():
            for value in map(sample, allowed):
                assert call("POST", f"/v1/{path}", json={**body, name: value}).status_code == 200, (name, value)
        nulls = dict.fromkeys((*Sampling.model_fields.keys() - {"model"}, *neutral))
        assert call("POST", f"/v1/{path}", json={**body, **nulls}).status_code == 200


def test_what_clients_add_to_messages_is_taken(call, engine):
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral", "ttl": "5m"}}
    user = {"role": "user", "content": [part], "name": "Ann", "cache_control": {"type": "ephemeral"}}
    answer = {
        "role": "assistant", "content": "Hello", "refusal": None, "annotations": [], "audio": None,
        "function_call": None, "tool_calls": None, "reasoning_content": None, "thinking_blocks": None,
        "parsed": {"a": 1}, "provider_specific_fields": {"refusal": None},
    }  # fmt: skip
    assert call("POST", "/v1/chat/completions", json={**CHAT, "messages": [user, answer, USER]}).status_code == 200
    assert bytes(engine.submitted[0][0]) == b"<user>Hi<assistant>Hello<user>Hi"
    function = {"name": "look", "arguments": '{"at": 1}', "parsed_arguments": {"at": 1}}
    called = {**answer, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "Stars"}
    messages = [user, called, result]
    assert call("POST", "/v1/chat/completions", json={**CHAT, "messages": messages}).status_code == 200


def test_a_name_is_for_the_template(make_context):
    context, seen = make_context(), []
    context.text.encode_chat = lambda messages, most, **_: (seen.extend(messages), [1])[1]
    chat(json.dumps({**CHAT, "messages": [{**USER, "name": "Ann"}, {**USER, "name": None}]}).encode(), context)
    assert seen == [{**USER, "name": "Ann"}, USER]


@pytest.mark.parametrize(("field", "value"), [("functions", [{}]), ("function_call", {"name": "f"})])
def test_a_refusal_names_what_to_do_instead(call, field, value):
    message = call("POST", "/v1/chat/completions", json={**CHAT, field: value}).json()["error"]["message"]
    assert message == f"{field} is not supported. {INSTEAD[field]}."


def test_two_host_headers_are_refused(make_context):
    hosts = [(b"host", b"localhost"), (b"host", b"evil.example")]
    with pytest.raises(RequestError, match="more than one Host") as refused:
        Gate(lambda *_: None, make_context())._check_headers({"method": "GET", "path": "/health", "headers": hosts})
    assert refused.value.status == 400


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
@pytest.mark.parametrize(
    ("penalty", "status"),
    [
        *((value, 200) for value in (1e-9, 0.5, 1, 1e9)),
        *((value, 400) for value in (1e-38, 9.9e-10, 0, -0.0, -1, 1.01e9, 1e38, 1e300)),
    ],
)
def test_a_repetition_penalty_is_within_what_logits_bear(call, route, penalty, status):
    prompt = {"prompt": "Hi"} if route == "completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    answer = call("POST", f"/v1/{route}", json={"model": "tiny", **prompt, "repetition_penalty": penalty})
    assert answer.status_code == status
    if status == 400:
        assert answer.json()["error"]["param"] == "repetition_penalty"


def test_an_open_string_with_many_quotes_costs_no_time():
    """Read from each of its quotes to its end it would hold up the server for minutes."""
    for rest in (b'\\"' * 500_000, b'\\"' * 500_000 + b"\\"):
        started = time.process_time()
        assert not json_depth_within(b'{"a":"' + rest, 32)
        assert time.process_time() - started < 2
    assert json_depth_within(b'{"a": "[\\"[[["}', 1)
