"""Anthropic's Messages API over a fake engine."""

import json

import anthropic
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roofline.common.errors import RequestError
from roofline.server.routes.anthropic.errors import error_body
from roofline.server.routes.anthropic.form import Blocks
from roofline.server.routes.anthropic.schema import NEUTRAL, NEUTRAL_OUTPUT, NEUTRAL_TOOL, UNREADABLE
from roofline.text.replies.parser import CallDelta, ReasoningDelta, TextDelta
from tests.server.neutral import sample

USER = {"role": "user", "content": "Hi"}
BODY = {"model": "tiny", "max_tokens": 100, "messages": [USER]}
FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "seen"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}


def events(response) -> list:
    parsed = []
    for event in response.text.strip().split("\n\n"):
        name, data = event.split("\n")
        parsed.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {parsed[-1]['type']}"
    return parsed


def joined(stream) -> dict:
    """The message that the events of a stream build, as a client builds it."""
    message, texts = None, {}
    for event in stream:
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            texts[event["index"]] = ""
        elif event["type"] == "content_block_delta":
            (text,) = [value for name, value in event["delta"].items() if name != "type"]
            texts[event["index"]] += text
        elif event["type"] == "content_block_stop":
            block, text = message["content"][event["index"]], texts.pop(event["index"])
            if block["type"] == "tool_use":
                block["input"] = json.loads(text or "{}")
            else:
                block[block["type"]] += text
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    assert not texts
    return message


def test_an_answer_is_a_message(call, engine):
    answer = call("POST", "/v1/messages", json=BODY).json()
    assert answer.pop("id").startswith("msg_")
    usage = {"input_tokens": 8, "output_tokens": 14, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hello, world."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": usage,
    }
    assert engine.submitted[0][1].max_tokens == 100


ENDS = [
    ({}, "end_turn", None),
    ({"stop_sequences": ["xx", ", w"]}, "stop_sequence", ", w"),
    ({"max_tokens": 3}, "max_tokens", None),
    ({"stop_sequences": ["Hello"]}, "stop_sequence", "Hello"),
]


@pytest.mark.parametrize(("extra", "reason", "sequence"), ENDS)
@pytest.mark.parametrize("answer", [b"Hello, world.", "Hello, wörld 世界".encode()])
def test_stream_and_whole_are_equal(call, engine, extra, reason, sequence, answer):
    engine.answer = answer
    whole = call("POST", "/v1/messages", json={**BODY, **extra}).json()
    response = call("POST", "/v1/messages", json={**BODY, **extra, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    stream = events(response)
    assert [stream[0]["type"], stream[1]["type"], stream[-2]["type"], stream[-1]["type"]] == [
        "message_start", "ping", "message_delta", "message_stop",
    ]  # fmt: skip
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    assert {**joined(stream), "id": ""} == {**whole, "id": ""}


DELTAS = st.lists(
    st.one_of(
        st.builds(TextDelta, st.text(min_size=1)),
        st.builds(ReasoningDelta, st.text(min_size=1)),
        st.sampled_from(["{}", '{"a": [1, "b"]}', ""]),
    ),
    max_size=8,
)


@given(DELTAS)
def test_the_events_of_any_reply_build_its_blocks(parts):
    deltas, number = [], 0
    for part in parts:
        if isinstance(part, str):  # a call, its arguments in two pieces
            deltas += [CallDelta(number, f"tool{number}", part[:3]), CallDelta(number, None, part[3:])]
            number += 1
        else:
            deltas.append(part)
    blocks = Blocks("call_")
    stream = [event for delta in deltas for event in blocks.add([delta])] + blocks.close()
    start = {"type": "message_start", "message": {"content": []}}
    assert joined([start, *stream])["content"] == blocks.content
    assert blocks.has_calls == (number > 0)
    at_once = Blocks("call_")
    at_once.add(deltas)
    at_once.close()
    assert at_once.content == blocks.content


def test_arguments_that_were_cut_off_are_none():
    for text in ('{"a": [', "[1]", "nonsense"):
        blocks = Blocks("call_")
        blocks.add([CallDelta(0, "f", text)])
        blocks.close()
        assert blocks.content == [{"type": "tool_use", "id": "call_0", "name": "f", "input": {}}]


def test_turns_are_what_the_template_gets(call, engine):
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = {
        **BODY,
        "system": [{"type": "text", "text": "Be", **mark}, {"type": "text", "text": "brief."}],
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b", "citations": None}]},
            {
                "role": "assistant",
                "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "c"}],
            },
            {"role": "user", "content": "d"},
        ],
    }
    assert call("POST", "/v1/messages", json=body).status_code == 200
    assert bytes(engine.submitted[0][0]) == b"<system>Be\nbrief.<user>a\nb<assistant>c<user>d"
    assert call("POST", "/v1/messages", json={**BODY, "system": "Be."}).status_code == 200
    assert bytes(engine.submitted[1][0]) == b"<system>Be.<user>Hi"


def test_what_was_thought_goes_to_the_template(make_context, call):
    context, seen = make_context(), []
    context.text.encode_chat = lambda messages, most, **options: (seen.extend(messages), [1])[1]
    thought = [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "c"}]
    turns = [USER, {"role": "assistant", "content": thought}, {"role": "assistant", "content": "e"}, USER]
    assert call("POST", "/v1/messages", context=context, json={**BODY, "messages": turns}).status_code == 200
    assert seen[1] == {"role": "assistant", "content": "c\ne", "reasoning_content": "hm"}


