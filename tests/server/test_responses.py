"""OpenAI's Responses API over a fake engine, and by OpenAI's own client."""

import asyncio
import json
import time

import httpx
import openai
import pydantic
import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.server.admission import Queue
from roofline.server.app import create_app
from roofline.server.drain import DrainingServer
from roofline.server.keys import Keys, read_keys
from roofline.server.limits import Limits
from roofline.server.routes.responses.items import normal_items, turns_of
from roofline.server.routes.responses.output import ResponseItems
from roofline.server.routes.responses.schema import INSTEAD, NEUTRAL
from roofline.text.replies.parser import CallDelta, ReasoningDelta, TextDelta
from roofline.text.replies.reply_format import ReplyFormat
from tests.server.neutral import sample
from tests.server.text_sides import chatml

PATH = "/v1/responses"
BODY = {"model": "tiny", "input": "Hi"}
TOOL = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}}
CALLS = (
    '<think>Hm.</think>I look. <tool_call>{"name": "look", "arguments": {"city": "Köln"}}</tool_call>\n'
    '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
)


def events(response) -> list[dict]:
    parsed = []
    for event in response.text.strip().split("\n\n"):
        name, data = event.split("\n")
        parsed.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {parsed[-1]['type']}"
    assert [event["sequence_number"] for event in parsed] == list(range(len(parsed)))
    return parsed


def joined(stream: list[dict]) -> list[dict]:
    """The items that the deltas of a stream build."""
    items: list[dict] = []
    for event in stream:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
            text = ""
        elif kind == "content_part.added":
            items[-1]["content"].append(event["part"])
        elif kind.endswith(".delta"):
            assert (event["output_index"], event["item_id"]) == (len(items) - 1, items[-1]["id"])
            text += event["delta"]
        elif kind == "content_part.done":
            items[-1]["content"][0]["text"] = text
            assert items[-1]["content"][0] == event["part"]
        elif kind.endswith(".done") and kind != "output_item.done":
            assert (event.get("text") or event.get("arguments") or "") == text
        elif kind == "output_item.done":
            if items[-1]["type"] == "function_call":
                items[-1]["arguments"] = text
            items[-1]["status"] = event["item"]["status"]
            assert items[-1] == event["item"]
    return items


def without_names(value: object) -> object:
    """A response without what differs from one to the next."""
    if isinstance(value, list):
        return [without_names(each) for each in value]
    if isinstance(value, dict):
        fresh = ("id", "call_id", "created_at", "completed_at")
        return {name: without_names(each) for name, each in value.items() if name not in fresh}
    return value


ENDS = [
    ("Hello, wörld 世界.", {}, "completed"),
    (CALLS, {"tools": [TOOL]}, "completed"),
    (CALLS, {"tools": [TOOL], "parallel_tool_calls": False}, "completed"),
    (CALLS, {"tools": [TOOL], "max_output_tokens": 80}, "incomplete"),
    (CALLS, {"max_output_tokens": 8}, "incomplete"),
    ("", {}, "completed"),
]


@pytest.mark.parametrize(("answer", "extra", "status"), ENDS)
def test_stream_and_whole_are_equal(call, engine, answer, extra, status):
    engine.answer = answer.encode()
    whole = call("POST", PATH, json={**BODY, **extra}).json()
    stream = events(call("POST", PATH, json={**BODY, **extra, "stream": True}))
    assert [event["type"] for event in stream[:2]] == ["response.created", "response.in_progress"]
    assert stream[-1]["type"] == f"response.{status}"
    final = stream[-1]["response"]
    assert joined(stream) == final["output"]
    assert without_names(final) == without_names(whole)
    assert whole["status"] == status
    assert whole["incomplete_details"] == ({"reason": "max_output_tokens"} if status == "incomplete" else None)


DELTAS = st.lists(
    st.one_of(
        st.builds(TextDelta, st.text(min_size=1)),
        st.builds(ReasoningDelta, st.text(min_size=1)),
        st.sampled_from(["{}", '{"a": [1, "b"]}', ""]),
    ),
    max_size=8,
)


