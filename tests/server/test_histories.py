"""What a server has answered is taken back by every API, and half characters refuse nothing."""

import json
from types import MappingProxyType

import pytest

from roofline.server.conversation import results_in_order
from tests.server.conftest import BytesText

HALF = "\\ud83d"
USER = {"role": "user", "content": "Go"}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
TOOLS = {
    "/v1/chat/completions": [{"type": "function", "function": FUNCTION}],
    "/v1/responses": [{"type": "function", **FUNCTION}],
    "/v1/messages": [{"name": "f", "input_schema": {"type": "object"}}],
    "/api/chat": [{"type": "function", "function": FUNCTION}],
}
PATHS = list(TOOLS)


class SeenText(BytesText):
    """Remembers the messages that a template would get."""

    def __init__(self) -> None:
        self.messages: list[list[dict]] = []

    def encode_chat(self, messages, most=None, *, tools=(), variables=MappingProxyType({}), continues=False):
        self.messages.append([dict(message) for message in messages])
        return super().encode_chat(
            [{**m, "content": m.get("content") or ""} for m in messages], most, continues=continues
        )


def body_of(path: str, items: list[dict], **more) -> dict:
    body = {"model": "tiny", "tools": TOOLS[path], "stream": False, **more}
    if path == "/v1/messages":
        body["max_tokens"] = 900
    return body | ({"input": items} if path == "/v1/responses" else {"messages": items})


def arguments(path: str, answer: dict) -> object:
    """Of the first call of an answer, parsed where they come as a text."""
    if path == "/v1/chat/completions":
        return json.loads(answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])
    if path == "/v1/responses":
        return json.loads(next(item for item in answer["output"] if item["type"] == "function_call")["arguments"])
    if path == "/v1/messages":
        return next(block for block in answer["content"] if block["type"] == "tool_use")["input"]
    return answer["message"]["tool_calls"][0]["function"]["arguments"]


def streamed(path: str, text: str) -> object:
    """The same of a stream."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith(("data: {", "{"))]
    events = [json.loads(line) for line in lines]
    if path == "/v1/chat/completions":
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        parts = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    elif path == "/v1/responses":
        parts = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    elif path == "/v1/messages":
        parts = [event["delta"].get("partial_json", "") for event in events if event["type"] == "content_block_delta"]
    else:
        (call,) = [call for event in events for call in event["message"].get("tool_calls", ())]
        return call["function"]["arguments"]
    return json.loads("".join(parts))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "written",
    [
        f'{{"x": "a{HALF}", "{HALF}": ["\\\\ud83d", "\\ud83d\\ude00\\ude00{HALF}"]}}',
        json.dumps(f'{{"x": "a{HALF}", "{HALF}": ["\\\\ud83d", "\\ud83d\\ude00\\ude00{HALF}"]}}'),
    ],
)
def test_halves_of_characters_in_a_call_are_the_sign_for_none(call, engine, path, written) -> None:
    engine.answer = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'.encode()
    expected = {"x": "a\ufffd", "\ufffd": ["\\ud83d", "😀\ufffd\ufffd"]}
    whole = call("POST", path, json=body_of(path, [USER]))
    assert whole.status_code == 200, whole.text
    assert arguments(path, whole.json()) == expected
    assert streamed(path, call("POST", path, json=body_of(path, [USER], stream=True)).text) == expected


@pytest.mark.parametrize("path", PATHS)
def test_numbers_of_a_call_are_not_lost(call, engine, path) -> None:
    text = '{"x": 1e400, "y": -1e400, "z": 123456789012345678901234567890, "w": 2.5e3}'
    engine.answer = f'<tool_call>{{"name": "f", "arguments": {text}}}</tool_call>'.encode()
    answer = call("POST", path, json=body_of(path, [USER])).json()
    inf = float("inf")
    assert arguments(path, answer) == {"x": inf, "y": -inf, "z": 123456789012345678901234567890, "w": 2500.0}


@pytest.mark.parametrize("path", PATHS)
def test_half_a_character_in_a_body_refuses_no_turn(call, make_context, engine, path) -> None:
    raw = json.dumps(body_of(path, [{"role": "user", "content": "a\ud83d b"}])).encode()
    assert HALF.encode() in raw
    text = SeenText()
    headers = {"content-type": "application/json"}
    response = call("POST", path, content=raw, headers=headers, context=make_context(text=text))
    assert response.status_code == 200, response.text
    assert text.messages[0][-1]["content"] == "a\ufffd b"


def test_what_is_no_json_is_told_with_its_place(call) -> None:
    raw = b'{"model": "tiny",\n "messages": nul}'
    response = call("POST", PATHS[0], content=raw, headers={"content-type": "application/json"})
    assert response.json()["error"]["message"] == "The body is not JSON: expected ident at line 2 column 17."


BROKEN = ['{"city": "Par', '{"x": 1 ', "null", "[]", '"text"', "{'a':1}", '{"a": 1,}', "{", '{"a": NaN}']


@pytest.mark.parametrize("text", BROKEN)
@pytest.mark.parametrize("path", PATHS[:2])
def test_calls_that_were_cut_or_broken_are_taken_back_as_calls_without_arguments(call, make_context, path, text):
    called = {"name": "f", "arguments": text}
    if path == "/v1/responses":
        made = {"type": "function_call", "call_id": "c", **called}
        items = [USER, made, {"type": "function_call_output", "call_id": "c", "output": "cut off"}]
    else:
        made = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": called}]}
        items = [USER, made, {"role": "tool", "tool_call_id": "c", "content": "cut off"}]
    seen = SeenText()
    response = call("POST", path, json=body_of(path, [*items, USER]), context=make_context(text=seen))
    assert response.status_code == 200, response.text
    assert seen.messages[0][1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


def history(path: str, answer: dict) -> list[dict]:
    """An answer with a call as the client sends it back, with the call's result."""
    if path == "/v1/responses":
        (made,) = [item for item in answer["output"] if item["type"] == "function_call"]
        result = {"type": "function_call_output", "call_id": made["call_id"], "output": "cut off"}
        return [USER, *answer["output"], result, USER]
    if path == "/v1/messages":
        made = next(block for block in answer["content"] if block["type"] == "tool_use")
        result = {"type": "tool_result", "tool_use_id": made["id"], "content": "cut off"}
        turn = {"role": "user", "content": [result, {"type": "text", "text": "Go"}]}
        return [USER, {"role": "assistant", "content": answer["content"]}, turn]
    if path == "/api/chat":
        return [USER, answer["message"], {"role": "tool", "content": "cut off", "tool_name": "f"}, USER]
    made = answer["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": made["tool_calls"][0]["id"], "content": "cut off"}
    return [USER, made, result, USER]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("end", ["Par", 'is", "b" 1}}</tool_call>', f"{HALF}", "\\ud8", "\\"])