def test_fields_reach_the_engine(call, engine):
    fields = {"temperature": 0.5, "top_k": 7, "top_p": 0.9}
    metadata = {"metadata": {"user_id": "ann"}, "cache_control": {"type": "ephemeral"}}
    assert call("POST", "/v1/messages", json={**BODY, **fields, **metadata}).status_code == 200
    params = engine.submitted[0][1]
    assert {name: getattr(params, name) for name in fields} == fields


@pytest.fixture
def seen(make_context):
    """(context, what its text side gets): messages, and options of `encode_chat`."""
    context, calls = make_context(), []
    context.text.encode_chat = lambda messages, most, **options: (calls.append((list(messages), options)), [1])[1]
    return context, calls


def test_calls_and_results_are_turns_of_their_own(call, seen):
    context, calls = seen
    turns = [
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": "Let me"}, {**CALL, "caller": {"type": "direct"}}]},
        {"role": "assistant", "content": [{**CALL, "id": "toolu_2"}, {**CALL, "id": "toolu_3"}]},
        {"role": "user", "content": [RESULT, {"type": "text", "text": "and"}]},
        {"role": "user", "content": [{**RESULT, "tool_use_id": "toolu_2", "is_error": True, "content": None}]},
        {"role": "user", "content": [{**RESULT, "tool_use_id": "toolu_3", "content": [{"type": "text", "text": "b"}]}]},
    ]
    body = {
        **BODY,
        "messages": turns,
        "tools": [TOOL],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    }
    assert call("POST", "/v1/messages", context=context, json=body).status_code == 200
    ((messages, options),) = calls
    function = {"name": "look", "arguments": {"at": 1}}
    assert messages == [
        USER,
        {
            "role": "assistant",
            "content": "Let me",
            "tool_calls": [
                {"id": "toolu_1", "type": "function", "function": function},
                {"id": "toolu_2", "type": "function", "function": function},
                {"id": "toolu_3", "type": "function", "function": function},
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "name": "look", "content": "seen"},
        {"role": "user", "content": "and"},
        {"role": "tool", "tool_call_id": "toolu_2", "name": "look", "content": "Error: "},
        {"role": "tool", "tool_call_id": "toolu_3", "name": "look", "content": "b"},
    ]
    described = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    assert options["tools"] == [{"type": "function", "function": described}]


@pytest.mark.parametrize(("length", "status"), [(256, 200), (257, 400)])
def test_ids_and_names_of_calls_are_bounded(call, seen, length, status):
    for change in ({"id": "x" * length}, {"name": "x" * length}):
        made_call = {**CALL, **change}
        result = {**RESULT, "tool_use_id": made_call["id"]}
        turns = [USER, {"role": "assistant", "content": [made_call]}, {"role": "user", "content": [result]}]
        assert call("POST", "/v1/messages", context=seen[0], json={**BODY, "messages": turns}).status_code == status


@pytest.mark.parametrize(
    ("thinking", "variables"),
    [
        (None, {}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "adaptive"}, {"enable_thinking": True}),
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}),
    ],
)
def test_thinking_is_a_variable_of_the_template(call, seen, thinking, variables):
    context, calls = seen
    assert call("POST", "/v1/messages", context=context, json={**BODY, "thinking": thinking}).status_code == 200
    assert calls[0][1]["variables"] == variables


def test_an_answer_goes_on_from_the_assistants_last_words(call, engine, seen):
    context, calls = seen
    body = {**BODY, "messages": [USER, {"role": "assistant", "content": "So"}]}
    assert call("POST", "/v1/messages", context=context, json=body).status_code == 200
    assert calls[0][1]["continues"] is True
    assert call("POST", "/v1/messages", context=context, json=BODY).status_code == 200
    assert calls[1][1]["continues"] is False


