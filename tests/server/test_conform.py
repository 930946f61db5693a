"""roofline conform: passes on our server, and notices each promise that a server breaks."""

import json

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from roofline.bench.conform.checks import CHECKS
from roofline.bench.conform.client import Server, Violation
from roofline.bench.conform.run import CheckFinding, conform
from tests.command_line import call_roofline

# Of the fake engine: what it answers depends on no seed, and it knows no grammar.
NEED_A_MODEL = {"repeats_with_a_seed", "assembles_tool_calls", "holds_to_a_schema"}


def findings(url: str, *names: str) -> dict[str, CheckFinding]:
    server = Server(url, None, None, 20)
    try:
        return {finding.check: finding for finding in conform(server, names)}
    finally:
        server.close()


def test_our_server_keeps_its_promises(live, engine):
    engine.answer = "Es war einmal ein Fuchs, der fiel in einen Brunnen: 東京 😀, naïve.".encode()
    told = findings(live(), *(check.__name__ for check in CHECKS))
    assert len(told) == 15
    failed = {name: finding.detail for name, finding in told.items() if finding.outcome != "pass"}
    assert {name.replace(" ", "_") for name in failed} <= NEED_A_MODEL, failed


class Liar:
    """A server of one sentence that breaks one promise, named by `lie`."""

    text = "Once upon a time a fox fell into a deep well and cried."

    def __init__(self, lie: str) -> None:
        self.lie = lie
        self.app = FastAPI()
        self.app.get("/v1/models")(self.models)
        if lie != "no card":
            self.app.get("/v1/models/{name}")(self.model)
        self.app.post("/v1/chat/completions")(self.chat)
        if lie.startswith("response"):
            self.app.post("/v1/responses")(self.respond)
            self.app.get("/v1/responses/{name}")(self.kept)

    async def models(self):
        return {"data": [{"id": "liar"}]}

    async def model(self, name: str):
        return {"id": "other" if self.lie == "card" else name}

    async def chat(self, request: Request):
        body = json.loads(await request.body())
        if self.lie == "broken":
            return JSONResponse({"error": {"message": "bug"}}, 500)
        most = body["max_tokens"] if isinstance(body.get("max_tokens"), int) else 100
        text, tokens = self.text, self.text.split(" ")
        stops = body.get("stop") or []
        for stop in [stops] if isinstance(stops, str) else stops:
            text = text[: text.index(stop) + (1 if self.lie == "stop" else 0)]
        reason = "stop" if len(tokens) <= most else "length"
        if reason == "length":
            text = " ".join(tokens[:most])
        count = min(most, len(tokens)) + (self.lie == "count")
        usage = {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count}
        if not body.get("stream"):
            choice = {"index": 0, "finish_reason": reason, "message": {"content": text}}
            return {"choices": [choice], "usage": usage}
        return StreamingResponse(self.events(text, reason, usage), media_type="text/event-stream")

    async def respond(self, request: Request):
        body = json.loads(await request.body())
        forgets = self.lie == "response chain" and "previous_response_id" in body
        usage = {"input_tokens": 7 if forgets or isinstance(body["input"], str) else 20}
        response = {"id": "r", "usage": usage, **await self.kept("r")}
        if not body.get("stream"):
            return response
        texts = [self.text[:9], self.text[10 if self.lie == "response stream" else 9 :]]
        told = [{"type": "response.output_text.delta", "delta": text} for text in texts]
        told.append({"type": "response.completed", "response": response})
        first = int(self.lie == "response numbers")
        numbered = [self.event({**event, "sequence_number": first + at}) for at, event in enumerate(told)]
        return StreamingResponse(iter(numbered), media_type="text/event-stream")

    async def kept(self, name: str):
        return {"output": [{"type": "message", "content": [{"text": self.text}]}]}

    def events(self, text: str, reason: str, usage: dict):
        if self.lie == "split":
            raw = json.dumps({"choices": [{"index": 0, "delta": {"content": "é"}}]}, ensure_ascii=False).encode()
            cut = raw.index("é".encode()) + 1
            yield b"data: " + raw[:cut] + b"\n\ndata: " + raw[cut:] + b"\n\n"
        pieces = [text[i : i + 5] for i in range(0, len(text), 5)]
        for piece in pieces[1:] if self.lie == "lost" else pieces:
            yield self.event({"choices": [{"index": 0, "delta": {"content": piece}}]})
        yield self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        yield self.event({"choices": [], "usage": usage})
        if self.lie == "error":
            yield self.event({"error": {"message": "bug"}})
        if self.lie != "done":
            yield b"data: [DONE]\n\n"

    def event(self, content: dict) -> bytes:
        return f"data: {json.dumps(content)}\n\n".encode()


