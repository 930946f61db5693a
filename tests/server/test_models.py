"""Several models in one server: which request gets which, who leaves for whom, and what clients see meanwhile."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from roofline.common.errors import ConfigError, RequestError
from roofline.engine.config import EngineConfig
from roofline.server import extra_models, model_choice
from roofline.server.app import create_app
from roofline.server.batches.endpoints import call as call_endpoint
from roofline.server.extra_models import check_extra_models, make_models
from roofline.server.keys import LOCAL
from roofline.server.limits import Limits
from roofline.server.model_choice import ModelChoice
from roofline.server.models import ExtraModel, Models, engine_bytes
from roofline.server.options import ServeOptions
from tests.server.conftest import BytesText, FakeEngine

SIZE = 100  # bytes of each model; the first one has none


class Engine(FakeEngine):
    """One that says how much it has to compute, and can be given up."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(answer)
        self.pid = None
        self.gone = asyncio.Event()

    async def failed(self) -> str:
        await self.gone.wait()
        return "it was given up"


class Shop:
    """Makes extra models, and keeps books of their starts. gates: by name, what a start waits for."""

    def __init__(self) -> None:
        self.starts: list[str] = []
        self.engines: dict[str, Engine] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.problems: dict[str, Exception] = {}

    def model(self, name: str, **options: Any) -> ExtraModel:
        async def start() -> tuple[Any, Any]:
            self.starts.append(name)
            if name in self.gates:
                await self.gates[name].wait()
            if name in self.problems:
                raise self.problems[name]
            self.engines[name] = Engine(name.encode())
            return self.engines[name], BytesText()

        return ExtraModel(name, start, SIZE, **options)


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
def models_of(make_context, shop) -> Callable[..., Models]:
    def make(*names: str, room: int = 2, pinned: tuple[str, ...] = (), **changes: Any) -> Models:
        extra = [shop.model(name, pinned=name in pinned) for name in names]
        context = make_context(**{"other_names": names, **changes})
        return Models(context, extra, room * SIZE)

    return make


async def used(models: Models, name: str) -> None:
    model = models.extra[name]
    await models.enter(model)
    models.leave(model)


def loaded(models: Models) -> list[str]:
    return [name for name, model in models.extra.items() if model.loaded is not None]


