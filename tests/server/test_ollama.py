"""Ollama's API over a fake engine."""

import json

import ollama
import pytest

from roofline.server.routes.ollama.schema import NEUTRAL, NEUTRAL_MESSAGE, NEUTRAL_OPTIONS
from roofline.text.replies.reply_format import ReplyFormat
from tests.server.neutral import sample
from tests.server.text_sides import chatml

USER = {"role": "user", "content": "Hi"}
CHAT = {"model": "tiny", "messages": [USER]}
TEXT = {"model": "tiny", "prompt": "Hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"function": {"name": "look", "arguments": {"at": 1}}}
WRITTEN = (
    b"<think>hm</think>I look."
    b'<tool_call>{"name": "look", "arguments": {"at": [1]}}</tool_call>'
    b'<tool_call>{"name": "look", "arguments": {}}</tool_call>'
)


def lines(response) -> list:
    assert response.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in response.text.splitlines()]


def joined(stream) -> dict:
    """The object that the lines of a stream build."""
    *parts, last = stream
    assert last["done"] is True
    assert all(part["done"] is False for part in parts)
    whole = {**last}
    if "response" in whole:
        thinking = "".join(part.get("thinking", "") for part in parts)
        whole |= {"response": "".join(part["response"] for part in parts)} | (
            {"thinking": thinking} if thinking else {}
        )
    else:
        messages = [part["message"] for part in parts]
        message = {"role": "assistant", "content": "".join(message["content"] for message in messages)}
        thinking = "".join(message.get("thinking", "") for message in messages)
        calls = [call for message in messages for call in message.get("tool_calls", [])]
        whole["message"] = message | ({"thinking": thinking} if thinking else {})
        whole["message"] |= {"tool_calls": calls} if calls else {}
    logprobs = [entry for part in parts for entry in part.get("logprobs", [])]
    return whole | ({"logprobs": logprobs} if logprobs else {})


def without_times(answer: dict) -> dict:
    assert 0 < answer["prompt_eval_duration"] <= answer["total_duration"]
    assert 0 <= answer["eval_duration"] <= answer["total_duration"]
    return {name: value for name, value in answer.items() if name != "created_at" and not name.endswith("_duration")}


def test_a_chat_is_streamed_unless_it_is_refused(call, engine):
    whole = call("POST", "/api/chat", json={**CHAT, "stream": False}).json()
    assert whole["load_duration"] == 0
    assert without_times(whole) == {
        "model": "tiny",
        "message": {"role": "assistant", "content": "Hello, world."},
        "done": True,
        "done_reason": "stop",
        "prompt_eval_count": 8,
        "eval_count": 14,
    }
    assert whole["created_at"].endswith("Z")
    for stream in ({}, {"stream": None}, {"stream": True}):
        parts = lines(call("POST", "/api/chat", json={**CHAT, **stream}))
        assert without_times(joined(parts)) == without_times(whole)


@pytest.mark.parametrize("options", [{}, {"stop": ["xx", ", w"]}, {"num_predict": 3}, {"stop": "Hello"}])
@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 2}])
@pytest.mark.parametrize(("path", "body"), [("/api/chat", CHAT), ("/api/generate", TEXT)])
@pytest.mark.parametrize("answer", [WRITTEN, "Hello, wörld 世界".encode()])
def test_stream_and_whole_are_equal(call, engine, path, body, options, more, answer):
    engine.answer = answer
    tools = {"tools": [TOOL]} if path == "/api/chat" else {}
    body = {**body, **tools, **more, "options": options}
    whole = call("POST", path, json={**body, "stream": False}).json()
    assert without_times(joined(lines(call("POST", path, json=body)))) == without_times(whole)
    assert ("logprobs" in whole) == bool(more)
    assert whole["done_reason"] == ("length" if "num_predict" in options else "stop")


