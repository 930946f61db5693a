"""Adapters over HTTP: who may load them, what they are called, and which requests they serve."""

import asyncio

import pytest

from roofline.backends.options import LoadOptions
from roofline.cli.parser import Parser
from roofline.cli.run.serve import command
from roofline.common.errors import ConfigError
from roofline.engine.adapter_info import AdapterInfo
from roofline.engine.config import EngineConfig
from roofline.server.adapters import ServedAdapters, named_path
from roofline.server.options import ServeOptions
from tests.server.conftest import FakeEngine

PROMPT = {"prompt": "Hi", "max_tokens": 3}


class AdaptingEngine(FakeEngine):
    """Loads whatever is not called "bad", 100 bytes each."""

    def __init__(self):
        super().__init__()
        self.unloaded, self.adapters = [], []

    async def load_adapter(self, path, max_bytes=None):
        if "bad" in path or max_bytes < 100:
            raise ConfigError(f"{path}: r: is 0")
        return AdapterInfo(f"digest of {path}", path, 8, 14, 100)

    def unload_adapter(self, digest):
        self.unloaded.append(digest)

    async def submit(self, ids, params, *, adapter="", **options):
        self.adapters.append(adapter)
        return await super().submit(ids, params, **options)


@pytest.fixture
def engine():
    return AdaptingEngine()


def test_load_name_and_unload(call, make_context, engine):
    context = make_context()
    loaded = call("POST", "/v1/adapters", context=context, json={"name": "sql", "path": "/a/sql"})
    assert loaded.status_code == 200
    assert {**loaded.json(), "created": 0} == {
        **{"id": "sql", "object": "adapter", "created": 0, "path": "/a/sql", "rank": 8, "matrices": 14, "bytes": 100},
        **{"digest": "digest of /a/sql", "requests": 0},
    }
    cards = call("GET", "/v1/models", context=context).json()["data"]
    assert [(card["id"], card.get("parent")) for card in cards] == [("tiny", None), ("sql", "tiny")]
    assert call("GET", "/v1/models/sql", context=context).json()["parent"] == "tiny"
    assert call("GET", "/v1/adapters/sql", context=context).json() == loaded.json()
    other = call("POST", "/v1/completions", context=context, json={"model": "sqll", "prompt": "a"})
    assert other.json()["error"]["message"] == "The model 'sqll' is not served here; 'tiny', 'sql' are."
    card = call("GET", "/v1/models/sqll", context=context)
    assert (card.status_code, card.json()) == (404, other.json()), "as requests with that name are told"
    assert call("GET", "/v1/adapters", context=context).json()["data"] == [loaded.json()]
    again = call("POST", "/v1/adapters", context=context, json={"name": "sql", "path": "/a/other"})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "name_in_use")
    gone = call("DELETE", "/v1/adapters/sql", context=context)
    assert gone.json() == {"id": "sql", "object": "adapter", "deleted": True, "requests": 0}
    assert engine.unloaded == ["digest of /a/sql"]
    assert call("DELETE", "/v1/adapters/sql", context=context).status_code == 404
    answer = call("POST", "/v1/completions", context=context, json={"model": "sql", **PROMPT})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_vllms_routes_name_ours(call):
    for verb, remedy in (("load", "POST /v1/adapters loads"), ("unload", "DELETE /v1/adapters/NAME unloads")):
        answer = call("POST", f"/v1/{verb}_lora_adapter", json={"lora_name": "sql", "lora_path": "/a/sql"})
        assert answer.status_code == 404
        assert remedy in answer.json()["error"]["message"]


def test_every_api_names_it(call, make_context, engine):
    context = make_context()
    call("POST", "/v1/adapters", context=context, json={"name": "sql", "path": "/a/sql"})
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    requests = [
        ("/v1/completions", {"model": "sql", **PROMPT}),
        ("/v1/chat/completions", {"model": "sql", **chat}),
        ("/v1/responses", {"model": "sql", "input": "Hi"}),
        ("/v1/messages", {"model": "sql", **chat}),
        ("/api/generate", {"model": "sql:latest", "prompt": "Hi", "stream": False}),
        ("/api/chat", {"model": "sql", "messages": chat["messages"], "stream": False}),
        ("/generate", {"inputs": "Hi", "parameters": {"adapter_id": "sql"}}),
        ("/v2/models/sql/generate", {"text_input": "Hi"}),
    ]
    for path, body in requests:
        assert call("POST", path, context=context, json=body).status_code == 200, path
    assert engine.adapters == ["digest of /a/sql"] * len(requests)
    base, adapted = (
        call("POST", "/v1/completions", context=context, json={"model": name, **PROMPT}).json()
        for name in ("tiny", "sql")
    )
    assert engine.adapters[-2:] == ["", "digest of /a/sql"]
    assert (base["model"], adapted["model"]) == ("tiny", "sql")
    assert adapted["system_fingerprint"] == base["system_fingerprint"] + ".digest of /a/sql"
    proven = call("POST", "/v1/completions", context=context, json={"model": "sql", **PROMPT, "receipt": True})
    assert (proven.status_code, proven.json()["error"]["param"]) == (400, "receipt")
    unknown = call("POST", "/generate", context=context, json={"inputs": "Hi", "parameters": {"adapter_id": "no"}})
    assert unknown.status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"name": "a b", "path": "/a"}, 400, "name"),
        ({"name": "x" * 129, "path": "/a"}, 400, "name"),
        ({"name": "tiny", "path": "/a"}, 409, "served already"),
        ({"name": "new", "path": "/bad"}, 400, "r: is 0"),
        ({"name": "new"}, 400, "path"),
        ({"name": "new", "path": "/a", "size": 1}, 400, "size"),
    ],
)
def test_what_cannot_be_loaded(call, body, status, words):
    refused = call("POST", "/v1/adapters", json=body)
    assert refused.status_code == status
    assert words in refused.json()["error"]["message"]


