"""Triton's generate extension, and what SageMaker asks of a container, over a fake engine."""

import json

import pytest

from roofline.server.routes.triton.schema import NEUTRAL

GENERATE = "/v2/models/tiny/generate"
STREAM = "/v2/models/tiny/generate_stream"
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def events(response) -> list:
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]


@pytest.mark.parametrize("fields", [{"max_tokens": 50}, {"max_tokens": 3}, {"stop": [", w"]}, {"stop_words": "world"}])
@pytest.mark.parametrize("inside", [True, False])
def test_stream_and_whole_are_equal(call, fields, inside):
    body = {"text_input": "Hi", **({"parameters": fields} if inside else fields)}
    whole = call("POST", GENERATE, json=body).json()
    parts = events(call("POST", STREAM, json=body))
    assert all(part | {"text_output": ""} == whole | {"text_output": ""} for part in parts)
    assert "".join(part["text_output"] for part in parts) == whole["text_output"]
    assert (whole["model_name"], whole["model_version"]) == ("tiny", "1")


def test_fields_reach_the_engine(call, engine):
    same = {
        **{"temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "ignore_eos": True},
        **{"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -1.0},
    }
    body = {
        "text_input": "Hi",
        "id": "a",
        "parameters": {**same, "random_seed": 3, "min_length": 2, "stop_words": ["x"]},
    }
    assert call("POST", GENERATE, json=body).json()["id"] == "a"
    ids, params = engine.submitted[0]
    assert (bytes(ids), params.max_tokens, params.seed, params.min_tokens, params.stop) == (b"Hi", 16, 3, 2, ("x",))
    assert {name: getattr(params, name) for name in same} == same


def test_the_longest_answer_that_nobody_gave_is_what_fits(call, engine):
    for length, fields, longest in ((3, {}, 16), (995, {}, 5), (999, {}, 1), (3, {"min_length": 20}, 20)):
        assert call("POST", GENERATE, json={"text_input": "x" * length, **fields}).status_code == 200
        assert engine.submitted[-1][1].max_tokens == longest
    assert call("POST", GENERATE, json={"text_input": "x" * 999, "max_tokens": 2}).status_code == 400


def test_the_prompt_comes_first_where_it_is_not_excluded(call):
    body = {"text_input": "Hi", "stop_words": "", "exclude_input_in_output": False}
    assert call("POST", GENERATE, json=body).json()["text_output"] == "HiHello, world."


REFUSED = [
    (GENERATE, {}, "text_input"),
    (GENERATE, {"text_input": "Hi", "surprise": 1}, "surprise"),
    (GENERATE, {"text_input": "Hi", "parameters": {"surprise": 1}}, "surprise"),
    (GENERATE, {"text_input": "Hi", "parameters": []}, "parameters"),
    (GENERATE, {"text_input": "Hi", "top_k": 1, "parameters": {"top_k": 1}}, "parameters.top_k"),
    (GENERATE, {"parameters": {"text_input": "Hi"}}, "parameters.text_input"),
    (GENERATE, {"text_input": "Hi", "seed": 1, "random_seed": 1}, "random_seed"),
    (GENERATE, {"text_input": "Hi", "random_seed": 2**65}, "random_seed"),
    (GENERATE, {"text_input": "Hi", "max_tokens": 0}, "max_tokens"),
    (GENERATE, {"text_input": "x" * 990, "max_tokens": 16}, "max_tokens"),
    (GENERATE, {"text_input": "Hi", "stream": True}, "stream"),
    (STREAM, {"text_input": "Hi", "stream": False}, "stream"),
    (STREAM, {"text_input": "Hi", "exclude_input_in_output": False}, "exclude_input_in_output"),
]


@pytest.mark.parametrize(("path", "body", "name"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(call, engine, path, body, name):
    response = call("POST", path, json=body)
    assert (response.status_code, list(response.json())) == (400, ["error"])
    assert name in response.json()["error"]
    assert not engine.submitted


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_fields_that_ask_for_nothing_are_taken(call, name):
    for value in NEUTRAL[name]:
        assert call("POST", GENERATE, json={"text_input": "Hi", name: value}).status_code == 200
    error = call("POST", GENERATE, json={"text_input": "Hi", name: "something"}).json()["error"]
    assert error.startswith(f"{name} is not supported.")


@pytest.mark.parametrize("rest", ["", "/ready", "/generate", "/generate_stream"])
def test_another_model_is_not_there(call, rest):
    method = "POST" if "generate" in rest else "GET"
    response = call(method, f"/v2/models/other{rest}", json={"text_input": "Hi"} if method == "POST" else None)
    assert (response.status_code, list(response.json())) == (404, ["error"])


def test_a_name_with_a_slash_is_one_name(call, make_context):
    context = make_context(name="org/tiny")
    answer = call("POST", "/v2/models/org/tiny/generate", context=context, json={"text_input": "Hi"}).json()
    assert (answer["model_name"], answer["text_output"]) == ("org/tiny", "Hello, world.")
    assert call("GET", "/v2/models/org/tiny/ready", context=context).status_code == 200
    assert call("GET", "/v2/models/org/tiny", context=context).json()["name"] == "org/tiny"


@pytest.mark.parametrize("path", ["/v2/health/ready", "/v2/models/tiny/ready", "/ping"])
def test_what_is_ready_says_so(call, engine, path):
    assert (call("GET", path).status_code, call("GET", path).content) == (200, b"")
    engine.up = False
    assert call("GET", path).status_code == 503
    assert call("GET", "/v2/health/live").status_code == 200


def test_the_server_and_its_model_are_described(call):
    assert call("GET", "/v2").json()["extensions"] == ["generate"]
    model = call("GET", "/v2/models/tiny").json()
    assert [value["name"] for value in (*model["inputs"], *model["outputs"])] == ["text_input", "text_output"]


def test_a_stream_that_fails_ends_with_an_error(call, engine):
    engine.error = "out of luck"
    stream = events(call("POST", STREAM, json={"text_input": "Hi"}))
    assert list(stream[-1]) == ["error"]
    assert "out of luck" not in json.dumps(stream)


INVOCATIONS = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 5}),
    ("/generate", {"inputs": "Hi", "parameters": {"max_new_tokens": 5}}),
]


@pytest.mark.parametrize(("path", "body"), INVOCATIONS, ids=["chat", "completion", "tgi"])
@pytest.mark.parametrize("stream", [False, True])
def test_invocations_answer_as_the_api_of_their_body(call, path, body, stream):
    def plain(response) -> list:
        lines = [
            line.removeprefix("data: ") for line in response.text.split("\n\n") if line not in ("", "data: [DONE]")
        ]
        parts = [json.loads(line) for line in lines]
        return [{name: value for name, value in part.items() if name not in ("id", "created")} for part in parts]

    body = {**body, **({"stream": True} if stream else {})}
    model = {} if path == "/generate" else {"model": "tiny"}
    responses = [call("POST", path, json={**body, **model}), call("POST", "/invocations", json=body)]
    assert [response.status_code for response in responses] == [200, 200]
    assert plain(responses[0]) == plain(responses[1])
    if model:
        assert call("POST", "/invocations", json={**body, "model": None}).status_code == 200
        assert call("POST", "/invocations", json={**body, "model": "other"}).status_code == 404


@pytest.mark.parametrize("body", [{}, {"inputs": "Hi", "prompt": "Hi"}, {"prompt": "Hi", **CHAT}])
def test_a_body_of_no_api_or_of_two_is_refused(call, body):
    response = call("POST", "/invocations", json=body)
    assert (response.status_code, "inputs" in response.json()["error"]["message"]) == (400, True)
