"""Ollama's vectors, what its lists show of a model, and results of tools under older names."""

import msgspec
import ollama
import pytest

from roofline.server.routes.ollama import read
from roofline.server.routes.ollama.api import parameter_size
from roofline.server.routes.ollama.schema import Message
from roofline.weights.facts import ModelFacts, facts_of
from roofline.weights.files.mapped import TensorInfo

FACTS = ModelFacts("llama", 134_515_008, 91_730_000, "Q4_1", "gguf")


def known(engine) -> None:
    engine.description = msgspec.structs.replace(engine.description, facts=FACTS)


def unit(vector: list[float]) -> float:
    return sum(x * x for x in vector)


@pytest.mark.parametrize("texts", ["Say", ["Say", "it"]])
def test_vectors_are_those_of_openais_route(call, texts):
    answer = call("POST", "/api/embed", json={"model": "tiny:latest", "input": texts}).json()
    same = call("POST", "/v1/embeddings", json={"model": "tiny", "input": texts}).json()
    assert answer["embeddings"] == [row["embedding"] for row in same["data"]]
    assert answer["prompt_eval_count"] == same["usage"]["prompt_tokens"]
    assert answer["model"] == "tiny:latest"
    assert unit(answer["embeddings"][0]) == pytest.approx(1)
    one = call("POST", "/api/embeddings", json={"model": "tiny", "prompt": "Say"}).json()
    assert one == {"embedding": answer["embeddings"][0]}


def test_a_vector_may_be_cut_and_so_may_its_text(call, engine):
    body = {"model": "tiny", "input": "x" * 1001}
    assert len(call("POST", "/api/embed", json={**body, "input": "a", "dimensions": 2}).json()["embeddings"][0]) == 2
    for truncate in ({}, {"truncate": False}):
        refused = call("POST", "/api/embed", json={**body, **truncate})
        assert (refused.status_code, "this server's context is 1000" in refused.text) == (400, True)
    assert call("POST", "/api/embed", json={**body, "truncate": True}).json()["prompt_eval_count"] == 1000
    assert engine.submitted[-1][0] == [ord("x")] * 1000


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/api/embed", {"model": "other", "input": "a"}, "model 'other' not found"),
        ("/api/embed", {"model": "tiny", "input": []}, "input: has 0 items"),
        ("/api/embed", {"model": "tiny", "input": "a", "dimensions": 0}, "dimensions"),
        ("/api/embed", {"model": "tiny", "input": "a", "keep_alive": 0}, "keep_alive"),
        ("/api/embed", {"model": "tiny", "input": "a", "options": {"mirostat": 1}}, "options.mirostat"),
        ("/api/embed", {"model": "tiny", "input": "a", "more": 1}, "more"),
        ("/api/embeddings", {"model": "tiny"}, "prompt"),
        ("/api/embeddings", {"model": "tiny", "prompt": ""}, "prompt: has no tokens"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_ollamas_form(call, path, body, name):
    response = call("POST", path, json=body)
    assert response.status_code in (400, 404)
    assert name in response.json()["error"]


def test_ollamas_package_is_told_where_there_are_no_vectors(live, engine):
    engine.description = msgspec.structs.replace(engine.description, gives_hidden=False)
    client = ollama.Client(host=live())
    for ask in (lambda: client.embed("tiny", "Say"), lambda: client.embeddings("tiny", "Say")):
        with pytest.raises(ollama.ResponseError, match="backend=cpu") as refused:
            ask()
        assert refused.value.status_code == 400
    assert engine.submitted == []


def test_ollamas_package_reads_them(live, engine):
    known(engine)
    client = ollama.Client(host=live())
    assert len(client.embed(model="tiny", input=["Say", "it"], keep_alive="5m").embeddings) == 2
    assert len(client.embeddings(model="tiny", prompt="Say").embedding) == 3
    (card,) = client.list().models
    assert (card.model, card.size, card.details.family) == ("tiny", 91_730_000, "llama")
    assert (card.details.parameter_size, card.details.quantization_level) == ("134.52M", "Q4_1")
    assert (card.details.format, card.details.families) == ("gguf", ["llama"])
    (running,) = client.ps().models
    assert (running.size, running.context_length) == (91_730_000, 1000)
    shown = client.show("tiny")
    assert shown.details == card.details
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["general.parameter_count"] == 134_515_008
    assert shown.modelinfo["llama.context_length"] == 1000
    assert shown.capabilities == ["completion", "tools", "thinking"]
    engine.description = msgspec.structs.replace(engine.description, encoder=True)
    assert client.show("tiny").capabilities == ["embedding"]


def test_what_is_not_known_of_a_model_is_empty(call):
    (card,) = call("GET", "/api/tags").json()["models"]
    assert (card["size"], card["details"]["family"]) == (0, "")


@pytest.mark.parametrize(
    ("count", "text"),
    [(134_515_008, "134.52M"), (8 * 10**9, "8B"), (8_030_261_248, "8.0B"), (70_553_706_496, "70.6B"), (5000, "5K")],
)
def test_numbers_of_parameters_are_written_as_ollama_does(count, text):
    assert parameter_size(count) == text
    assert parameter_size(12) == "12"


def test_the_format_of_most_parameters_is_the_models():
    tensors = {
        "a": TensorInfo("a", "F32", (100,), 400),
        "b": TensorInfo("b", "Q4_1", (32, 64), 1280),
        "c": TensorInfo("c", "Q8_0", (8, 32), 272),
    }
    assert facts_of(tensors, 1952, "llama", "gguf") == ModelFacts("llama", 2404, 1952, "Q4_1", "gguf")
    assert facts_of({}, 0, "llama", "memory").weight_format == ""


def turns(*results: dict, ids=("", "")) -> list[dict]:
    calls = [
        {"function": {"name": name, "arguments": {}}} | ({"id": given} if given else {})
        for name, given in zip(("f", "g"), ids, strict=True)
    ]
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}]
    messages += [{"role": "tool", "content": "1", **result} for result in results]
    return list(read._turns([Message.model_validate(message) for message in messages]))[1:]


@pytest.mark.parametrize(
    ("results", "ids", "names"),
    [
        (({"name": "g"}, {"name": "f"}), ("", ""), ["g", "f"]),
        (({"tool_call_id": "x"}, {"tool_call_id": "y"}), ("", ""), ["f", "g"]),
        (({"tool_call_id": "x", "tool_name": "g"}, {"tool_call_id": "y"}), ("", ""), ["g", "f"]),
        (({"tool_call_id": "b"}, {"tool_call_id": "a"}), ("a", "b"), ["g", "f"]),
        (({"tool_call_id": "x"}, {"tool_call_id": "a"}), ("a", ""), ["g", "f"]),
    ],
)
def test_results_find_their_calls(results, ids, names):
    assert [turn["name"] for turn in turns(*results, ids=ids)] == names


def test_an_id_that_no_call_has_is_refused_where_all_have_one():
    with pytest.raises(Exception, match="is the result of no call"):
        turns({"tool_call_id": "x"}, ids=("a", "b"))
