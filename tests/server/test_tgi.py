"""The API of Text Generation Inference over a fake engine."""

import json

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError

from roofline.common.errors import RequestError
from roofline.server.routes.tgi.form import error_body
from roofline.server.routes.tgi.schema import NEUTRAL


def ask(call, path="/generate", **parameters):
    return call("POST", path, json={"inputs": "Hi", "parameters": parameters})


def events(response) -> list:
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]


def test_an_answer_is_its_text(call, engine):
    assert ask(call).json() == {"generated_text": "Hello, world.", "details": None}
    assert call("POST", "/generate", json={"inputs": "Hi"}).json()["generated_text"] == "Hello, world."
    assert bytes(engine.submitted[0][0]) == b"Hi"
    params = engine.submitted[0][1]
    assert (params.temperature, params.max_tokens, params.logprobs) == (0, 100, None)
    assert ask(call, return_full_text=True).json()["generated_text"] == "HiHello, world."


def test_details_tell_each_token(call):
    details = ask(call, details=True, max_new_tokens=2, seed=5, top_n_tokens=1).json()["details"]
    top = [{"id": 0, "text": "\0", "logprob": -1.0, "special": False}]
    assert details == {
        "finish_reason": "length",
        "generated_tokens": 2,
        "seed": 5,
        "prefill": [],
        "tokens": [
            {"id": 72, "text": "H", "logprob": -0.5, "special": False},
            {"id": 101, "text": "e", "logprob": -0.5, "special": False},
        ],
        "top_tokens": [top, top],
        "best_of_sequences": None,
    }
    details = ask(call, details=True).json()["details"]
    assert (details["finish_reason"], details["top_tokens"], details["seed"]) == ("eos_token", None, None)
    assert details["tokens"][-1] == {"id": 256, "text": "", "logprob": -0.5, "special": True}


@pytest.mark.parametrize("parameters", [{}, {"stop": ["xx", ", w"]}, {"max_new_tokens": 3}, {"stop": ["Hello"]}])
@pytest.mark.parametrize("more", [{}, {"top_n_tokens": 2}, {"return_full_text": True}])
@pytest.mark.parametrize("answer", [b"Hello, world.", "Hello, wörld 世界".encode(), b"Hello \xe4\xb8"])
def test_stream_and_whole_are_equal(call, engine, parameters, more, answer):
    engine.answer = answer
    whole = ask(call, details=True, **parameters, **more).json()
    stream = events(ask(call, "/generate_stream", **parameters, **more))
    assert [event["token"] for event in stream] == whole["details"]["tokens"]
    assert [event["index"] for event in stream] == list(range(1, len(stream) + 1))
    assert all(event["generated_text"] is event["details"] is None for event in stream[:-1])
    assert stream[-1]["generated_text"] == whole["generated_text"]
    end = ("finish_reason", "generated_tokens", "seed")
    assert stream[-1]["details"] == {name: whole["details"][name] for name in end} | {"input_length": 2}
    assert [event["top_tokens"] for event in stream if "top_tokens" in event] == (whole["details"]["top_tokens"] or [])
    begin = "Hi" if "return_full_text" in more else ""
    if b"\xe4\xb8" not in answer:  # half a character is told with the token that ends the answer
        told = "".join(event["token"]["text"] for event in stream if not event["token"]["special"])
        assert begin + told == whole["generated_text"]
    reasons = {"stop": "stop_sequence", "max_new_tokens": "length"}
    reason = next((reasons[name] for name in parameters), "eos_token")
    if not (answer.startswith(b"Hello \xe4") and parameters.get("stop") == ["xx", ", w"]):
        assert whole["details"]["finish_reason"] == reason


def test_the_stop_string_is_part_of_the_text(call):
    answer = ask(call, stop=[", w"], details=True).json()
    assert answer["generated_text"] == "Hello, w"
    assert answer["details"]["finish_reason"] == "stop_sequence"


SAMPLED = [
    ({}, 0),
    ({"temperature": 1.0}, 0),
    ({"top_p": 1.0}, 0),
    ({"do_sample": True}, 1.0),
    ({"top_k": 5}, 1.0),
    ({"top_p": 0.5}, 1.0),
    ({"temperature": 0.7}, 0.7),
    ({"temperature": 0.7, "do_sample": False}, 0.7),
]


@pytest.mark.parametrize(("parameters", "temperature"), SAMPLED)
def test_the_most_likely_token_unless_something_samples(call, engine, parameters, temperature):
    assert ask(call, **parameters).status_code == 200
    assert engine.submitted[0][1].temperature == temperature


def test_parameters_reach_the_engine(call, engine):
    same = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.5,
        "seed": 3,
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.5,
    }
    assert ask(call, **same, max_new_tokens=9, stop=["x"]).status_code == 200
    params = engine.submitted[0][1]
    assert {name: getattr(params, name) for name in same} == same
    assert (params.max_tokens, params.stop) == (9, ("x",))


GRAMMARS = [
    ({"type": "json", "value": {"type": "object"}}, "json_schema", '{"type":"object"}'),
    ({"type": "json", "value": '{"type": "object"}'}, "json_schema", '{"type": "object"}'),
    ({"type": "json_schema", "value": {"name": "a", "schema": {"type": "object"}}}, "json_schema", '{"type":"object"}'),
    ({"type": "regex", "value": "a+"}, "regex", "a+"),
]