def test_what_the_server_answered_itself_is_taken_back(call, engine, path, end) -> None:
    engine.answer = f'<tool_call>{{"name": "f", "arguments": {{"city": "{end}'.encode()
    first = call("POST", path, json=body_of(path, [USER]))
    assert first.status_code == 200, first.text
    engine.answer = b"Done."
    again = call("POST", path, json=body_of(path, history(path, first.json())))
    assert again.status_code == 200, again.text


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
USED = {"type": "tool_use", "id": "c", "name": "f", "input": {}}


@pytest.mark.parametrize("empty", [[], None])
@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_a_content_without_parts_is_an_empty_text(call, make_context, role, empty) -> None:
    for path in PATHS[:2]:
        seen = SeenText()
        items = [USER, {"role": role, "content": empty}, USER]
        response = call("POST", path, json=body_of(path, items), context=make_context(text=seen))
        assert response.status_code == 200, response.text
        assert seen.messages[0][1]["content"] == ""
    if role != "developer":
        items = [USER, {"role": role, "content": empty}, USER]
        assert call("POST", "/v1/messages", json=body_of("/v1/messages", items)).status_code == 200


@pytest.mark.parametrize("empty", [[], None])
def test_calls_and_their_results_need_no_content(call, make_context, empty) -> None:
    chat = [USER, {"role": "assistant", "content": empty, "tool_calls": [CALL]}]
    items = [*chat, {"role": "tool", "tool_call_id": "c", "content": empty}]
    seen = SeenText()
    assert call("POST", PATHS[0], json=body_of(PATHS[0], items), context=make_context(text=seen)).status_code == 200
    assert [message["content"] for message in seen.messages[0]] == ["Go", None, ""]
    items = [USER, CALLED, {"type": "function_call_output", "call_id": "c", "output": empty}]
    assert call("POST", PATHS[1], json=body_of(PATHS[1], items)).status_code == 200
    result = {"type": "tool_result", "tool_use_id": "c", "content": empty}
    items = [USER, {"role": "assistant", "content": [USED]}, {"role": "user", "content": [result]}]
    assert call("POST", PATHS[2], json=body_of(PATHS[2], items)).status_code == 200


@pytest.mark.parametrize("content", [None, [], ""])
def test_the_beginning_of_an_answer_may_be_empty(call, engine, content) -> None:
    begun = {"role": "assistant", "content": content}
    bodies = {
        "/v1/chat/completions": body_of(PATHS[0], [USER, begun], continue_final_message=True),
        "/v1/messages": body_of("/v1/messages", [USER, begun]),
    }
    if content != []:
        bodies["/api/chat"] = body_of("/api/chat", [USER, begun])
    for path, body in bodies.items():
        response = call("POST", path, json=body)
        assert response.status_code == 200, response.text
        assert bytes(engine.submitted[-1][0]).endswith(b"<assistant>")


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_results_stand_in_the_order_of_their_calls(order):
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": {}}} for name in "abc"]
    results = [{"role": "tool", "tool_call_id": name, "content": f"of {name}"} for name in "abc"]
    begin = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    sent = [*begin, *(results[place] for place in order), {"role": "user", "content": "thanks"}]
    assert results_in_order(sent) == [*begin, *results, {"role": "user", "content": "thanks"}]