async def settled(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def with_client(models: Models, work: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    """Run `work` with a client of the whole application."""

    async def run() -> None:
        app = create_app(models._first, models=models)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            await work(client)
        await models.close()

    asyncio.run(run())


def body_for(model: str, **fields: object) -> dict[str, object]:
    return {"model": model, "prompt": "x", **fields}


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_the_least_recently_used_leaves_and_loads_anew(models_of, shop):
    models = models_of("a", "b", "c")

    async def run() -> None:
        for name in ("a", "b", "a", "c"):
            await used(models, name)
        assert loaded(models) == ["a", "c"]
        assert shop.engines["b"].steps == ["close"]
        await used(models, "b")
        assert loaded(models) == ["b", "c"]
        await models.close()
        assert loaded(models) == []

    asyncio.run(run())
    assert shop.starts == ["a", "b", "c", "b"]


def test_requests_that_come_together_share_one_load(models_of, shop):
    models = models_of("a")

    async def run() -> None:
        await asyncio.gather(*(used(models, "a") for _ in range(5)))
        await models.close()

    asyncio.run(run())
    assert shop.starts == ["a"]


def test_a_model_leaves_only_when_its_requests_and_its_work_are_over(models_of, shop):
    models = models_of("a", "b", room=1)

    async def run() -> None:
        a = models.extra["a"]
        await models.enter(a)
        shop.engines["a"].outstanding = 5
        waiting = asyncio.create_task(used(models, "b"))
        await settled(lambda: models.extra["b"].status() == "waiting for memory")
        late = asyncio.create_task(used(models, "a"))  # stands behind the load: else it might never come
        models.leave(a)
        for _ in range(3):
            await asyncio.sleep(0.06)
        assert loaded(models) == ["a"], "an answer is still computed in the background"
        assert not late.done()
        shop.engines["a"].outstanding = 0
        await waiting
        await late
        assert loaded(models) == ["a"]
        await models.close()

    asyncio.run(run())
    assert shop.starts == ["a", "b", "a"]


def test_pinned_models_stay_and_what_cannot_fit_beside_them_is_told_with_numbers(models_of, shop):
    models = models_of("a", "b", room=1, pinned=("a",))

    async def run() -> None:
        assert models.missing().name == "a"
        await models.load_pinned()
        assert models.missing() is None
        with pytest.raises(RequestError, match="needs 100 bytes beside those that stay, 0 are available") as refusal:
            await used(models, "b")
        assert (refusal.value.status, refusal.value.code) == (503, "model_not_loaded")
        assert loaded(models) == ["a"]
        await models.close()

    asyncio.run(run())
    assert shop.starts == ["a"]


def test_what_is_larger_than_expected_has_others_leave_or_leaves_itself(models_of, shop, monkeypatch):
    sizes = {"a": 100, "b": 150, "c": 250}
    monkeypatch.setattr("roofline.server.models.engine_bytes", lambda engine: sizes[engine.answer.decode()])
    models = models_of("a", "b", "c")

    async def run() -> None:
        await used(models, "a")
        await used(models, "b")
        assert loaded(models) == ["b"]
        with pytest.raises(RequestError, match="needs 250 bytes"):
            await used(models, "c")
        assert loaded(models) == []
        assert shop.engines["c"].steps == ["close"]
        await used(models, "b")
        with pytest.raises(RequestError, match="needs 250 bytes"):
            await used(models, "c")
        assert loaded(models) == ["b"], "from now on it is known that nobody needs to leave for it"
        await models.close()

    asyncio.run(run())


def test_a_load_that_fails_is_told_and_tried_again_for_the_next_request(models_of, shop):
    models = models_of("a")
    shop.problems["a"] = ConfigError("the file is gone")

    async def run() -> None:
        with pytest.raises(RequestError, match="cannot be loaded: the file is gone"):
            await used(models, "a")
        assert models.extra["a"].status() == "absent: the file is gone"
        del shop.problems["a"]
        await used(models, "a")
        assert models.extra["a"].status() == "loaded"
        await models.close()

    asyncio.run(run())


def test_a_model_whose_engine_was_given_up_is_loaded_anew(models_of, shop):
    models = models_of("a")

    async def run() -> None:
        await used(models, "a")
        first = shop.engines["a"]
        first.gone.set()
        await settled(lambda: models.extra["a"].loaded is None)
        await used(models, "a")
        assert first.steps == ["close"]
        assert shop.engines["a"] is not first
        await models.close()

    asyncio.run(run())


def test_a_request_waits_for_its_model_no_longer_than_for_a_first_token(models_of, shop):
    models = models_of("a", limits=Limits(first_token_seconds=0.05))
    shop.gates["a"] = asyncio.Event()

    async def run() -> None:
        with pytest.raises(RequestError, match=r"'a' was not loaded within 0\.05 s: loading"):
            await used(models, "a")
        assert models.extra["a"].waiting == 0
        shop.gates["a"].set()
        await settled(lambda: loaded(models) == ["a"])  # the load goes on: the next request has it
        await models.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}),
        ("/v1/responses", {"input": "x"}),
        ("/api/chat", {"messages": [{"role": "user", "content": "x"}], "stream": False}),
    ],
)
def test_each_api_answers_with_the_model_that_is_named(models_of, shop, path, body):
    async def work(client: httpx.AsyncClient) -> None:
        for name in ("second", "tiny"):
            answer = await client.post(path, json={"model": name, **body})
            assert answer.status_code == 200, answer.text
            assert ("second" in answer.text.replace('"model":"second"', "")) == (name == "second")
            assert ("Hello" in answer.text) == (name == "tiny")

    with_client(models_of("second"), work)
    assert shop.starts == ["second"]


def test_a_model_named_in_the_path_or_with_a_tag_or_in_a_large_body(models_of):
    async def work(client: httpx.AsyncClient) -> None:
        answer = await client.post("/v2/models/second/generate", json={"text_input": "x"})
        assert "second" in answer.json()["text_output"]
        answer = await client.post("/api/generate", json={"model": "second:latest", "prompt": "x", "stream": False})
        assert answer.json()["response"] == "second"
        large = " " * (model_choice.INLINE_BYTES + 1)
        answer = await client.post("/v1/completions", content=large + json.dumps(body_for("second")))
        assert text_of(answer) == "second"

    with_client(models_of("second"), work)