@pytest.mark.parametrize(("grammar", "kind", "text"), GRAMMARS)
def test_an_answer_may_have_a_form(call, engine, grammar, kind, text):
    assert ask(call, grammar=grammar).status_code == 200
    constraint = engine.submitted[0][1].constraint
    assert (constraint.kind, constraint.text) == (kind, text)


def test_a_prompt_is_cut_where_that_is_wanted(call, engine):
    assert (
        call("POST", "/generate", json={"inputs": "x" * 2000 + "Hi", "parameters": {"truncate": 3}}).status_code == 200
    )
    assert bytes(engine.submitted[0][0]) == b"xHi"


@pytest.mark.parametrize(("parameters", "most"), [({}, 1000), ({"truncate": 3}, None)])
def test_only_a_prompt_that_is_cut_may_be_longer_than_the_context_when_it_is_encoded(
    call, make_context, parameters, most
):
    context, seen = make_context(), []
    context.text.encode = lambda text, most: (seen.append(most), [1])[1]
    body = {"inputs": "Hi", "parameters": parameters}
    assert call("POST", "/generate", json=body, context=context).status_code == 200
    assert seen == [most]


def test_the_default_length_is_what_fits(call, engine):
    assert call("POST", "/generate", json={"inputs": "x" * 950}).status_code == 200
    assert engine.submitted[0][1].max_tokens == 50


REFUSED = [
    ({"inputs": "Hi", "surprise": 1}, "surprise"),
    ({"parameters": {}}, "inputs"),
    ({"inputs": ["Hi"]}, "inputs"),
    ({"inputs": "x" * 1000}, "inputs"),
    ({"inputs": "Hi", "parameters": {"surprise": 1}}, "parameters.surprise"),
    ({"inputs": "Hi", "parameters": {"temperature": -1.0}}, "parameters.temperature"),
    ({"inputs": "Hi", "parameters": {"max_new_tokens": 0}}, "parameters.max_new_tokens"),
    ({"inputs": "Hi", "parameters": {"max_new_tokens": 999}}, "parameters.max_new_tokens"),
    ({"inputs": "Hi", "parameters": {"stop": ["x"] * 17}}, "parameters.stop"),
    ({"inputs": "Hi", "parameters": {"grammar": {"type": "regex", "value": {}}}}, "parameters.grammar.value"),
    ({"inputs": "Hi", "parameters": {"grammar": {"type": "json", "value": "{"}}}, "parameters.grammar.value"),
    (
        {"inputs": "Hi", "parameters": {"grammar": {"type": "json_schema", "value": {"name": "a"}}}},
        "grammar.value.schema",
    ),
    ({"inputs": "Hi", "parameters": {"grammar": {"type": "json_schema", "value": {"x": 1}}}}, "grammar.value"),
    ({"inputs": "Hi", "parameters": {"grammar": {"type": "lark", "value": "a"}}}, "parameters.grammar.type"),
    ({"inputs": "Hi", "parameters": {"truncate": 0}}, "parameters.truncate"),
    ({"inputs": "Hi", "parameters": {"top_n_tokens": 21}}, "parameters.top_n_tokens"),
]


@pytest.mark.parametrize(("body", "name"), REFUSED)
@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_what_cannot_be_honoured_is_refused_by_name(call, engine, path, body, name):
    response = call("POST", path, json=body)
    assert (response.status_code, response.json()["error_type"]) == (400, "validation")
    assert name in response.json()["error"]
    assert not engine.submitted


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_parameters_that_ask_for_nothing_are_taken(call, name):
    for value in NEUTRAL[name]:
        assert ask(call, **{name: value}).status_code == 200
    assert f"parameters.{name} is not supported." in ask(call, **{name: "something"}).json()["error"]


def test_a_body_may_ask_for_a_stream(call):
    assert len(events(call("POST", "/generate", json={"inputs": "Hi", "stream": True}))) == 14
    response = call("POST", "/generate_stream", json={"inputs": "Hi", "stream": False})
    assert (response.status_code, "stream" in response.json()["error"]) == (400, True)


def test_info_has_the_limits(call, limits):
    info = call("GET", "/info").json()
    assert (info["model_id"], info["max_total_tokens"], info["max_input_tokens"]) == ("tiny", 1000, 999)
    assert info["max_stop_sequences"] == limits.stop_strings


def test_errors_have_their_kind(call, engine):
    kinds = {status: error_body(RequestError(status, "c", "m"))["error_type"] for status in (400, 404, 429, 500, 503)}
    assert kinds == {400: "validation", 404: "validation", 429: "overloaded", 500: "generation", 503: "generation"}
    engine.error = "out of luck"
    stream = events(ask(call, "/generate_stream"))
    assert stream[-1]["error_type"] == "generation"
    assert "out of luck" not in json.dumps(stream)


def test_hugging_faces_own_client(live):
    client = InferenceClient(model=f"{live()}/generate", timeout=30)
    assert client.text_generation("Hi", max_new_tokens=20) == "Hello, world."
    assert "".join(client.text_generation("Hi", max_new_tokens=20, stream=True)) == "Hello, world."
    detailed = client.text_generation("Hi", max_new_tokens=3, details=True, seed=1)
    assert (detailed.generated_text, detailed.details.finish_reason) == ("Hel", "length")
    *_, last = client.text_generation("Hi", stop=[", w"], details=True, stream=True)
    assert (last.generated_text, last.details.finish_reason) == ("Hello, w", "stop_sequence")
    with pytest.raises(ValidationError, match="temperature"):
        client.text_generation("Hi", temperature=-1.0)