@settings(max_examples=40, deadline=None)
@given(DELTAS)
def test_the_events_of_any_reply_build_its_items(parts):
    deltas, number = [], 0
    for part in parts:
        if isinstance(part, str):  # a call, its arguments in two pieces
            deltas += [CallDelta(number, f"tool{number}", part[:3]), CallDelta(number, None, part[3:])]
            number += 1
        else:
            deltas.append(part)
    output, at_once = ResponseItems("a"), ResponseItems("a")
    stream = [event for delta in deltas for event in output.add([delta])] + output.close("incomplete")
    assert joined(json.loads(json.dumps(stream))) == output.items
    at_once.add(deltas)
    at_once.close("incomplete")
    assert at_once.items == output.items
    assert [item["status"] for item in output.items] == (["completed"] * len(output.items))[1:] + ["incomplete"] * bool(
        output.items
    )


def test_an_answer_with_reasoning_text_and_two_calls(call, engine):
    engine.answer = CALLS.encode()
    response = call("POST", PATH, json={**BODY, "tools": [TOOL], "metadata": {"a": "b"}, "user": "ann"}).json()
    thought, message, *calls = response["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "I look."
    assert [each["arguments"] for each in calls] == ['{"city": "Köln"}', "{}"]
    assert len({each["call_id"] for each in calls}) == 2
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": len("<think>Hm.</think>")}
    assert response["usage"]["input_tokens"] == len(engine.submitted[0][0])
    assert (response["metadata"], response["user"], response["store"]) == ({"a": "b"}, "ann", True)


class Client:
    """Requests in one application: what it keeps is there for the next."""

    def __init__(self, context) -> None:
        self.app = create_app(context)

    def __call__(self, method: str, path: str, key: str = "", **kwargs) -> httpx.Response:
        async def once():
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                headers = {"authorization": f"Bearer {key}"} if key else {}
                return await client.request(method, path, headers=headers, **kwargs)

        return asyncio.run(once())


@pytest.fixture
def client(make_context) -> Client:
    return Client(make_context())


def test_a_conversation_renders_the_same_prompt_in_parts_and_at_once(make_context, engine):
    text = chatml()
    text.reply_format = ReplyFormat("hermes", thinks=True, takes_tools=False)
    client = Client(make_context(text=text))
    fields = {"model": "tiny", "tools": [TOOL], "instructions": "Be brief."}
    parts = [
        {"role": "developer", "content": "Now."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    ]
    engine.answer = CALLS.encode()
    first = client("POST", PATH, json={**fields, "input": parts}).json()
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "7"} for item in calls]
    engine.answer = "Naïve<tool_call>".encode()  # what is no call stays text
    second = client("POST", PATH, json={**fields, "input": results, "previous_response_id": first["id"]}).json()
    last = client("POST", PATH, json={**fields, "input": "Why?", "previous_response_id": second["id"]})
    assert last.status_code == 200, last.text
    items = [*parts, *first["output"], *results, *second["output"], {"role": "user", "content": "Why?"}]
    assert client("POST", PATH, json={**fields, "input": items, "store": False}).status_code == 200
    *_, third, whole = engine.submitted
    assert third[0] == whole[0]
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Now."},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": item["call_id"], "function": {"name": "look", "arguments": item["arguments"]}} for item in calls
            ],
        },
        *({"role": "tool", "tool_call_id": item["call_id"], "content": "7"} for item in calls),
        {"role": "assistant", "content": "Naïve<tool_call>"},
        {"role": "user", "content": "Why?"},
    ]
    function = {name: value for name, value in TOOL.items() if name != "type"}
    tools = [{"type": "function", "function": function}]
    body = {"model": "tiny", "messages": chat, "tools": tools}
    assert client("POST", "/v1/chat/completions", json=body).status_code == 200
    assert engine.submitted[-1][0] == whole[0]


def test_instructions_are_of_one_response_alone(client, engine):
    first = client("POST", PATH, json={**BODY, "instructions": "Shout."}).json()
    client("POST", PATH, json={**BODY, "previous_response_id": first["id"]})
    assert [bytes(ids) for ids, _ in engine.submitted] == [
        b"<system>Shout.<user>Hi",
        b"<user>Hi<assistant>Hello, world.<user>Hi",
    ]


