"""A model under several names: every route takes each, answers say the first one as vLLM's do, and lists have all.

What an answer's `model` says is vLLM's `OpenAIServingModels.model_name`: an adapter's name, or the first of
--served-model-name, whichever the request gave. Ollama and Triton tell the name that was asked for.
"""

import asyncio
import json
from typing import Any

import pytest

from roofline.common.errors import ConfigError
from roofline.server.extra_models import check_extra_models
from roofline.server.models import ExtraModel, Models
from roofline.server.options import ServeOptions
from tests.server.batch_client import create, ended, line, lines_of, serve
from tests.server.test_adapters import AdaptingEngine
from tests.server.test_scopes import all_routes
from tests.server.text_sides import chatml

FIRST, SECOND = "tiny", "org/Tiny:v2"
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT, TEXT = {"messages": MESSAGES}, {"prompt": "Hi", "max_tokens": 2}
# Routes that answer with a model: a body, and where its answer names it.
BODIES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": (CHAT, "model"),
    "/v1/completions": (TEXT, "model"),
    "/v1/embeddings": ({"input": "Hi"}, "model"),
    "/v1/responses": ({"input": "Hi"}, "model"),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": 5}, "model"),
    "/v1/messages/count_tokens": ({"messages": MESSAGES}, ""),
    "/rerank": ({"query": "q", "documents": ["y"]}, "model"),
    "/v1/rerank": ({"query": "q", "documents": ["y"]}, "model"),
    "/v2/rerank": ({"query": "q", "documents": ["y"]}, "model"),
    "/score": ({"text_1": "q", "text_2": "y"}, "model"),
    "/v1/score": ({"text_1": "q", "text_2": "y"}, "model"),
    "/tokenize": ({"prompt": "Hi"}, ""),
    "/detokenize": ({"tokens": [72]}, ""),
    "/apply-template": (CHAT, ""),
    "/v1/explain": (CHAT, "model"),
    "/invocations": (CHAT, "model"),
}
AS_ASKED = {
    "/api/chat": {**CHAT, "stream": False},
    "/api/generate": {"prompt": "Hi", "stream": False},
    "/api/embed": {"input": "Hi"},
}
NAMED_OTHERWISE = {  # by tests of their own below
    *("/api/embeddings", "/api/show", "/api/tags", "/api/ps", "/generate", "/generate_stream", "/info"),
    *("/v2/models/{model:path}/generate", "/v2/models/{model:path}/generate_stream", "/v2/models/{model:path}/ready"),
    *("/v2/models/{model:path}", "/v1/models", "/v1/models/{name:path}", "/ready", "/stats", "/metrics"),
    *("/v1/adapters", "/v1/adapters/{name:path}", "/v1/batches", "/v1/files"),
}
WITHOUT_A_MODEL = ("/page", "/health", "/limits", "/openapi.json", "/api/version", "/v2/health", "/ping")


@pytest.fixture
def engine():
    return AdaptingEngine()


@pytest.fixture
def context(make_context):
    return make_context(aliases=(SECOND,))


def test_every_route_is_looked_at_here():
    looked = {*BODIES, *AS_ASKED, *NAMED_OTHERWISE, "/", "/v2"}
    paths = {route.path for route in all_routes()}
    left = {path for path in paths - looked if not path.startswith(WITHOUT_A_MODEL)}
    assert left == {path for path in left if path.startswith(("/v1/files/", "/v1/batches/", "/v1/responses/"))}
    assert looked <= paths


