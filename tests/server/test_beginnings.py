"""Answers that go on from a beginning, on every API that has them: what they tell, and what forms say of them."""

import json
from types import MappingProxyType

import pytest

from roofline import Constraint
from roofline.text.replies.reply_format import ReplyFormat
from tests.server.conftest import BytesText

USER = {"role": "user", "content": "Hi"}
PARAMETERS = {"type": "object", "properties": {"x": {"type": "string"}}}
FUNCTION = {"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}
ANTHROPIC_TOOL = {"name": "f", "input_schema": PARAMETERS}
PATHS = ["/v1/chat/completions", "/v1/messages", "/api/chat"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


class OpensThinking(BytesText):
    """A template that opens the reasoning where an answer begins."""

    def encode_chat(self, messages, most=None, *, tools=(), variables=MappingProxyType({}), continues=False):
        *before, last = [*messages, *(() if continues else ({"role": "assistant", "content": ""},))]
        said = f"{last.get('content') or ''}"
        return super().encode_chat([*before, {**last, "content": f"<think>\n{said}"}], most, continues=True)

    def ends_thinking(self, ids):
        return bytes(ids).rstrip().endswith(b"<think>")


class Plain(BytesText):
    """Without a parser of reasoning."""

    reply_format = ReplyFormat("hermes", thinks=False, takes_tools=True)


def body_of(path: str, begun: str | None, stream: bool = False, tools: bool = True, **fields: object) -> dict:
    messages = [USER, *(() if begun is None else ({"role": "assistant", "content": begun},))]
    body: dict = {"model": "tiny", "messages": messages, "stream": stream, **fields}
    if path == "/v1/chat/completions":
        body |= {"continue_final_message": begun is not None}
    if path == "/v1/messages":
        body |= {"max_tokens": 500}
    return body | ({"tools": [ANTHROPIC_TOOL if path == "/v1/messages" else FUNCTION]} if tools else {})


def told(path: str, response, stream: bool) -> tuple[str, str, list]:
    """(text, reasoning, calls with their arguments as an object) of an answer."""
    assert response.status_code == 200, response.text
    text, thoughts, calls = "", "", []
    if not stream:
        answer = response.json()
        if path == "/v1/chat/completions":
            message = answer["choices"][0]["message"]
            calls = [
                (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", ())
            ]
            return message["content"] or "", message.get("reasoning_content", ""), calls
        if path == "/v1/messages":
            kinds = {"text": "", "thinking": ""}
            for block in answer["content"]:
                if block["type"] == "tool_use":
                    calls.append((block["name"], block["input"]))
                else:
                    kinds[block["type"]] += block[block["type"]]
            return kinds["text"], kinds["thinking"], calls
        message = answer["message"]
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
        return message["content"], message.get("thinking", ""), calls
    for line in response.text.split("\n"):
        data = line.removeprefix("data: ")
        event = json.loads(data) if data.startswith("{") else {}
        for choice in event.get("choices", ()):
            delta = choice["delta"]
            text, thoughts = text + (delta.get("content") or ""), thoughts + delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                if "name" in call["function"]:
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"]["arguments"]
        delta = event.get("delta", {}) if path == "/v1/messages" else {}
        if event.get("content_block", {}).get("type") == "tool_use":
            calls.append([event["content_block"]["name"], ""])
        text, thoughts = text + delta.get("text", ""), thoughts + delta.get("thinking", "")
        if "partial_json" in delta:
            calls[-1][1] += delta["partial_json"]
        message = event.get("message", {}) if path == "/api/chat" else {}
        text, thoughts = text + message.get("content", ""), thoughts + message.get("thinking", "")
        calls += [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
    return text, thoughts, [(name, json.loads(each) if isinstance(each, str) else each) for name, each in calls]


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "Uhu"}}\n</tool_call>'
OPENED = [
    ("<think>I wo", "nder.</think>Yes.", ("Yes.", "nder.", [])),
    ("Let me see. " + CALL[:-25], CALL[-25:], ("", "", [("f", {"x": "Uhu"})])),
    (f"<think>So</think>{CALL[:-25]}", CALL[-25:] + CALL, ("", "", [("f", {"x": "Uhu"})] * 2)),
    ("Once upon", " a time", (" a time", "", [])),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_an_answer_goes_on_within_the_reasoning_or_the_call_that_its_beginning_opened(call, engine, path, stream):
    for begun, answer, expected in OPENED:
        engine.answer = answer.encode()
        assert told(path, call("POST", path, json=body_of(path, begun, stream)), stream) == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_reasoning_that_the_template_opened_goes_on_behind_a_beginning(call, make_context, engine, path, stream):
    context = make_context(text=OpensThinking())
    for begun, answer, expected in [
        ("I wo", "nder.</think>Yes.", ("Yes.", "nder.", [])),
        ("I wonder.</think>\n\nYe", "s.", ("s.", "", [])),
        (None, "Hm.</think>Yes.", ("Yes.", "Hm.", [])),
    ]:
        engine.answer = answer.encode()
        response = call("POST", path, context=context, json=body_of(path, begun, stream, tools=False))
        assert told(path, response, stream) == expected


@pytest.mark.parametrize("path", PATHS)
def test_without_a_parser_of_reasoning_marks_of_a_beginning_are_text(call, make_context, engine, path):
    engine.answer = b"nder.</think>Yes."
    response = call("POST", path, context=make_context(text=Plain()), json=body_of(path, "<think>I wo"))
    assert told(path, response, False) == ("nder.</think>Yes.", "", [])


FORMS = {
    "/v1/chat/completions": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    },
    "/v1/messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "/api/chat": {"format": SCHEMA},
}
PARTS = [
    ('{"a": 1', {"begun": '{"a": 1'}),
    ("", {}),
    ('<think>So</think>\n\n{"a"', {"begun": '{"a"'}),
    ("<think>So", {"begun": "<think>So", "behind": "</think>"}),
]


@pytest.mark.parametrize("path", PATHS)
def test_a_form_is_that_of_beginning_and_answer_together(call, engine, path):
    for begun, parts in PARTS:
        body = body_of(path, begun, tools=False, **FORMS[path])
        assert call("POST", path, json=body).status_code == 200
        expected = Constraint("json_schema", Constraint.of_json_schema(SCHEMA).text, **parts)
        assert engine.submitted[-1][1].constraint == expected


@pytest.mark.parametrize("path", PATHS)
def test_a_form_begins_behind_reasoning_that_the_template_opened(call, make_context, engine, path):
    engine.answer = b'Hm.</think>\n{"a": 1}'
    body = body_of(path, None, tools=False, **FORMS[path])
    answer = call("POST", path, context=make_context(text=OpensThinking()), json=body)
    assert told(path, answer, False) == ('{"a": 1}', "Hm.", [])
    assert engine.submitted[-1][1].constraint.behind == "</think>"


def test_forced_and_strict_calls_go_on_from_a_beginning(call, engine):
    for fields in ({"tool_choice": "required"}, {"tools": [strict()]}):
        body = body_of(PATHS[0], '<tool_call>\n{"name": "f"') | fields
        assert call("POST", PATHS[0], json=body).status_code == 200
        assert engine.submitted[-1][1].constraint.begun == '<tool_call>\n{"name": "f"'


def strict() -> dict:
    return {"type": "function", "function": {**FUNCTION["function"], "strict": True}}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/apply-template"])
def test_a_last_message_that_calls_tools_is_no_beginning(call, path):
    """transformers leaves the calls out there, or fails, as the template has it."""
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [USER, {"role": "assistant", "content": "So", "tool_calls": calls}]
    body = {"model": "tiny", "messages": messages, "continue_final_message": True}
    error = call("POST", path, json=body)
    assert (error.status_code, error.json()["error"]["param"]) == (400, "continue_final_message")
    assert "calls tools" in error.json()["error"]["message"]