def test_items_of_one_turn_of_the_assistant_are_one_turn():
    texts = [{"role": "assistant", "content": text} for text in ("a", "b")]
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"x"', "status": "incomplete"}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    items = [*texts, thought, texts[0], call, texts[1], thought]
    turns = turns_of(None, [], normal_items(items, "r"))
    function = {"name": "look", "arguments": {}}
    assert turns == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "ab",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        },
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
    ]


def test_a_response_is_its_key_s_own(make_context, tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text('[[keys]]\nname = "ann"\nkey = "a"\n[[keys]]\nname = "bob"\nkey = "b"\n')
    assert len(read_keys(file)) == 2
    client = Client(make_context(keys=Keys(file=file)))
    response = client("POST", PATH, "a", json=BODY).json()
    path = f"{PATH}/{response['id']}"
    for method, where in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
        refused = client(method, path + where, "b")
        assert refused.status_code == 404, where
        unknown = client(method, f"{PATH}/resp_0{where}", "b")
        assert unknown.text == refused.text.replace(response["id"], "resp_0")  # whether it is there is not told
    assert client("POST", PATH, "b", json={**BODY, "previous_response_id": response["id"]}).status_code == 404
    assert client("GET", path, "a").json() == response
    assert client("DELETE", path, "a").json()["deleted"] is True
    assert client("GET", path, "a").status_code == 404


def test_what_is_not_to_be_kept_is_not(client, make_context):
    response = client("POST", PATH, json={**BODY, "store": False}).json()
    assert response["store"] is False
    assert client("GET", f"{PATH}/{response['id']}").status_code == 404
    none = Client(make_context(limits=Limits(stored_responses=0)))
    assert none("POST", PATH, json=BODY).json()["store"] is False
    for field in ({"store": True}, {"background": True}, {"previous_response_id": "resp_1"}):
        refused = none("POST", PATH, json={**BODY, **field})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(field)))
    small = Client(make_context(limits=Limits(stored_bytes=600)))
    for stream in (False, True):
        large = small("POST", PATH, json={**BODY, "stream": stream})
        told = events(large)[-1]["response"] if stream else large.json()
        assert (told["status"], told["store"]) == ("completed", False)


def test_input_items_are_listed_in_pages(client):
    parts = [{"role": "user", "content": str(number)} for number in range(5)]
    path = f"{PATH}/{client('POST', PATH, json={**BODY, 'input': parts}).json()['id']}/input_items"
    whole = client("GET", path, params={"order": "asc"}).json()
    assert [item["content"][0]["text"] for item in whole["data"]] == list("01234")
    assert [item["content"][0]["text"] for item in client("GET", path).json()["data"]] == list("43210")
    page = client("GET", path, params={"limit": 2, "after": whole["data"][3]["id"]}).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["2", "1"]
    assert (page["has_more"], page["last_id"]) == (True, whole["data"][1]["id"])
    for limit, more in ((1, True), (4, True), (5, False), (6, False), (100, False)):
        page = client("GET", path, params={"limit": limit}).json()
        assert (len(page["data"]), page["has_more"]) == (min(limit, 5), more)
    last = client("GET", path, params={"limit": 2, "after": whole["data"][2]["id"]}).json()
    assert (len(last["data"]), last["has_more"]) == (2, False)
    beyond = client("GET", path, params={"after": whole["data"][0]["id"]}).json()
    assert beyond == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    wrong_limits = ({"limit": wrong} for wrong in (0, 101, "x", "-1", "٣", "1" * 10))
    for wrong in (*wrong_limits, {"order": "up"}, {"after": "x"}, {"include": "y"}):
        refused = client("GET", path, params=wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(wrong)))


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_every_value_that_asks_for_nothing_is_taken(call, name):
    for value in map(sample, NEUTRAL[name]):
        assert call("POST", PATH, json={**BODY, name: value}).status_code == 200
    assert NEUTRAL["top_logprobs"] == (None, 0)


