"""Every bound from both sides: what is just within passes, one more is refused in words that name the bound."""

import asyncio

import msgspec
import pytest

from roofline.common.errors import RequestError
from roofline.server.gate import Gate
from roofline.server.limits import Limits
from roofline.server.routes.openai.read import completion

USER = {"role": "user", "content": "Hi"}
CHAT = {"model": "tiny", "messages": [USER]}  # 8 tokens
PART = {"type": "text", "text": "Hi"}
TEXT = {"model": "tiny", "prompt": "Hi"}
JSON = {"content-type": "application/json"}
# Field of Limits: (its value, route, fields just within, fields just beyond, the field that is named).
BOUNDS = {
    "messages": (3, "chat", {"messages": [USER] * 3}, {"messages": [USER] * 4}, "messages"),
    "prompts": (3, "text", {"prompt": ["a"] * 3}, {"prompt": ["a"] * 4}, "prompt"),
    "n": (3, "chat", {"n": 3}, {"n": 4}, "n"),
    "choices": (6, "text", {"prompt": ["a"] * 3, "n": 2}, {"prompt": ["a"] * 7}, "n"),
    "stop_strings": (2, "text", {"stop": ["a", "b"]}, {"stop": ["a", "b", "c"]}, "stop"),
    "stop_string_bytes": (4, "chat", {"stop": ["a", "ää"]}, {"stop": ["a", "ääa"]}, "stop"),
    "stop_token_ids": (2, "chat", {"stop_token_ids": [1, 2]}, {"stop_token_ids": [1, 2, 3]}, "stop_token_ids"),
    "logit_bias": (2, "text", {"logit_bias": {"1": 1, "2": 1}}, {"logit_bias": dict.fromkeys("123", 1)}, "logit_bias"),
    "user_characters": (4, "chat", {"user": "äääa"}, {"user": "aaaaa"}, "user"),
}
ENDS = {
    "n": "is not within 1 and 3.",
    "choices": "is not within 1 and 6.",
    "messages": "has 4 items; from 1 to 3 are allowed.",
}
# Fields with bounds of their own: (route, within, beyond).
FIXED = [
    ("text", {"logprobs": 0}, {"logprobs": -1}),
    ("text", {"logprobs": 20}, {"logprobs": 21}),
    ("chat", {"logprobs": True, "top_logprobs": 0}, {"logprobs": True, "top_logprobs": -1}),
    ("chat", {"logprobs": True, "top_logprobs": 20}, {"logprobs": True, "top_logprobs": 21}),
    ("chat", {"n": 1}, {"n": 0}),
    ("chat", {"temperature": 2}, {"temperature": 2.01}),
    ("chat", {"temperature": 0}, {"temperature": -0.01}),
    ("chat", {"max_tokens": 1}, {"max_tokens": 0}),
    ("chat", {"max_completion_tokens": 992}, {"max_completion_tokens": 993}),
    ("chat", {"max_tokens": 2, "max_completion_tokens": 2}, {"max_tokens": 2, "max_completion_tokens": 3}),
    ("chat", {"min_tokens": 992}, {"min_tokens": 993}),
    ("text", {"prompt": [0, 299]}, {"prompt": [300]}),
    ("text", {"prompt": "x" * 999}, {"prompt": "x" * 1000}),  # with a token; the default gives way
    ("text", {"prompt": "x" * 1000, "max_tokens": 0}, {"prompt": "x" * 1001, "max_tokens": 0}),
    ("text", {"prompt": "x" * 999, "max_tokens": 1}, {"prompt": "x" * 999, "max_tokens": 2}),
    ("chat", {"stop_token_ids": [0, 299]}, {"stop_token_ids": [300]}),
    ("chat", {"logit_bias": {"0": 1, "299": 1}}, {"logit_bias": {"300": 1}}),
    ("chat", {"logit_bias": {"0000000007": 1}}, {"logit_bias": {"00000000007": 1}}),
    ("chat", {"top_k": -1}, {"top_k": -2}),
    ("chat", {"logit_bias": {"7": 1}}, {"logit_bias": {"٧": 1}}),
    ("chat", {"logit_bias": {"7": 1}}, {"logit_bias": {"x": 1}}),
    (
        "chat",
        {"messages": [{"role": "user", "content": [PART] * 300}]},
        {"messages": [{"role": "user", "content": [PART] * 1025}]},
    ),
    ("chat", {"stream": True, "stream_options": {}}, {"stream": False, "stream_options": {}}),
]