@pytest.mark.parametrize(
    ("lie", "check", "words"),
    [
        ("card", "lists_models", "the card of 'liar' is of 'other'"),
        ("broken", "streams_a_chat_as_it_answers", "status 500"),
        ("lost", "streams_a_chat_as_it_answers", "in the stream the text is"),
        ("split", "streams_a_chat_as_it_answers", "a character was cut"),
        ("error", "streams_a_chat_as_it_answers", "the stream breaks off"),
        ("done", "streams_a_chat_as_it_answers", "ends without [DONE]"),
        ("stop", "ends_at_stop_strings", "with stop"),
        ("count", "counts_tokens", "of 5 tokens 6 are counted"),
        ("response stream", "goes_on_from_a_response", "its last event has"),
        ("response numbers", "goes_on_from_a_response", "event 0 (response.output_text.delta) has the number 1"),
        ("response chain", "goes_on_from_a_response", "the prompt has 7 tokens where it goes on, and 20 at once"),
        ("", "refuses_what_is_wrong", '/chat/completions {"max_tokens": -1}: status 200, where 4xx is due'),
        ("", "refuses_an_unknown_model", "where 4xx is due"),
        ("", "repeats_with_a_seed", "the seed changes nothing"),
        ("", "gives_n_answers", "not 0 and 1"),
        ("", "tells_log_probabilities", "the tokens spell ''"),
        ("", "assembles_tool_calls", "no tool is called"),
        ("", "holds_to_a_schema", "the answer is"),
    ],
)
def test_a_broken_promise_is_noticed(serve_app, lie, check, words):
    (finding,) = findings(serve_app(Liar(lie).app), check).values()
    assert finding.outcome == "fail"
    assert words in finding.detail


def test_a_server_that_keeps_them_passes_and_what_it_lacks_is_missing(serve_app):
    url = serve_app(Liar("").app)
    kept = findings(url, "lists_models", "streams_a_chat_as_it_answers", "ends_at_stop_strings", "counts_tokens")
    assert {finding.outcome for finding in kept.values()} == {"pass"}
    for check in ("streams_a_completion_as_it_answers", "goes_on_from_a_response"):
        (lacking,) = findings(url, check).values()
        assert (lacking.outcome, "status 404" in lacking.detail) == ("missing", True)
    (card,) = findings(serve_app(Liar("no card").app), "lists_models").values()
    assert (card.outcome, card.detail) == ("missing", "GET /models/NAME is not there")
    (kept_response,) = findings(serve_app(Liar("response").app), "goes_on_from_a_response").values()
    assert kept_response.outcome == "pass"


def test_the_command_tells_and_ends_with_a_status(serve_app, live):
    url = serve_app(Liar("count").app)
    result = call_roofline(["conform", url, "--only", "counts tokens,lists", "--json"])
    told = json.loads(result.stdout)
    assert (result.exit_code, told["model"], told["counts"]) == (
        1,
        "liar",
        {"pass": 1, "fail": 1, "missing": 0, "skipped": 0},
    )
    result = call_roofline(["conform", f"{live()}/v1/", "--only", "lists"])
    assert result.exit_code == 0
    assert "1 pass, 0 fail, 0 missing, 0 skipped" in result.stdout


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["http://127.0.0.1:1"], "cannot be asked"),
        (["http://127.0.0.1:1", "--only", "nothing"], "no check has such a name"),
        (["no address"], "is no address of a server"),
        (["http://127.0.0.1:99999"], "its port is no number from 1 to 65535"),
    ],
)
def test_what_cannot_be_checked_is_one_sentence(words, problem):
    result = call_roofline(["conform", *words])
    assert result.exit_code == 1
    assert problem in result.output


def test_a_server_without_models_is_refused():
    server = Server("http://127.0.0.1:1", None, None, 1)
    server.http = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200, json={"data": []})))
    with pytest.raises(Violation, match="lists no model"):
        server.find_model()