def test_every_value_of_a_tool_and_an_item_that_asks_for_nothing_is_taken(call):
    for name, value in (("async", False), ("defer_loading", False), ("allowed_callers", []), ("output_schema", None)):
        for each in (None, value):
            assert call("POST", PATH, json={**BODY, "tools": [{**TOOL, name: each}]}).status_code == 200
        refused = call("POST", PATH, json={**BODY, "tools": [{**TOOL, name: True}]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, f"tools.0.{name}")
    item = {"role": "user", "content": "Hi"}
    for name, value in (("async", False), ("phase", "final_answer"), ("caller", None), ("namespace", None)):
        for each in (None, value):
            assert call("POST", PATH, json={**BODY, "input": [{**item, name: each}]}).status_code == 200
        refused = call("POST", PATH, json={**BODY, "input": [{**item, name: True}]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, f"input.0.{name}")


def test_what_a_stored_response_cannot_be_asked_for_is_refused(client):
    path = f"{PATH}/{client('POST', PATH, json=BODY).json()['id']}"
    for query in ({}, {"stream": "false"}):
        assert client("GET", path, params=query).status_code == 200
    for query in ({"stream": "true"}, {"starting_after": "1"}, {"include": "x"}, {"include[]": "x"}):
        refused, (name,) = client("GET", path, params=query), query
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", name.rstrip("[]"))
    for name in ("include", "include[]"):
        refused = client("GET", f"{path}/input_items", params={name: "x"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "include")
    for digits, words in (("9" * 9, "is not within 1 and 100"), ("9" * 10, "is not a number"), ("0" * 8 + "5", None)):
        listed = client("GET", f"{path}/input_items", params={"limit": digits})
        assert (words is None) == (listed.status_code == 200)
        assert words is None or words in listed.json()["error"]["message"]


def test_a_page_has_twenty_input_items_where_nobody_says(client):
    parts = [{"role": "user", "content": str(number)} for number in range(21)]
    for count, more in ((20, False), (21, True)):
        made = client("POST", PATH, json={**BODY, "input": parts[:count]}).json()["id"]
        page = client("GET", f"{PATH}/{made}/input_items").json()
        assert (len(page["data"]), page["has_more"]) == (20, more)


@pytest.mark.parametrize(("length", "status"), [(0, 400), (1, 200), (256, 200), (257, 400)])
def test_names_that_items_and_requests_have_are_bounded(call, length, status):
    name = "x" * length
    made_call = {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"}
    bodies = {"input.0.call_id": {"input": [made_call, {**CALL_OUTPUT, "call_id": name}], "tools": [TOOL]}}
    if length:
        bodies["input.0.name"] = {"input": [{**made_call, "call_id": "c", "name": name}, CALL_OUTPUT], "tools": [TOOL]}
        bodies["input.0.id"] = {"input": [{"id": name, "role": "user", "content": "Hi"}]}
    bodies["cache_salt"] = {"cache_salt": name}
    for param, fields in bodies.items():
        answer = call("POST", PATH, json={**BODY, **fields})
        assert answer.status_code == status, (param, answer.text)
        if status == 400:
            assert answer.json()["error"]["param"] == param
    orphan = call("POST", PATH, json={**BODY, "input": [{**CALL_OUTPUT, "call_id": name}]}).json()["error"]
    assert ("String should have" in orphan["message"]) == (status == 400)
    previous = call("POST", PATH, json={**BODY, "previous_response_id": name})
    assert previous.status_code == (400 if length > 256 else 404)


IMAGE = [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "x"}]}]
CALL_OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "7"}
WRONG = [
    ({"input": IMAGE}, "input.0.content.1"),
    ({"input": [{**CALL_OUTPUT, "output": [{"type": "input_audio"}]}]}, "input.0.output.0"),
    ({"input": [CALL_OUTPUT]}, "input.0.call_id"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.type"),
    ({"input": [{"role": "user", "content": "a", "more": 1}]}, "input.0.more"),
    ({"input": [{"role": "user"}]}, "input.0.content"),
    ({"input": []}, "input"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": 1}]}, "input.0.arguments"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input.0.encrypted_content"),
    ({"input": "a" * 2000}, "input"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools.0.name"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.type"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"reasoning": {"effort": "fierce"}}, "reasoning.effort"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"include": "x"}, "include"),
    ({"reasoning": {"depth": 1}}, "reasoning.depth"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_object"}}, "tools": [TOOL]}, "text.format"),
    ({"text": {"verbosity": "least"}}, "text.verbosity"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 5000}, "max_output_tokens"),
    ({"temperature": 3.0}, "temperature"),
    ({"metadata": {"a": "b" * 513}}, "metadata"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ({"stream_options": {}}, "stream_options"),
    ({"background": True, "stream": True}, "background"),
    ({"background": True, "store": False}, "background"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    *(({name: "x"}, name) for name in NEUTRAL),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_what_cannot_be_honoured_is_refused_by_name(call, engine, fields, param):
    response = call("POST", PATH, json={**BODY, **fields})
    assert response.status_code == (404 if param == "previous_response_id" else 400)
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"] or error["code"] == "context_length_exceeded"
    assert not engine.submitted


METADATA = {
    "pairs": {str(number): "" for number in range(16)},
    "characters of a key": {"k" * 64: ""},
    "characters of a value": {"a": "ä" * 512},
}


@pytest.mark.parametrize("of", METADATA)
def test_metadata_is_taken_up_to_openais_bounds(call, engine, of):
    (key, value), *_ = METADATA[of].items()
    response = call("POST", PATH, json={**BODY, "metadata": METADATA[of]})
    assert (response.status_code, response.json()["metadata"]) == (200, METADATA[of])
    beyond = {"pairs": {**METADATA[of], "one more": ""}, "characters of a key": {key + "k": ""}}
    refused = call("POST", PATH, json={**BODY, "metadata": beyond.get(of, {key: value + "ä"})})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "metadata")
    assert len(engine.submitted) == 1


def test_a_response_repeats_its_request_with_defaults_where_it_says_nothing(call):
    response = call("POST", PATH, json=BODY).json()
    defaults = {
        "background": False,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "temperature": 1.0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
    }
    assert {name: response[name] for name in defaults} == defaults
    fields = {"temperature": 0.0, "top_p": 0.5, "parallel_tool_calls": False, "tools": [TOOL], "instructions": "Be."}
    response = call("POST", PATH, json={**BODY, **fields}).json()
    assert {name: response[name] for name in fields} == {**fields, "tools": [{**TOOL, "strict": False}]}


def test_neutral_values_and_extensions_are_taken(call, engine):
    neutral = {name: sample(values[-1]) for name, values in NEUTRAL.items()}
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "min_p": 0.1}
    more = {"reasoning": {"effort": None}, "text": {"format": {"type": "text"}}, "prompt_cache_key": "a"}
    response = call("POST", PATH, json={**BODY, **neutral, **fields, **more, "max_output_tokens": 20})
    assert response.status_code == 200, response.text
    params = engine.submitted[0][1]
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.max_tokens == 20
    assert INSTEAD.keys() <= NEUTRAL.keys() | {"include", "encrypted_content"}