@pytest.fixture
def answer(call, make_context):
    """answer(route, fields, limits) -> response."""

    def post(route, fields, limits=None):
        body, path = (CHAT, "/v1/chat/completions") if route == "chat" else (TEXT, "/v1/completions")
        context = make_context(limits=limits) if limits else None
        return call("POST", path, json={**body, **fields}, context=context)

    return post


@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_holds_from_both_sides(answer, engine, name):
    most, route, within, beyond, field = BOUNDS[name]
    limits = Limits(**{name: most})
    assert answer(route, within, limits).status_code == 200
    engine.submitted.clear()
    refused = answer(route, beyond, limits)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert str(most) in refused.json()["error"]["message"]
    assert refused.json()["error"]["message"].endswith(ENDS.get(name, "."))
    assert not engine.submitted


@pytest.mark.parametrize(("route", "within", "beyond"), FIXED)
def test_a_field_is_taken_up_to_its_bound(answer, engine, route, within, beyond):
    accepted = answer(route, within)
    assert accepted.status_code == 200, accepted.text
    engine.submitted.clear()
    refused = answer(route, beyond)
    assert refused.status_code == 400, refused.text
    assert not engine.submitted


@pytest.mark.parametrize(("parts", "status"), [(1024, 200), (1025, 400)])
def test_a_message_has_parts_up_to_a_bound(answer, make_context, parts, status):
    context = make_context()
    context.engine.description = msgspec.structs.replace(context.engine.description, max_model_len=2000)
    response = answer("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * parts}]})
    assert response.status_code == status


def test_log_probabilities_of_no_alternatives(answer, engine):
    """0 asks for the chosen token's alone, which is not the same as not to ask."""
    logprobs = answer("text", {"logprobs": 0, "max_tokens": 2}).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    assert logprobs["top_logprobs"] == [{}, {}]
    content = answer("chat", {"logprobs": True, "max_tokens": 2}).json()["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-0.5, -0.5]
    assert [entry["top_logprobs"] for entry in content] == [[], []]
    assert [params.logprobs for _, params in engine.submitted] == [0, 0]
    for fields in ({}, {"logprobs": False}):
        assert answer("chat", fields).json()["choices"][0]["logprobs"] is None
    assert engine.submitted[-1][1].logprobs is None


@pytest.mark.parametrize(
    ("prompt", "answer_tokens", "param"),
    [(999, 1, None), (999, 2, "max_tokens"), (1000, 1, "prompt"), (1, 999, None), (1, 1000, "max_tokens")],
)
def test_prompt_and_answer_fill_the_context_to_the_last_token(answer, prompt, answer_tokens, param):
    response = answer("text", {"prompt": [7] * prompt, "max_tokens": answer_tokens})
    if param is None:
        assert response.status_code == 200
        return
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert f"together {prompt + answer_tokens}, but this server's context is 1000" in error["message"]


@pytest.mark.parametrize(("prompt", "status"), [(999, 200), (1000, 400)])
def test_a_prompt_leaves_room_for_a_token_where_no_number_is_given(answer, prompt, status):
    text = "x" * (prompt - len("<user>"))
    assert answer("chat", {"messages": [{"role": "user", "content": text}]}).status_code == status


def test_limits_that_nobody_sets(call, make_context):
    context = make_context(limits=Limits())
    told = call("GET", "/limits", context=context).json()["limits"]
    expected = {
        "body_bytes": 8_388_608,
        "header_bytes": 16_384,
        "json_depth": 32,
        "json_values": 131_072,
        "messages": 1024,
        "prompts": 64,
        "n": 16,
        "choices": 128,
        "logprobs": 20,
        "prompt_logprobs": 262_144,
        "stop_strings": 16,
        "stop_string_bytes": 256,
        "stop_token_ids": 64,
        "logit_bias": 1024,
        "user_characters": 256,
        "prompt_tokens": 1_048_576,
        "adapter_bytes": 4 << 30,
        "queued": 256,
        "streams": 256,
        "first_token_seconds": 1800.0,
        "total_seconds": 7200.0,
        "read_seconds": 30.0,
        "body_seconds": 120.0,
        "waiting_bytes": 64 << 20,
        "unread_seconds": 60.0,
        "unread_tokens": 4096,
        "temperature": 2.0,
        "tools": 128,
        "tool_name_characters": 64,
        "upload_bytes": 209_715_200,
        "upload_seconds": 3600.0,
        "key_file_bytes": 2_147_483_648,
        "key_files": 1000,
        "batch_lines": 50_000,
        "open_batches": 32,
        "kept_batches": 1000,
        "batch_hours": 720,
        "metadata_pairs": 16,
        "metadata_name_characters": 64,
        "metadata_value_characters": 512,
        "inputs": 2048,
        "documents": 1024,
        "drain_seconds": 30,
        "stored_responses": 10_000,
        "stored_bytes": 128 << 20,
        "stored_seconds": 30 * 86400.0,
    }
    assert {name: entry["limit"] for name, entry in told.items()} == expected
    assert call("GET", "/stats", context=context).json()["limits"] == expected


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_exactly_the_limit_is_read(call, make_context, chunked):
    raw = b'{"model": "tiny", "prompt": "Hi"}'

    async def chunks():
        for at in range(0, len(raw), 10):
            yield raw[at : at + 10]

    def status(limit):
        context = make_context(limits=Limits(body_bytes=limit))
        content = chunks() if chunked else raw
        return call("POST", "/v1/completions", content=content, headers=JSON, context=context).status_code

    assert [status(len(raw) + more) for more in (-1, 0, 1)] == [413, 200, 200]


def scope(**headers: str) -> dict:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": "GET", "path": "/v1/models", "headers": [(b"host", b"localhost"), *pairs]}


def test_headers_of_exactly_the_limit_are_read(make_context):
    gate = Gate(lambda *_: None, make_context(limits=Limits(header_bytes=50)))
    gate._check_headers(scope(x="y" * (50 - len("hostlocalhostx"))))
    with pytest.raises(RequestError, match="larger than 50 bytes") as refused:
        gate._check_headers(scope(x="y" * (51 - len("hostlocalhostx"))))
    assert refused.value.status == 431


def test_a_length_that_is_no_number_is_refused(make_context):
    gate = Gate(lambda *_: None, make_context())
    for length in ("-1", "1e3", "x", ""):
        with pytest.raises(RequestError, match="content-length is not a number") as refused:
            gate._admit(scope(**{"content-length": length}))
        assert (refused.value.status, refused.value.code) == (400, "invalid_header")


def test_a_websocket_is_refused_before_the_handshake(make_context):
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(Gate(lambda *_: None, make_context())({"type": "websocket"}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_an_error_in_mid_answer_breaks_the_connection(make_context):
    """A second status line would be read as a part of the first answer."""
    sent = []

    async def send(message):
        sent.append(message["type"])

    async def app(scope, receive, send):
        await send({"type": "http.response.start"})
        await send({"type": "http.response.body"})
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        asyncio.run(Gate(app, make_context())(scope(), None, send))
    assert sent == ["http.response.start", "http.response.body"]


def test_silence_is_refused_within_a_body_and_waited_out_after_it(make_context):
    gate = Gate(lambda *_: None, make_context(limits=Limits(read_seconds=0.01)))

    async def last(messages):
        """The last of these messages, each of which takes longer than the first."""

        async def receive():
            await asyncio.sleep(0.03 if len(messages) == 1 else 0)
            return messages.pop(0)

        bounded = gate._bounded(scope(), receive)
        while messages:
            message = await bounded()
        return message

    disconnect = {"type": "http.disconnect"}
    assert (
        asyncio.run(last([{"type": "http.request", "body": b"x"}, disconnect])) == disconnect
    )  # no more_body: that was all
    assert asyncio.run(last([{"type": "http.request", "more_body": False}, disconnect])) == disconnect
    with pytest.raises(RequestError, match="stopped arriving") as refused:
        asyncio.run(last([{"type": "http.request", "body": b"x", "more_body": True}, {"type": "http.request"}]))
    assert refused.value.status == 408


@pytest.mark.parametrize(("problems", "code"), [(1000, "unknown_parameter"), (1001, "invalid_value")])
def test_a_thousand_problems_are_told_apart(make_context, problems, code):
    fields = ", ".join(f'"x{i}": 1' for i in range(problems))
    with pytest.raises(RequestError) as refused:
        completion(f'{{"model": "tiny", "prompt": "Hi", {fields}}}'.encode(), make_context())
    assert refused.value.code == code