def test_what_names_no_extra_model_is_the_first_ones_or_refused(models_of, shop):
    async def work(client: httpx.AsyncClient) -> None:
        assert text_of(await client.post("/v1/completions", json=body_for("tiny"))) == "Hello, world."
        answer = await client.post("/v1/completions", json=body_for("third"))
        assert answer.status_code == 404
        assert "'tiny', 'second' are" in answer.json()["error"]["message"]
        assert (await client.post("/v1/completions", content=b"{")).status_code == 400

    with_client(models_of("second"), work)
    assert shop.starts == []


def test_nothing_is_loaded_for_who_has_no_key(models_of, shop):
    from roofline.server.keys import Keys

    async def work(client: httpx.AsyncClient) -> None:
        assert (await client.post("/v1/completions", json=body_for("second"))).status_code == 401

    with_client(models_of("second", keys=Keys("secret")), work)
    assert shop.starts == []


async def streamed(client: httpx.AsyncClient, path: str, body: dict) -> list[str]:
    async with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        return [line async for line in answer.aiter_lines() if line]


def opened_by_a_comment(shop, monkeypatch) -> None:
    """The second model is loaded once a stream has told how far it is."""
    shop.gates["second"], comment = asyncio.Event(), model_choice.EarlyStream.comment

    async def told(stream: model_choice.EarlyStream, text: str) -> None:
        await comment(stream, text)
        shop.gates["second"].set()

    monkeypatch.setattr(model_choice, "PROGRESS_SECONDS", 0.01)
    monkeypatch.setattr(model_choice.EarlyStream, "comment", told)


def test_a_stream_tells_how_far_its_model_is_and_goes_on_as_ever(models_of, shop, monkeypatch):
    opened_by_a_comment(shop, monkeypatch)
    models = models_of("second")

    async def work(client: httpx.AsyncClient) -> None:
        lines = await streamed(client, "/v1/completions", body_for("second"))
        comments = [line for line in lines if line.startswith(": ")]
        assert re.match(": second: loading, [0-9]+ s", comments[0])
        assert lines[-1] == "data: [DONE]"
        deltas = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "".join(each["choices"][0]["text"] for each in deltas) == "second"
        assert ": second" not in "".join(await streamed(client, "/v1/completions", body_for("second")))

    with_client(models, work)


@pytest.mark.parametrize(
    ("path", "event"), [("/v1/completions", None), ("/v1/responses", "error"), ("/v1/messages", "error")]
)
@pytest.mark.parametrize("fails", ["load", "request"])
def test_a_stream_that_has_begun_ends_with_its_error(models_of, shop, monkeypatch, path, event, fails):
    opened_by_a_comment(shop, monkeypatch)
    if fails == "load":
        shop.problems["second"] = ConfigError("the file is gone")

    async def work(client: httpx.AsyncClient) -> None:
        lines = await streamed(client, path, {"model": "second", "temperature": -1})
        assert lines[-1].startswith("data: {")
        assert ("the file is gone" in lines[-1]) == (fails == "load")
        assert "error" in json.loads(lines[-1][6:])
        assert [line for line in lines if line.startswith("event")] == ([f"event: {event}"] if event else [])

    with_client(models_of("second"), work)


def test_an_error_before_any_comment_has_its_status(models_of, shop):
    shop.problems["second"] = ConfigError("the file is gone")

    async def work(client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/completions", json=body_for("second", stream=True))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_loaded")

    with_client(models_of("second"), work)


def test_a_client_that_leaves_while_its_model_is_loaded_leaves_nothing(models_of, shop):
    shop.gates["second"] = asyncio.Event()
    models = models_of("second")

    async def run() -> None:
        app = create_app(models._first, models=models)
        sent, left = [], asyncio.Event()
        messages = [{"type": "http.request", "body": json.dumps(body_for("second")).encode(), "more_body": False}]

        async def receive() -> dict:
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            sent.append(message)

        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        request = asyncio.create_task(app(scope, receive, send))
        model = models.extra["second"]
        await settled(lambda: model.waiting == 1)
        left.set()
        await request
        assert sent == []
        assert (model.waiting, model.uses) == (0, 0)
        shop.gates["second"].set()
        await settled(lambda: model.loaded is not None)
        assert shop.engines["second"].submitted == []
        await models.close()

    asyncio.run(run())