def test_a_stream_that_fails_ends_with_response_failed_and_is_kept_so(client, engine):
    engine.error = "out of memory"
    stream = events(client("POST", PATH, json={**BODY, "stream": True}))
    failed = stream[-1]["response"]
    assert (stream[-1]["type"], failed["status"], failed["error"]["code"]) == (
        "response.failed",
        "failed",
        "server_error",
    )
    assert failed["output"][0]["status"] == "incomplete"
    assert client("GET", f"{PATH}/{failed['id']}").json() == failed


def test_background(make_context, engine):
    """Queued, in progress, cancelled or complete; what is refused at once is refused, and what is deleted ends."""

    async def run():
        app = create_app(make_context(limits=Limits(queued=2)))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client, asyncio.timeout(60):
            engine.gate.clear()
            body = {**BODY, "background": True}
            first, second = [(await client.post(PATH, json=body)).json() for _ in range(2)]
            assert (first["status"], first["output"], first["usage"]) == ("queued", [], None)
            refused = await client.post(PATH, json=body)
            assert refused.status_code == 429
            assert app.state.responses.store._totals["local"][0] == 2  # it left nothing behind
            path, other = f"{PATH}/{first['id']}", f"{PATH}/{second['id']}"
            assert (await client.get(path)).json()["status"] in ("queued", "in_progress")
            waiting = await client.post(PATH, json={**BODY, "previous_response_id": first["id"]})
            assert (waiting.status_code, waiting.json()["error"]["param"]) == (400, "previous_response_id")
            cancelled = (await client.post(f"{path}/cancel")).json()
            assert cancelled["status"] == "cancelled"
            assert (await client.post(f"{path}/cancel")).json() == cancelled
            assert (await client.delete(other)).json()["deleted"] is True
            assert (await client.get(other)).status_code == 404
            assert not engine.open
            engine.gate.set()
            third = (await client.post(PATH, json=body)).json()
            while (told := (await client.get(f"{PATH}/{third['id']}")).json())["status"] in ("queued", "in_progress"):
                await asyncio.sleep(0)
            assert (told["status"], told["output"][0]["content"][0]["text"]) == ("completed", "Hello, world.")
            assert (await client.post(f"{PATH}/{third['id']}/cancel")).json() == told
            foreground = (await client.post(PATH, json=BODY)).json()
            assert (await client.post(f"{PATH}/{foreground['id']}/cancel")).status_code == 400
            engine.error = "out of memory"
            fourth = (await client.post(PATH, json=body)).json()
            while (told := (await client.get(f"{PATH}/{fourth['id']}")).json())["status"] in ("queued", "in_progress"):
                await asyncio.sleep(0)
            assert (told["status"], told["error"]["code"]) == ("failed", "server_error")

    asyncio.run(run())