def test_calls_and_thoughts_are_told_apart(call, engine):
    engine.answer = WRITTEN
    message = call("POST", "/api/chat", json={**CHAT, "tools": [TOOL], "stream": False}).json()["message"]
    assert message == {
        "role": "assistant",
        "content": "I look.",
        "thinking": "hm",
        "tool_calls": [
            {"function": {"name": "look", "arguments": {"at": [1]}}},
            {"function": {"name": "look", "arguments": {}}},
        ],
    }
    answer = call("POST", "/api/generate", json={**TEXT, "stream": False}).json()
    assert (answer["thinking"], answer["response"][:7]) == ("hm", "I look.")


def test_logprobs_stand_with_their_tokens(call):
    body = {**TEXT, "logprobs": True, "top_logprobs": 1, "options": {"num_predict": 2}, "stream": False}
    first, second = call("POST", "/api/generate", json=body).json()["logprobs"]
    assert first == {
        "token": "H", "logprob": -0.5, "bytes": [72], "top_logprobs": [{"token": "\0", "logprob": -1.0, "bytes": [0]}],
    }  # fmt: skip
    assert second["token"] == "e"


def test_options_reach_the_engine(call, engine):
    same = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -1.0,
    }
    options = {**same, "seed": 3, "num_predict": 9, "repeat_penalty": 1.5, "stop": "x", "num_keep": 24}
    assert call("POST", "/api/chat", json={**CHAT, "options": options, "keep_alive": "5m"}).status_code == 200
    params = engine.submitted[0][1]
    assert {name: getattr(params, name) for name in same} == same
    assert (params.seed, params.max_tokens, params.repetition_penalty, params.stop) == (3, 9, 1.5, ("x",))


def test_defaults_are_ollamas_own(call, engine):
    assert call("POST", "/api/chat", json={**CHAT, "options": {"seed": -1, "num_predict": -1}}).status_code == 200
    params = engine.submitted[0][1]
    assert (params.temperature, params.top_k, params.top_p) == (0.8, 40, 0.9)
    assert (params.seed, params.max_tokens, params.repetition_penalty) == (None, None, 1.0)


@pytest.mark.parametrize(("options", "most"), [({}, 92), ({"num_predict": 5}, 5), ({"num_predict": 93}, 92)])
def test_a_shorter_context_is_kept(call, engine, options, most):
    call("POST", "/api/chat", json={**CHAT, "options": {"num_ctx": 100, **options}})
    assert engine.submitted[0][1].max_tokens == most


def test_prompts_have_a_template_unless_they_are_raw(call, engine):
    call("POST", "/api/generate", json={**TEXT, "system": "Be."})
    call("POST", "/api/generate", json={**TEXT, "raw": True})
    assert [bytes(ids) for ids, _ in engine.submitted] == [b"<system>Be.<user>Hi", b"Hi"]


@pytest.fixture
def seen(make_context):
    """(context, what its text side gets): messages, and options of `encode_chat`."""
    context, calls = make_context(), []
    context.text.encode_chat = lambda messages, most, **options: (calls.append((list(messages), options)), [1])[1]
    return context, calls


def test_results_are_matched_with_calls_by_name_and_order(call, seen):
    context, calls = seen
    other = {"function": {"name": "other", "arguments": {}}}
    turns = [
        {"role": "system", "content": "Be."},
        USER,
        {"role": "assistant", "thinking": "hm", "tool_calls": [CALL, other, {**CALL, "id": "x"}]},
        {"role": "tool", "content": "1", "tool_name": "other"},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "3", "tool_call_id": "x"},
    ]
    assert (
        call("POST", "/api/chat", context=context, json={**CHAT, "messages": turns, "think": True}).status_code == 200
    )
    ((messages, options),) = calls
    assert [call["id"] for call in messages[2]["tool_calls"]] == ["call00001", "call00002", "x"]
    assert (messages[2]["reasoning_content"], messages[2]["content"]) == ("hm", "")
    assert [(turn["tool_call_id"], turn["name"], turn["content"]) for turn in messages[3:]] == [
        ("call00001", "look", "2"),
        ("call00002", "other", "1"),
        ("x", "look", "3"),
    ]
    assert options["variables"] == {"enable_thinking": True}