def test_lines_of_batches_name_extra_models_too(models_of):
    models = models_of("second")

    async def run() -> None:
        app = create_app(models._first, models=models)
        for name, text in (("second", b"second"), ("tiny", b"Hello, world.")):
            reply = await call_endpoint(app, "/v1/completions", json.dumps(body_for(name)).encode(), LOCAL)
            assert reply.status == 200
            assert b'"text":"' + text in reply.body
        assert models.extra["second"].uses == 0
        await models.close()

    asyncio.run(run())


def test_lists_readiness_and_statistics_tell_of_extra_models(models_of, shop):
    models = models_of("second", "third", pinned=("third",))

    async def work(client: httpx.AsyncClient) -> None:
        refused = await client.get("/ready")
        assert (refused.status_code, "'third' is not ready: absent" in refused.text) == (503, True)
        await models.load_pinned()
        assert text_of(await client.post("/v1/completions", json=body_for("third"))) == "third"
        figures_now = (await client.get("/ready")).json()["models"]
        assert [(each["name"], each["status"], each["pinned"], each["bytes"]) for each in figures_now] == [
            ("second", "absent", False, SIZE),
            ("third", "loaded", True, SIZE),
        ]
        cards = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["max_model_len"], card.get("status")) for card in cards] == [
            ("tiny", 1000, None),
            ("second", None, "absent"),
            ("third", 1000, "loaded"),
        ]
        assert (await client.get("/v1/models/second")).json() == cards[1]
        names = [card["name"] for card in (await client.get("/api/tags")).json()["models"]]
        assert names == ["tiny", "second", "third"]
        assert [card["name"] for card in (await client.get("/api/ps")).json()["models"]] == ["tiny", "third"]
        assert list((await client.get("/stats")).json()["models"]) == ["third"]

    with_client(models, work)


def test_metrics_have_a_label_for_each_model_and_counters_outlive_its_leaving(models_of):
    models = models_of("second", "third", room=1)

    async def figures(client: httpx.AsyncClient) -> dict[str, float]:
        lines = (await client.get("/metrics")).text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    async def work(client: httpx.AsyncClient) -> None:
        await client.post("/v1/completions", json=body_for("second"))
        await client.post("/v1/completions", json=body_for("third"))  # the second has left
        figures_now = await figures(client)
        assert figures_now['vllm:generation_tokens_total{model_name="second"}'] == len(b"second") + 1
        assert figures_now['vllm:generation_tokens_total{model_name="third"}'] == len(b"third") + 1
        assert figures_now['roofline:engine_up{model_name="second"}'] == 0
        assert figures_now['roofline:engine_up{model_name="third"}'] == 1
        assert figures_now['vllm:num_preemptions_total{model_name="second"}'] == 2
        await client.post("/v1/completions", json=body_for("second"))
        figures_now = await figures(client)
        assert figures_now['vllm:num_preemptions_total{model_name="second"}'] == 4  # a fresh engine counts from 0

    with_client(models, work)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"extra_model": ["a"]}, "give it as NAME=PATH"),
        ({"extra_model": ["m=preset:tiny"]}, "two models would be called 'm'"),
        ({"extra_model": ["a=preset:tiny", "a=preset:tiny"]}, "two models would be called 'a'"),
        ({"extra_model": ["a=preset:tiny"], "adapter": ["a=/x"]}, "two models would be called 'a'"),
        ({"extra_model": ["a=preset:tiny"], "pin_model": ["b"]}, "pin_model='b' is no extra_model"),
        ({"extra_model": ["a=./nothing.gguf"]}, "there is no such file"),
        ({"extra_model": ["a=preset:tiny"], "data_parallel": 2}, "replicas of one model, or several models"),
        ({"pin_model": ["a"]}, "of which there is none"),
        ({"model_megabytes": 9}, "of which there is none"),
    ],
)
def test_names_that_cannot_be_served_are_refused_at_once(changes, problem):
    with pytest.raises(ConfigError, match=problem):
        check_extra_models(ServeOptions("m", **changes))


