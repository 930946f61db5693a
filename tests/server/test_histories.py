"""What a server has answered is taken back by every API, and half characters refuse nothing."""

import json
from types import MappingProxyType

import anthropic
import openai
import pytest

from roofline.server.conversation import results_in_order
from tests.server.conftest import BytesText
from tests.server.text_sides import chatml

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


def answered(path: str, calls: list[str], results: list[str], between: bool = False) -> list[dict]:
    """A history in which some calls were made at once, and results came; between: the user spoke before them."""
    spoken = [USER] if between else []
    if path == "/v1/responses":
        made = [{**CALLED, "call_id": name} for name in calls]
        return [
            USER,
            *made,
            *spoken,
            *({"type": "function_call_output", "call_id": n, "output": "7"} for n in results),
            USER,
        ]
    if path == "/v1/messages":
        made = {"role": "assistant", "content": [{**USED, "id": name} for name in calls]}
        blocks = [{"type": "tool_result", "tool_use_id": name, "content": "7"} for name in results]
        return [USER, made, *spoken, {"role": "user", "content": [*blocks, {"type": "text", "text": "Go"}]}]
    made = {"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": name} for name in calls]}
    return [USER, made, *spoken, *({"role": "tool", "tool_call_id": name, "content": "7"} for name in results), USER]


COUNTS = [
    (["a"], [], "has no result"),
    (["a", "b"], ["b"], "'a' has no result"),
    (["a"], ["a", "a"], "'a' has a result already"),
    (["a"], ["b"], "'b' names no call of an earlier message"),
    (["a", "b"], ["b", "a"], None),
    (["a", "a"], ["a", "a"], None),  # as servers call them that count anew
]


@pytest.mark.parametrize("path", PATHS[:3])
@pytest.mark.parametrize(("calls", "results", "problem"), COUNTS, ids=range(len(COUNTS)))
def test_each_call_of_a_history_has_one_result(call, engine, path, calls, results, problem) -> None:
    """OpenAI's and Anthropic's APIs refuse the others too; a template would write them as they come."""
    for between in (False, True):
        response = call("POST", path, json=body_of(path, answered(path, calls, results, between)))
        if problem is None:
            assert response.status_code == 200, response.text
            continue
        error = response.json()["error"]
        assert response.status_code == 400
        assert problem in error["message"]
        assert "messages." in error["message"] or "input." in error["message"]
    assert bool(engine.submitted) == (problem is None)


def test_a_call_that_was_cut_off_needs_no_result(call) -> None:
    """Of a response that ended in it, or whose arguments are no object: nobody can have executed it."""
    for status, arguments, code in (
        ("incomplete", "{}", 200),
        ("incomplete", '{"a', 200),
        ("completed", '{"a', 200),
        ("completed", "{}", 400),
    ):
        items = [USER, {**CALLED, "status": status, "arguments": arguments}, USER]
        assert call("POST", "/v1/responses", json=body_of("/v1/responses", items)).status_code == code
    for arguments, code in (('{"a', 200), ("null", 200), ("{}", 400)):
        made = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [USER, {"role": "assistant", "content": None, "tool_calls": [made]}, USER]
        response = call("POST", "/v1/chat/completions", json=body_of("/v1/chat/completions", messages))
        assert response.status_code == code, response.text


def test_a_conversation_that_ends_with_calls_can_be_rendered(call, make_context) -> None:
    context = make_context(text=chatml())
    body: dict = {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]}
    rendered = call("POST", "/apply-template", context=context, json=body | {"add_generation_prompt": False})
    assert '"name": "f"' in rendered.json()["prompt"]
    assert call("POST", "/apply-template", context=context, json=body).status_code == 400


def test_clients_packages_send_their_own_rounds_back(live, engine) -> None:
    """Two calls at once, with results, by the packages of OpenAI and Anthropic."""
    two = '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n' * 2
    engine.answer = two.encode()
    client = openai.OpenAI(base_url=f"{live()}/v1", api_key="x", max_retries=0)
    message = client.chat.completions.create(model="tiny", messages=[USER], tools=TOOLS[PATHS[0]]).choices[0].message
    results = [{"role": "tool", "tool_call_id": made.id, "content": "7"} for made in message.tool_calls]
    client.chat.completions.create(model="tiny", messages=[USER, message, *results], tools=TOOLS[PATHS[0]])
    with pytest.raises(openai.BadRequestError, match=message.tool_calls[1].id):
        client.chat.completions.create(model="tiny", messages=[USER, message, results[0]], tools=TOOLS[PATHS[0]])
    first = client.responses.create(model="tiny", input="Go", tools=TOOLS["/v1/responses"])
    made = [item for item in first.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": item.call_id, "output": "7"} for item in made]
    client.responses.create(model="tiny", input=results, previous_response_id=first.id)
    with pytest.raises(openai.BadRequestError, match=f"input: the call '{made[0].call_id}' has no result"):
        client.responses.create(model="tiny", input="Go", previous_response_id=first.id)
    with pytest.raises(openai.BadRequestError, match=made[1].call_id):
        client.responses.create(model="tiny", input=[USER, *first.output, results[0]])
    other = anthropic.Anthropic(base_url=str(client.base_url).removesuffix("/v1/"), api_key="x", max_retries=0)
    tools = TOOLS["/v1/messages"]
    used = other.messages.create(model="tiny", max_tokens=300, messages=[USER], tools=tools).content
    blocks = [{"type": "tool_result", "tool_use_id": block.id, "content": "7"} for block in used]
    turns = [USER, {"role": "assistant", "content": used}]
    other.messages.create(
        model="tiny", max_tokens=300, messages=[*turns, {"role": "user", "content": blocks}], tools=tools
    )
    with pytest.raises(anthropic.BadRequestError, match=used[1].id):
        other.messages.create(
            model="tiny", max_tokens=300, messages=[*turns, {"role": "user", "content": blocks[:1]}], tools=tools
        )
