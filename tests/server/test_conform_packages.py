"""roofline conform through client packages: each passes on our server, and what a server breaks is noticed."""

import json
import sys

import pytest
from fastapi import FastAPI, Request

from roofline.bench.conform.client import Missing, Skipped, Violation
from roofline.bench.conform.packages.checks import PACKAGE_CHECKS
from roofline.bench.conform.packages.round_trip import PackageCall, PackageReply, asking, calls_tools, chats, package
from tests.command_line import call_roofline
from tests.judges import require
from tests.server.test_conform import findings

MODULES = {"langchain": "langchain_openai"}  # by the first word of a check; otherwise that word
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


def module_of(check) -> str:
    word = check.__name__.partition("_")[0]
    return MODULES.get(word, word)


@pytest.mark.parametrize("check", PACKAGE_CHECKS, ids=lambda check: check.__name__)
def test_our_server_keeps_its_promises(live, engine, check):
    require(module_of(check))
    if "calls_tools" in check.__name__:
        engine.answer = CALL.encode()
    (finding,) = findings(live(), check.__name__).values()
    assert (finding.outcome, finding.promise[:7]) == ("pass", "Package"), finding.detail


@pytest.mark.parametrize("check", PACKAGE_CHECKS, ids=lambda check: check.__name__)
def test_a_package_that_is_not_installed_is_skipped(serve_app, monkeypatch, check):
    monkeypatch.setitem(sys.modules, module_of(check), None)
    app = FastAPI()
    app.get("/v1/models")(lambda: {"data": [{"id": "liar"}]})
    (finding,) = findings(serve_app(app), check.__name__).values()
    name = module_of(check).replace("_", "-")
    assert finding.outcome == "skipped"
    assert finding.detail == f"package {name} is not installed; pip install {name}"


def test_a_package_that_cannot_be_imported_is_skipped(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "half_package.py").write_text("import no_such_dependency")
    (tmp_path / "broken_package.py").write_text("from json import no_such_name")
    for module in ("half_package", "broken_package"):
        with pytest.raises(Skipped) as skipped:
            package(module, "some-package")
        assert "cannot be imported" in str(skipped.value)
        assert str(skipped.value).endswith("pip install --force-reinstall some-package")


def test_where_all_is_skipped_the_status_says_so(serve_app, monkeypatch):
    monkeypatch.setitem(sys.modules, "litellm", None)
    app = FastAPI()
    app.get("/v1/models")(lambda: {"data": [{"id": "liar"}]})
    app.get("/v1/models/{name}")(lambda name: {"id": name})
    url = serve_app(app)
    result = call_roofline(["conform", url, "--only", "litellm"])
    assert (result.exit_code, "0 pass, 0 fail, 0 missing, 2 skipped" in result.stdout) == (1, True)
    assert call_roofline(["conform", url, "--only", "litellm,lists models"]).exit_code == 0


@pytest.mark.parametrize(
    "name", ["anthropic_chats", "anthropic_calls_tools", "anthropic_counts_prompts", "ollama_chats", "ollama_generates"]
)
def test_an_api_that_is_not_there_is_not_offered(serve_app, name):
    pytest.importorskip(name.partition("_")[0], reason="the package is not installed")
    app = FastAPI()
    app.get("/v1/models")(lambda: {"data": [{"id": "liar"}]})
    (finding,) = findings(serve_app(app), name).values()
    assert finding.outcome == "missing"
    assert "not offered: POST /" in finding.detail
    assert "status 404" in finding.detail