def test_extra_models_take_the_options_of_the_first_and_files_of_their_own(make_context, tmp_path, monkeypatch):
    specs = []

    class Remote(Engine):
        def __init__(self, spec: Any) -> None:
            super().__init__(b"x")
            specs.append(spec)

        def launch(self) -> None:
            """Nothing."""

    monkeypatch.setattr("roofline.server.extra_models.RemoteEngine", Remote)
    monkeypatch.setattr("roofline.server.extra_models.load_text", lambda *_: BytesText())
    options = ServeOptions(
        "preset:tiny",
        extra_model=["a/b=preset:tiny", "c=preset:tiny"],
        pin_model=["c"],
        model_megabytes=3,
        golden_check="off",
    )
    changed = {"cache_file": "pages", "record": str(tmp_path), "max_running": 3}
    options = replace(options, engine=replace(options.engine, **changed), load=replace(options.load, cache_tokens=64))
    models = make_models(options, make_context())
    assert [(each.name, each.pinned, each.check) for each in models.extra.values()] == [
        ("a/b", False, None),
        ("c", True, None),
    ]
    assert models._max_bytes == 3 << 20

    async def run() -> None:
        await used(models, "a/b")
        await models.close()

    asyncio.run(run())
    (spec,) = specs
    assert (spec.source, spec.options["cache_tokens"], spec.config.max_running) == ("preset:tiny", 64, 3)
    assert (spec.config.cache_file, spec.config.record) == ("pages.a_b", str(tmp_path / "a_b"))


def test_an_engine_whose_text_cannot_be_read_is_closed(make_context, monkeypatch):
    engines = []

    class Remote(Engine):
        def __init__(self, spec: Any) -> None:
            super().__init__(b"x")
            engines.append(self)

        def launch(self) -> None:
            """Nothing."""

    def unreadable(*_: object) -> None:
        raise ConfigError("no tokenizer")

    monkeypatch.setattr("roofline.server.extra_models.RemoteEngine", Remote)
    monkeypatch.setattr("roofline.server.extra_models.load_text", unreadable)
    models = make_models(ServeOptions("preset:tiny", extra_model=["a=preset:tiny"]), make_context())

    async def run() -> None:
        with pytest.raises(RequestError, match="no tokenizer"):
            await used(models, "a")
        with suppress(RequestError):
            await models.close()

    asyncio.run(run())
    assert "close" in engines[0].steps


def test_a_budget_that_nobody_gives_is_three_quarters_of_the_memory(make_context, monkeypatch):
    for memory, budget in ((1000, 750), (None, 0)):
        monkeypatch.setattr(extra_models, "detect", lambda memory=memory: SimpleNamespace(memory_total=memory))
        models = make_models(ServeOptions("preset:tiny", extra_model=["a=preset:tiny"]), make_context())
        assert models._max_bytes == budget
    assert make_models(ServeOptions("preset:tiny"), make_context()) is None
    assert extra_models._expected_bytes("preset:tiny") == 0


def test_the_first_model_takes_what_its_engine_says_or_its_files(monkeypatch):
    monkeypatch.setattr(extra_models, "_expected_bytes", lambda source: len(source))
    for measured, expected in ((0, 4), (9, 9)):
        monkeypatch.setattr(extra_models, "engine_bytes", lambda _, measured=measured: measured)
        assert extra_models._first_bytes(SimpleNamespace(), "tiny") == expected


@pytest.mark.parametrize(("speculate", "own"), [("off", "off"), ("ngram", "ngram"), ("draft", "off")])
def test_another_model_has_no_adapters_and_no_draft_model_of_the_first(speculate, own):
    config = replace(EngineConfig(speculate=speculate, max_adapters=3), cache_file=None)
    changed = extra_models._config(config, "a/b")
    assert (changed.speculate, changed.max_adapters, changed.cache_file, changed.record) == (own, 0, None, None)