WRITTEN = b'<think>hm</think>I look.<tool_call>{"name": "look", "arguments": {"at": [1]}}</tool_call>'


@pytest.mark.parametrize("max_tokens", [100, 60, 12])
def test_thoughts_and_calls_are_blocks_in_stream_and_whole(call, engine, max_tokens):
    engine.answer = WRITTEN
    body = {**BODY, "tools": [TOOL], "max_tokens": max_tokens}
    whole = call("POST", "/v1/messages", json=body).json()
    stream = events(call("POST", "/v1/messages", json={**body, "stream": True}))
    if max_tokens == 100:
        assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
        assert (whole["content"][2]["name"], whole["content"][2]["input"]) == ("look", {"at": [1]})
        assert whole["content"][2]["id"].startswith("toolu_")
        assert whole["stop_reason"] == "tool_use"
        streamed = joined(stream)
        assert streamed["content"][2].pop("id")
        assert whole["content"][2].pop("id")
        assert {**streamed, "id": ""} == {**whole, "id": ""}
    else:
        assert whole["stop_reason"] == "max_tokens"
        assert [event["content_block"]["type"] for event in stream if event["type"] == "content_block_start"] == [
            block["type"] for block in whole["content"]
        ]
    assert bytes(engine.submitted[0][0]) == b"[look]<user>Hi"


def test_a_call_may_be_required(call, engine):
    tools = [TOOL, {**TOOL, "name": "other"}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "other"}, {"type": "auto"}):
        assert call("POST", "/v1/messages", json={**BODY, "tools": tools, "tool_choice": choice}).status_code == 200
    any_tool, named, none = (params.constraint for _, params in engine.submitted)
    assert "call: call_0 | call_1\n" in any_tool.text
    assert "call: call_0\n" in named.text
    assert "other" in named.text
    assert none is None


@pytest.mark.parametrize("body", [{"output_config": {"format": FORMAT, "effort": None}}, {"output_format": FORMAT}])
def test_an_answer_may_have_a_form(call, engine, body):
    assert call("POST", "/v1/messages", json={**BODY, **body}).status_code == 200
    body = {**body, "tools": [TOOL], "tool_choice": {"type": "none"}}
    assert call("POST", "/v1/messages", json={**BODY, **body}).status_code == 200
    assert [(p.constraint.kind, json.loads(p.constraint.text)) for _, p in engine.submitted] == [
        ("json_schema", FORMAT["schema"])
    ] * 2


def test_no_tool_is_called_where_none_may_be(call, engine):
    engine.answer = WRITTEN
    body = {**BODY, "tools": [TOOL], "tool_choice": {"type": "none"}}
    whole = call("POST", "/v1/messages", json=body).json()
    assert [block["type"] for block in whole["content"]] == ["thinking", "text"]
    assert bytes(engine.submitted[0][0]) == b"<user>Hi"


def test_tokens_are_counted_without_an_answer(call, engine):
    body = {"model": "tiny", "system": "Be.", "messages": [USER]}
    answer = call("POST", "/v1/messages/count_tokens", json=body)
    assert answer.json() == {"input_tokens": len("<system>Be.<user>Hi")}
    assert not engine.submitted


REFUSED = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 5000}, "max_tokens"),
    ({"surprise": 1}, "surprise"),
    ({"messages": []}, "messages"),
    ({"messages": [USER] * 1025}, "messages"),
    ({"messages": [USER, {"role": "assistant", "content": [CALL]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [CALL]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]}, "messages.0.content.0.type"),
    ({"messages": [USER, {"role": "assistant", "content": [RESULT]}]}, "messages.1.content.0.type"),
    ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages.0.content.0.tool_use_id"),
    ({"messages": [{"role": "user", "content": [{**RESULT, "content": [IMAGE]}]}]}, "messages.0.content.0.content.0"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools.0.name"),
    ({"tools": [TOOL, TOOL]}, "tools.1.name"),
    ({"tools": [TOOL] * 129}, "tools"),
    ({"tools": ["look"]}, "tools.0"),
    ({"tools": "look"}, "tools"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "any", "name": "look"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "citations": [{}]}]}]}, "citations"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"stop_sequences": ["x" * 257]}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"temperature": 3}, "temperature"),
    ({"metadata": {"user_id": "x" * 257}}, "metadata.user_id"),
    ({"output_config": {"effort": "fierce"}}, "output_config.effort"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"format": FORMAT}, "output_format": FORMAT}, "output_format"),
    ({"output_config": {"format": FORMAT}, "tools": [TOOL]}, "output_config.format"),
    ({"output_format": {**FORMAT, "schema": {"x": "y" * 70_000}}}, "output_format.schema"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking"),
]