def test_invocations_name_it(call, make_context, engine):
    """What SageMaker sends names a model as the API of its body does."""
    context = make_context()
    call("POST", "/v1/adapters", context=context, json={"name": "sql", "path": "/a/sql"})
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    for body in ({"model": "sql", **PROMPT}, {"model": "sql", **chat}, {"inputs": "Hi", "model": "sql"}):
        assert call("POST", "/invocations", context=context, json=body).status_code == 200
        assert engine.adapters.pop() == "digest of /a/sql"
    for model in (None, "tiny"):
        assert call("POST", "/invocations", context=context, json={"inputs": "Hi", "model": model}).status_code == 200
        assert engine.adapters.pop() == ""
    other = {"adapter_id": "poems"}
    refused = [
        ({"inputs": "Hi", "model": "no"}, 404, "model"),
        ({"inputs": "Hi", "model": 3}, 400, "model"),
        ({"inputs": "Hi", "model": "sql", "parameters": other}, 400, "model"),
    ]
    for body, status, param in refused:
        answer = call("POST", "/invocations", context=context, json=body)
        assert answer.status_code == status
        assert param in str(answer.json())


def test_changes_need_an_administrator(call, make_context, tmp_path):
    context = make_context(api_key="secret")
    for method, path in (("GET", "/v1/adapters"), ("POST", "/v1/adapters"), ("DELETE", "/v1/adapters/sql")):
        assert call(method, path, context=context).status_code == 401


def test_one_that_is_in_use_is_unloaded_after_its_requests(engine):
    async def run():
        adapters = ServedAdapters(engine, ["tiny"], 250, [("sql", "/a/sql")])
        assert adapters.loading
        await adapters.load_first()
        assert not adapters.loading
        with adapters.used("sql") as digest, adapters.used("sql"):
            adapters.unload("sql")
            assert (digest, engine.unloaded) == ("digest of /a/sql", [])
            await adapters.load("sql", "/a/other")  # the name is free at once
            with pytest.raises(ConfigError):  # the memory is not: two are loaded still, of 100 bytes each
                await adapters.load("third", "/a/third")
        assert engine.unloaded == ["digest of /a/sql"]
        await adapters.load("third", "/a/third")

    asyncio.run(run())


def test_the_bound_of_bytes_is_an_option():
    options = ServeOptions(engine=EngineConfig(adapter_bytes=99))
    assert options.effective_limits().adapter_bytes == 99
    assert Parser("serve", command).options["adapter_bytes"].unit == "bytes"


def test_options():
    assert named_path("sql=/a=b") == ("sql", "/a=b")
    for wrong in ("sql", "=x", "a b=x", "sql="):
        with pytest.raises(ConfigError, match="NAME=PATH"):
            named_path(wrong)
    options = ServeOptions(adapter=["a=x", "b=y"]).with_room_for_adapters()
    assert (options.load.max_adapters, options.engine.max_adapters) == (2, 2)
    assert (
        ServeOptions(adapter=["a=x"], load=LoadOptions(max_adapters=3)).with_room_for_adapters().load.max_adapters == 3
    )
    for most in (0, 1):  # 0 is not taken for a default
        options = ServeOptions(adapter=["a=x", "b=y"], load=LoadOptions(max_adapters=most))
        with pytest.raises(ConfigError, match=rf"^max_adapters={most} has no room for the 2 of adapter \(--adapter"):
            options.with_room_for_adapters()
    assert LoadOptions(backend="gpu", max_adapters=0).max_adapters == 0
    with pytest.raises(ConfigError, match="two models"):
        ServedAdapters(FakeEngine(), ["tiny"], 1, [("tiny", "/a")])