@pytest.mark.parametrize("path", BODIES)
def test_answers_say_the_first_name_whichever_was_asked_for(call, make_context, context, path):
    if path in ("/apply-template", "/v1/explain"):  # which need a template
        context = make_context(aliases=(SECOND,), text=chatml())
    body, field = BODIES[path]
    answers = [call("POST", path, json={**body, "model": name}, context=context) for name in (FIRST, SECOND)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    if field:
        assert [answer.json()[field] for answer in answers] == [FIRST, FIRST]
    refused = call("POST", path, json={**body, "model": "org/Tiny"}, context=context)
    assert (refused.status_code, f"'{FIRST}', '{SECOND}' are." in refused.text) == (404, True)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_streams_say_it_too(call, context, path):
    body = {**BODIES[path][0], "model": SECOND, "stream": True}
    events = [json.loads(line[6:]) for line in call("POST", path, json=body, context=context).text.splitlines()
              if line.startswith("data: {")]  # fmt: skip
    texts = json.dumps(events)
    assert f'"model": "{FIRST}"' in texts
    assert SECOND not in texts


@pytest.mark.parametrize("path", AS_ASKED)
def test_ollama_tells_the_name_that_was_asked_for(call, context, path):
    for name in (FIRST, SECOND, f"{SECOND}:latest"):
        answer = call("POST", path, json={**AS_ASKED[path], "model": name}, context=context)
        assert (answer.status_code, answer.json()["model"]) == (200, name)


def test_other_routes_of_ollama_tgi_and_triton(call, context):
    assert call("POST", "/api/embeddings", json={"model": SECOND, "prompt": "a"}, context=context).status_code == 200
    shown = call("POST", "/api/show", json={"model": SECOND}, context=context).json()
    assert shown["model_info"]["general.basename"] == FIRST
    tags = call("GET", "/api/tags", context=context).json()["models"]
    assert [card["name"] for card in tags] == [FIRST, SECOND]
    assert tags[0] | {"name": "", "model": ""} == tags[1] | {"name": "", "model": ""}
    assert [card["name"] for card in call("GET", "/api/ps", context=context).json()["models"]] == [FIRST]
    assert call("GET", "/info", context=context).json()["model_id"] == FIRST
    body = {"inputs": "Hi", "parameters": {"adapter_id": SECOND}}
    for path in ("/generate", "/generate_stream"):
        assert call("POST", path, json=body, context=context).status_code == 200
    assert call("POST", "/invocations", json={"inputs": "Hi", "model": SECOND}, context=context).status_code == 200
    for name in (FIRST, SECOND):
        assert call("GET", f"/v2/models/{name}", context=context).json()["name"] == name
        assert call("GET", f"/v2/models/{name}/ready", context=context).status_code == 200
        answer = call("POST", f"/v2/models/{name}/generate", json={"text_input": "Hi"}, context=context)
        assert (answer.status_code, answer.json()["model_name"]) == (200, name)
        stream = call("POST", f"/v2/models/{name}/generate_stream", json={"text_input": "Hi"}, context=context)
        assert (stream.status_code, name in stream.text) == (200, True)


def test_the_list_has_all_names_and_cards_of_adapters_name_the_first(call, context):
    loaded = call("POST", "/v1/adapters", context=context, json={"name": "sql", "path": "/a/sql"})
    assert loaded.status_code == 200
    cards = call("GET", "/v1/models", context=context).json()["data"]
    assert [(card["id"], card.get("parent")) for card in cards] == [(FIRST, None), (SECOND, None), ("sql", FIRST)]
    assert cards[0] | {"id": ""} == cards[1] | {"id": ""}
    for card in cards:
        assert call("GET", f"/v1/models/{card['id']}", context=context).json() == card
    answer = call("POST", "/v1/completions", json={**TEXT, "model": "sql"}, context=context).json()
    assert answer["model"] == "sql"
    taken = call("POST", "/v1/adapters", context=context, json={"name": SECOND, "path": "/a/x"})
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "name_in_use")
    vectors = call("POST", "/v1/embeddings", json={"model": "sql", "input": "Hi"}, context=context)
    assert (vectors.status_code, vectors.json()["error"]["code"]) == (400, "unsupported_parameter")


def test_figures_and_readiness_are_of_the_first_name(call, context):
    call("POST", "/v1/completions", json={**TEXT, "model": SECOND}, context=context)
    assert call("GET", "/ready", context=context).json()["model"] == FIRST
    assert call("GET", "/stats", context=context).json()["model"] == FIRST
    metrics = call("GET", "/metrics", context=context).text
    assert f'model_name="{FIRST}"' in metrics
    assert SECOND not in metrics


def test_lines_of_batches_give_any_name(make_context, tmp_path):
    async def run():
        async with serve(make_context, tmp_path / "kept", aliases=(SECOND,)) as (_, client):
            batch = await ended(client, await create(client, line("a", model=SECOND), line("b")))
            return await lines_of(client, batch.output_file_id)

    answers = asyncio.run(run())
    assert {answer["response"]["body"]["model"] for answer in answers.values()} == {FIRST}
    assert len(answers) == 2


def test_extra_models_do_not_answer_to_the_first_one_s_names(call, make_context):
    context = make_context(aliases=(SECOND,), other_names=("big",))

    async def start() -> tuple[AdaptingEngine, Any]:
        return AdaptingEngine(), context.text

    async def enter() -> Any:
        models = Models(context, [ExtraModel("big", start, 1)], 1 << 40)
        loaded = await models.enter(models.extra["big"])
        await models.close()
        return loaded

    assert asyncio.run(enter()).names == ("big",)


def test_names_are_options():
    assert ServeOptions("m").names == ServeOptions("m", served_model_name=[]).names == ("m",)
    assert ServeOptions("m", served_model_name=["a", "b"]).names == ("a", "b")
    with pytest.raises(ConfigError, match="served_model_name='a' is there twice"):
        ServeOptions("m", served_model_name=["a", "b", "a"])
    with pytest.raises(ConfigError, match="two models would be called 'b'"):
        check_extra_models(ServeOptions("m", served_model_name=["a", "b"], extra_model=["b=x"]))