def test_a_server_that_ends_waits_for_what_is_computed_in_the_background():
    async def run():
        queue = Queue(Limits(), lambda: 1024)
        server = DrainingServer(uvicorn.Config(lambda: None, log_config=None), queue, 30)
        queue.ends.add(print)  # as a request that runs does
        waiting = asyncio.create_task(server._drained(60, heed_force=False))
        for _ in range(3):
            await asyncio.sleep(0.03)
        assert not waiting.done()
        queue.ends.clear()
        await asyncio.wait_for(waiting, 60)

    asyncio.run(run())


class City(pydantic.BaseModel):
    name: str
    people: int


def test_openai_s_client(live, engine):
    client = openai.OpenAI(base_url=f"{live()}/v1", api_key="x", max_retries=0)
    engine.answer = CALLS.encode()
    first = client.responses.create(**BODY, tools=[TOOL])
    assert first.output_text == "I look."
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "7"}
        for item in first.output
        if item.type == "function_call"
    ]
    engine.answer = b"Done."
    again = client.responses.create(model="tiny", input=[{"role": "user", "content": "Hi"}, *first.output, *results])
    chained = client.responses.create(model="tiny", input=results, previous_response_id=first.id)
    assert again.output_text == chained.output_text == "Done."
    assert engine.submitted[-1][0] == engine.submitted[-2][0]
    with client.responses.stream(model="tiny", input="Hi", tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert (kinds[0], kinds[-1], final.output_text) == ("response.created", "response.completed", "Done.")
    assert client.responses.retrieve(final.id).output_text == "Done."
    assert [item.type for item in client.responses.input_items.list(chained.id)] == ["function_call_output"] * 2
    client.responses.delete(final.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(final.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(chained.id)
    background = client.responses.create(**BODY, background=True)
    until = time.monotonic() + 60
    while client.responses.retrieve(background.id).status != "completed":
        assert time.monotonic() < until
    engine.answer = b'{"name": "Ulm", "people": 129000}'
    assert client.responses.parse(**BODY, text_format=City).output_parsed == City(name="Ulm", people=129000)
    assert engine.submitted[-1][1].constraint is not None