def test_an_extra_model_is_launched_and_the_rest_of_its_text_built(make_context, monkeypatch):
    steps = []

    class Remote(Engine):
        def __init__(self, spec: Any) -> None:
            super().__init__(b"x")
            steps.append(spec.options["text"])

        def launch(self) -> None:
            steps.append("launch")

    class Text(BytesText):
        def complete(self) -> None:
            steps.append("complete")
            raise ConfigError("the tables do not fit together")

    monkeypatch.setattr(extra_models, "RemoteEngine", Remote)
    monkeypatch.setattr(extra_models, "load_text", lambda *_: Text())
    options = ServeOptions("preset:tiny", extra_model=["a=preset:tiny"], golden_check="off")
    models = make_models(options, make_context())

    async def run() -> None:
        await used(models, "a")
        await settled(lambda: "complete" in steps)
        await models.close()

    asyncio.run(run())
    assert steps == [False, "launch", "complete"]


def test_an_extra_model_is_checked_on_golden_prompts_of_its_own(make_context, monkeypatch):
    checked = []

    class Remote(Engine):
        def __init__(self, spec: Any) -> None:
            super().__init__(spec.source.encode())

        def launch(self) -> None:
            """Nothing."""

    class Check:
        def __init__(self, state: Any, engine: Any, source: str, load: Any) -> None:
            self.words = state, engine, source, load

        async def run(self, text: Any) -> None:
            checked.append((*self.words, text))

    text = BytesText()
    monkeypatch.setattr("roofline.server.extra_models.RemoteEngine", Remote)
    monkeypatch.setattr("roofline.server.extra_models.load_text", lambda *_: text)
    monkeypatch.setattr("roofline.server.extra_models.GoldenCheck", Check)
    options = ServeOptions("preset:tiny", extra_model=["a=preset:tiny"])
    models = make_models(replace(options, load=replace(options.load, threads=1)), make_context())

    async def run() -> None:
        await used(models, "a")
        await settled(lambda: checked)
        await models.close()

    asyncio.run(run())
    ((state, engine, source, load, told),) = checked
    model = models.extra["a"]
    assert state is model.golden
    assert engine.answer == b"preset:tiny"
    assert (source, load, told) == ("preset:tiny", replace(options.load, threads=1, max_adapters=0), text)


@pytest.mark.parametrize(("status", "checks"), [("passed", 1), ("failed", 1), ("skipped", 1), ("pending", 2)])
def test_a_model_that_loads_anew_is_checked_again_only_where_its_check_was_cut_off(make_context, shop, status, checks):
    states = []

    async def check(engine, text, state) -> None:
        states.append(state)
        state.status = status

    model = shop.model("a", check=check)
    models = Models(make_context(other_names=("a",)), [model], SIZE)

    async def run() -> None:
        await used(models, "a")
        await settled(lambda: len(states) == 1)
        await models._unload(model)
        await used(models, "a")
        await asyncio.sleep(0)
        assert len(states) == checks
        assert len(set(map(id, states))) == checks  # a check that begins anew has a state of its own
        assert model.loaded.golden is model.golden is states[-1]
        await models.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "scope",
    [
        {"type": "lifespan"},
        {"type": "http", "method": "GET", "path": "/v1/models"},
        {"type": "http", "method": "POST", "path": "/v1/files"},
    ],
)
def test_what_names_no_model_in_a_body_is_passed_on_unread(scope):
    passed = []

    async def inner(*arguments):
        passed.append(arguments)

    async def never(*_):
        raise AssertionError("the body was read, or answered")

    asyncio.run(ModelChoice(inner, None, {}, {"/v1/files"})(scope, never, never))
    assert passed == [(scope, never, never)]


def test_slots_of_recurrent_state_count_as_memory(monkeypatch):
    monkeypatch.setattr("roofline.server.models._resident_bytes", lambda pid: 1000)
    loaded = SimpleNamespace(num_pages=3, page_bytes=100, state_slots=4, slot_bytes=20)
    engine = SimpleNamespace(engines=[], pid=7, description=loaded)
    assert engine_bytes(engine) == 1000 + 300 + 80
    engine.engines = [engine, engine]
    assert engine_bytes(engine) == 2 * (1000 + 300 + 80)
    engine.description = None
    assert engine_bytes(engine) == 0