@pytest.mark.parametrize(("change", "name"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(call, engine, change, name):
    response = call("POST", "/v1/messages", json={**BODY, **change})
    assert response.status_code == 400
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert name in error["error"]["message"]
    assert not engine.submitted


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_fields_that_ask_for_nothing_are_taken(call, name):
    for value in map(sample, NEUTRAL[name]):
        assert call("POST", "/v1/messages", json={**BODY, name: value}).status_code == 200
    message = call("POST", "/v1/messages", json={**BODY, name: "something"}).json()["error"]["message"]
    assert message.startswith(f"{name} is not supported.")


@pytest.mark.parametrize("name", sorted(NEUTRAL_TOOL))
def test_fields_of_a_tool_that_ask_for_nothing_are_taken(call, engine, name):
    for value in NEUTRAL_TOOL[name]:
        body = {**BODY, "tools": [TOOL, {**TOOL, "name": "other", name: value}]}
        assert call("POST", "/v1/messages", json=body).status_code == 200
    engine.submitted.clear()
    body["tools"][1][name] = "something"
    error = call("POST", "/v1/messages", json=body).json()["error"]
    assert error["message"].startswith(f"tools.1.{name} is not supported.")
    assert not engine.submitted


@pytest.mark.parametrize("name", sorted(NEUTRAL_OUTPUT))
def test_fields_of_the_output_that_ask_for_nothing_are_taken(call, name):
    for value in NEUTRAL_OUTPUT[name]:
        assert call("POST", "/v1/messages", json={**BODY, "output_config": {name: value}}).status_code == 200


WITHIN = {
    "messages": {"messages": [USER] * 1024},
    "tools": {"tools": [{**TOOL, "name": f"look{i}"} for i in range(128)]},
    "stop_sequences": {"stop_sequences": [f"x{i}" for i in range(15)] + ["x" * 256]},
    "temperature": {"temperature": 2.0},
    "metadata.user_id": {"metadata": {"user_id": "x" * 256}},
}


@pytest.mark.parametrize("name", sorted(WITHIN))
def test_what_is_at_its_bound_is_taken(call, engine, name):
    engine.description = msgspec.structs.replace(engine.description, max_model_len=100_000)
    answer = call("POST", "/v1/messages", json={**BODY, **WITHIN[name]})
    assert answer.status_code == 200, answer.text


def test_every_kind_that_cannot_be_read_is_named(call):
    for kind in UNREADABLE:
        body = {**BODY, "messages": [{"role": "user", "content": [{"type": kind}]}]}
        assert f"blocks of type {kind}" in call("POST", "/v1/messages", json=body).json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_another_model_is_not_there(call, path):
    body = {**BODY, "model": "claude"} if path == "/v1/messages" else {"model": "claude", "messages": [USER]}
    response = call("POST", path, json=body)
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")


def test_a_path_below_has_errors_of_the_same_form(call):
    assert call("POST", "/v1/messages/batches", json={}).json()["type"] == "error"
    assert call("GET", "/v1/messages").json()["error"]["type"] == "invalid_request_error"


def test_the_status_says_the_type():
    kinds = {
        status: error_body(RequestError(status, "c", "m"))["error"]["type"] for status in (400, 401, 413, 500, 503)
    }
    assert kinds == {
        400: "invalid_request_error",
        401: "authentication_error",
        413: "request_too_large",
        500: "api_error",
        503: "overloaded_error",
    }


def test_a_stream_that_fails_ends_with_an_error(call, engine):
    engine.error = "out of luck"
    stream = events(call("POST", "/v1/messages", json={**BODY, "stream": True}))
    assert stream[-1]["error"]["type"] == "overloaded_error"
    assert "out of luck" not in json.dumps(stream)


def test_anthropics_own_client(live):
    client = anthropic.Anthropic(base_url=live(), api_key="none", max_retries=0)
    fields = {**BODY, "stop_sequences": ["world"]}
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert whole.content[0].text == text == "Hello, "
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "world")
    assert (final.content[0].text, final.usage.output_tokens) == (text, whole.usage.output_tokens)
    assert client.messages.count_tokens(model="tiny", messages=[USER]).input_tokens == 8
    with pytest.raises(anthropic.BadRequestError, match="top_k"):
        client.messages.create(**BODY, extra_body={"top_k": -5})
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        client.messages.create(**{**BODY, "model": "claude"})