class OddServer:
    """A server of Anthropic's and Ollama's API that counts, streams and lists what it does not have."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.app.get("/v1/models")(lambda: {"data": [{"id": "odd"}]})
        self.app.get("/api/tags")(lambda: {"models": [{"model": "even"}]})
        self.app.post("/api/generate")(self.generate)
        self.app.post("/v1/messages")(self.message)
        self.app.post("/v1/messages/count_tokens")(lambda: {"input_tokens": 8})

    async def generate(self, request: Request):
        streams = json.loads(await request.body())["stream"]
        return {"model": "odd", "response": "Once" if streams else "Once upon", "done": True}

    async def message(self):
        content = [{"type": "text", "text": "Once"}]
        return {"content": content, "usage": {"input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 1}}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("anthropic_counts_prompts", "count_tokens says 8 tokens, and an answer is billed 7"),
        ("ollama_generates", "'Once' is streamed, where 'Once upon' is the answer"),
        ("ollama_names_models", "'odd' is not among ['even']"),
    ],
)
def test_what_an_api_of_its_own_breaks_is_noticed(serve_app, name, words):
    pytest.importorskip(name.partition("_")[0], reason="the package is not installed")
    (finding,) = findings(serve_app(OddServer().app), name).values()
    assert (finding.outcome, finding.detail) == ("fail", words)


class Words:
    """A package whose server counts a token a character, answers in one sentence, and breaks the promise `lie`."""

    route = "/v1/words"
    requires_calls = True

    def __init__(self, lie: str) -> None:
        self.lie = lie
        self.requires_calls = lie != "no call"

    def answer(self, turns, *, tools=False, required=False):
        return self._reply(turns, tools, streams=False)

    def stream(self, turns, *, tools=False, required=False):
        return self._reply(turns, tools, streams=True)

    def result(self, call, text):
        return {"role": "tool", "content": "" if self.lie == "deaf" else text}

    def called(self):
        return PackageCall("", "weather", {}), {"role": "assistant", "content": "own call"}

    def _reply(self, turns, tools, streams):
        contents = [turn["content"] for turn in turns]
        if self.lie == "refuses" and any(isinstance(turn, dict) and "own" in turn for turn in turns):
            raise OSError("Unknown field: own")
        if self.lie == "status":
            raise_status(404)
        if tools and self.lie == "no tools":
            raise_status(400)
        if self.lie == "forgets":
            contents = contents[:1]
        text = "" if self.lie == "silent" else "Once" if streams and self.lie == "lost" else "Once upon"
        message = {"role": "assistant", "content": "" if self.lie == "empty" else text, "own": True}
        return PackageReply(text, message, self._calls(streams) if tools else (), sum(map(len, contents)))

    def _calls(self, streams):
        if self.lie in ("no call", "ignores") or (streams and self.lie == "lost call"):
            return ()
        city = "Rome" if streams and self.lie == "other call" else "Ulm"
        return (
            PackageCall(
                "" if self.lie == "no id" else "c1",
                "wether" if self.lie == "name" else "weather",
                "{" if self.lie == "text" else {"city": city},
            ),
        )


def raise_status(status: int):
    raise type("StatusError", (Exception,), {"status_code": status})("no such thing")


@pytest.mark.parametrize(
    ("check", "lie", "words"),
    [
        (chats, "silent", "has no text"),
        (chats, "lost", "'Once' is streamed, where 'Once upon' is the answer"),
        (chats, "refuses", "the message of the answer, sent back: OSError: Unknown field: own"),
        (chats, "empty", "sent back the prompt has 51 tokens, with its text 60"),
        (chats, "forgets", "tokens, and 42 without it"),
        (calls_tools, "ignores", "no tool is called, though a call is required: 'Once upon'"),
        (calls_tools, "no id", "the call has no id"),
        (calls_tools, "name", "'wether' is called"),
        (calls_tools, "text", "the arguments are no JSON object: '{'"),
        (calls_tools, "lost call", "no tool is called in the stream"),
        (calls_tools, "other call", "the stream calls weather with {'city': 'Rome'}"),
        (calls_tools, "deaf", "a longer result of a tool makes the prompt no longer"),
    ],
)
def test_a_broken_round_trip_is_noticed(check, lie, words):
    with pytest.raises(Violation) as violation:
        check(Words(lie))
    assert words in str(violation.value)


def test_a_kept_round_trip_passes():
    assert chats(Words("")) == "9 characters; 60 tokens of prompt with the answer sent back"
    assert calls_tools(Words("")) == "weather {'city': 'Ulm'}"


def test_a_model_that_calls_nothing_is_no_pass():
    with pytest.raises(Skipped, match="Name a model that calls tools with --model"):
        calls_tools(Words("no call"))
    deaf = Words("no call")
    deaf.result = lambda call, text: {"role": "tool", "content": ""}
    with pytest.raises(Violation, match="a longer result"):
        calls_tools(deaf)


def test_what_is_refused_is_missing():
    with pytest.raises(Missing, match="not offered: POST /v1/words is answered with status 404: no such thing"):
        chats(Words("status"))
    with pytest.raises(Missing, match="a tool is refused: POST /v1/words is answered with status 400"):
        calls_tools(Words("no tools"))


def test_what_a_package_lacks_is_skipped():
    with pytest.raises(Skipped, match="a tool needs package no_such_package, which is not installed; pip install no_"):
        import_in(asking("a tool"))


def import_in(context):
    with context:
        import no_such_package  # noqa: F401