@pytest.mark.parametrize(("length", "status"), [(256, 200), (257, 400)])
def test_ids_and_names_of_calls_are_bounded(call, seen, length, status):
    name = "x" * length
    calls = [{"function": {"name": name, "arguments": {}}}, {**CALL, "id": name}]
    for each, result in zip(calls, ({"tool_name": name}, {"tool_call_id": name}), strict=True):
        turns = [USER, {"role": "assistant", "tool_calls": [each]}, {"role": "tool", "content": "a", **result}]
        assert call("POST", "/api/chat", context=seen[0], json={**CHAT, "messages": turns}).status_code == status


def test_an_answer_goes_on_from_the_assistants_last_words(call, seen):
    context, calls = seen
    turns = [USER, {"role": "assistant", "content": "So"}]
    assert call("POST", "/api/chat", context=context, json={**CHAT, "messages": turns}).status_code == 200
    assert calls[0][1]["continues"] is True


def test_a_model_that_does_not_think_says_so(call, make_context):
    context = make_context()
    context.text.reply_format = ReplyFormat("hermes", thinks=False, takes_tools=True)
    response = call("POST", "/api/chat", context=context, json={**CHAT, "think": True})
    assert (response.status_code, response.json()) == (400, {"error": "think: the model does not think."})
    assert call("POST", "/api/chat", context=context, json={**CHAT, "think": False}).status_code == 200


REFUSED = [
    ("/api/chat", {"surprise": 1}, "surprise"),
    ("/api/chat", {"messages": [USER] * 1025}, "messages"),
    ("/api/chat", {"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
    ("/api/chat", {"messages": [{**USER, "images": ["x"]}]}, "messages.0.images"),
    ("/api/chat", {"messages": [{**USER, "tool_calls": [CALL]}]}, "messages.0.tool_calls"),
    ("/api/chat", {"messages": [{**USER, "thinking": "a"}]}, "messages.0.thinking"),
    ("/api/chat", {"messages": [{**USER, "tool_name": "a"}]}, "messages.0.tool_name"),
    ("/api/chat", {"messages": [{"role": "tool", "content": "a"}]}, "messages.0"),
    ("/api/chat", {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}, "messages"),
    ("/api/chat", {"tools": [TOOL] * 2}, "tools.1.function.name"),
    ("/api/chat", {"options": {"num_ctx": 1001}}, "options.num_ctx"),
    ("/api/chat", {"options": {"num_ctx": 8}}, "messages"),
    ("/api/chat", {"options": {"num_predict": 0}}, "options.num_predict"),
    ("/api/chat", {"options": {"num_predict": 1000}}, "options.num_predict"),
    ("/api/chat", {"options": {"temperature": -1}}, "options.temperature"),
    ("/api/chat", {"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
    ("/api/chat", {"options": {"surprise": 1}}, "options.surprise"),
    ("/api/chat", {"options": {"stop": ["x"] * 17}}, "options.stop"),
    ("/api/chat", {"keep_alive": 0}, "keep_alive"),
    ("/api/chat", {"keep_alive": "0s"}, "keep_alive"),
    ("/api/chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("/api/chat", {"top_logprobs": 2}, "top_logprobs"),
    ("/api/generate", {"prompt": "x" * 2000}, "prompt"),
    ("/api/generate", {"raw": True, "system": "a"}, "system"),
    ("/api/generate", {"raw": True, "think": True}, "think"),
]


@pytest.mark.parametrize(("path", "change", "name"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(call, engine, path, change, name):
    response = call("POST", path, json={**(CHAT if path == "/api/chat" else TEXT), **change})
    assert response.status_code == 400
    assert list(response.json()) == ["error"]
    assert name in response.json()["error"]
    assert not engine.submitted


@pytest.mark.parametrize(
    ("table", "place"),
    [
        (NEUTRAL, lambda name, value: {name: value}),
        (NEUTRAL_OPTIONS, lambda name, value: {"options": {name: value}}),
        (NEUTRAL_MESSAGE, lambda name, value: {"messages": [{**USER, name: value}]}),
    ],
    ids=["body", "options", "message"],
)
def test_fields_that_ask_for_nothing_are_taken(call, table, place):
    for name, values in table.items():
        for value in map(sample, values):
            assert call("POST", "/api/chat", json={**CHAT, **place(name, value)}).status_code == 200
        error = call("POST", "/api/chat", json={**CHAT, **place(name, "something")}).json()["error"]
        assert f"{name} is not supported." in error


def test_names_may_have_the_tag_latest(call):
    assert (
        call("POST", "/api/chat", json={**CHAT, "model": "tiny:latest", "stream": False}).json()["model"]
        == "tiny:latest"
    )
    response = call("POST", "/api/chat", json={**CHAT, "model": "llama"})
    assert (response.status_code, response.json()) == (404, {"error": "model 'llama' not found"})


def test_what_is_said_of_the_model(call, make_context):
    context = make_context(text=chatml())
    (card,) = call("GET", "/api/tags").json()["models"]
    assert (card["name"], card["model"], card["modified_at"]) == ("tiny", "tiny", "1970-01-01T00:00:01Z")
    assert len(card["digest"]) == 64
    (card,) = call("GET", "/api/ps").json()["models"]
    assert card["context_length"] == 1000
    shown = call("POST", "/api/show", context=context, json={"model": "tiny:latest"}).json()
    assert shown["template"] == context.text.template.source
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == 1000
    assert shown["capabilities"] == ["completion", "tools"]
    assert call("POST", "/api/show", context=context, json={"name": "other"}).status_code == 404
    assert "model" in call("POST", "/api/show", context=context, json={}).json()["error"]
    assert call("GET", "/api/version").json()["version"]


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        ("/api/chat", {}, {"message": {"role": "assistant", "content": ""}}),
        ("/api/chat", {"messages": [], "keep_alive": "5m"}, {"message": {"role": "assistant", "content": ""}}),
        ("/api/generate", {}, {"response": ""}),
        ("/api/generate", {"prompt": ""}, {"response": ""}),
    ],
)
def test_a_body_without_words_loads_the_model(call, engine, path, body, answer):
    response = call("POST", path, json={"model": "tiny:latest", **body}).json()
    assert response.pop("created_at").endswith("Z")
    assert response == {"model": "tiny:latest", **answer, "done": True, "done_reason": "load"}
    assert not engine.submitted
    for wrong in ({"surprise": 1}, {"keep_alive": 0}, {"model": "other"}):
        assert call("POST", path, json={"model": "tiny", **body, **wrong}).status_code in (400, 404)
    engine.up = False
    assert call("POST", path, json={"model": "tiny", **body}).status_code == 503


def test_ollamas_command_line_finds_a_server(call, make_context):
    assert call("HEAD", "/").status_code == 200
    assert call("GET", "/").status_code == 200  # the page


def test_unknown_paths_have_errors_of_the_same_form(call):
    response = call("POST", "/api/pull", json={})
    assert (response.status_code, list(response.json())) == (404, ["error"])


def test_a_stream_that_fails_ends_with_an_error(call, engine):
    engine.error = "out of luck"
    stream = lines(call("POST", "/api/chat", json=CHAT))
    assert list(stream[-1]) == ["error"]
    assert "out of luck" not in json.dumps(stream)


def test_ollamas_own_client(live):
    client = ollama.Client(host=live())
    options = {"stop": ["world"], "temperature": 0}
    whole = client.chat(model="tiny", messages=[USER], options=options)
    parts = list(client.chat(model="tiny", messages=[USER], options=options, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content == "Hello, "
    assert (parts[-1].done_reason, parts[-1].eval_count) == (whole.done_reason, whole.eval_count)
    assert client.generate(model="tiny", prompt="Hi", keep_alive=-1).response == "Hello, world."
    assert [model.model for model in client.list().models] == [model.model for model in client.ps().models] == ["tiny"]
    with pytest.raises(ollama.ResponseError, match="not found"):
        client.chat(model="llama", messages=[USER])
    with pytest.raises(ollama.ResponseError, match="num_ctx"):
        list(client.chat(model="tiny", messages=[USER], options={"num_ctx": 9999}, stream=True))
