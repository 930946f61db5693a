"""The line of each request, the name that it goes by, and that no line of ours tells what was asked or answered."""

import asyncio
import json
import logging
import re
import socket
import time
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from roofline.common.errors import RequestError
from roofline.server import access_log, answers, record
from roofline.server.limits import Limits
from roofline.server.record import Recorder, RequestRecord
from tests.server.raw_http import Answers, request, sent

SECRET = "Xylophone-4711"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}]}


def until(value, seconds=30.0):
    """What `value` returns, once that is something."""
    end = time.monotonic() + seconds
    while not (current := value()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
    return current


@pytest.fixture
def lines(caplog, make_context):
    """lines(): the access log so far, each line as a dictionary; with a level."""
    caplog.set_level(logging.DEBUG, "roofline")
    caplog.set_level(logging.DEBUG, "roofline.access")  # which a server that another test started may have changed

    def read():
        entries = [entry for entry in caplog.records if entry.name == "roofline.access"]
        pairs = [re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)', entry.getMessage()) for entry in entries]
        return [dict(each) | {"level": entry.levelname} for each, entry in zip(pairs, entries, strict=True)]

    return read


def test_a_line_says_what_was_asked_how_much_it_was_and_how_long_it_took(
    call, make_context, lines, monkeypatch, engine
):
    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

        time = monotonic

    clock = Clock()
    for module in (record, answers):
        monkeypatch.setattr(module, "time", clock)
    events = engine._events

    async def slow(*arguments):
        seconds = iter([0.5, *[0.25] * 20])
        async for event in events(*arguments):
            clock.now += next(seconds)
            yield event

    engine._events, context = slow, make_context(access_log=True)
    response = call("POST", "/v1/chat/completions", json=CHAT, context=context)
    (entry,) = lines()
    assert entry == {
        "id": response.headers["x-request-id"],
        "method": "POST",
        "path": '"/v1/chat/completions"',
        "status": "200",
        "seconds": "3.750000",
        "answer": response.json()["id"].removeprefix("chatcmpl-"),
        "prompt_tokens": str(len(f"<user>{SECRET}")),
        "completion_tokens": "14",
        "first_token": "0.500000",
        "level": "INFO",
    }


def test_refusals_and_other_routes_have_lines_without_tokens_and_probes_only_for_debug(call, make_context, lines):
    context = make_context(access_log=True, api_key="s3cret")
    key = {"authorization": "Bearer s3cret"}
    call("POST", "/v1/chat/completions", json=CHAT, context=context)
    call("GET", "/none", context=context, headers=key)
    for path in ("/health", "/ready", "/metrics", "/stats"):
        call("GET", path, context=context, headers=key)
    call("GET", "/ready", context=context)
    shown = [(entry["path"].strip('"'), entry["status"], entry["level"]) for entry in lines()]
    assert shown == [
        ("/v1/chat/completions", "401", "INFO"),
        ("/none", "404", "INFO"),
        *((path, "200", "DEBUG") for path in ("/health", "/ready", "/metrics", "/stats")),
        ("/ready", "401", "INFO"),
    ]
    assert all("completion_tokens" not in entry and "complete" not in entry for entry in lines())


def test_without_the_option_there_are_no_lines(call, make_context, lines):
    call("POST", "/v1/chat/completions", json=CHAT, context=make_context())
    assert lines() == []


@pytest.mark.parametrize("name", ["7", "a-B.c_d:9", "x" * 128])
def test_a_sane_name_of_the_client_is_kept(call, make_context, lines, name):
    context = make_context(access_log=True)
    response = call("GET", "/v1/models", headers={"X-Request-Id": name}, context=context)
    assert response.headers["x-request-id"] == name == lines()[0]["id"]


@pytest.mark.parametrize("name", ["", " ", "a b", "x" * 129, 'a"b', "-a", "a;b", "a\u00e9"])
def test_another_name_is_replaced(call, name):
    response = call("GET", "/v1/models", headers={"X-Request-Id": name.encode()})
    assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])


def test_each_request_has_a_name_of_its_own_also_where_it_is_refused(call):
    answers = [call("GET", path) for path in ("/none", "/none", "/health")]
    assert len({answer.headers["x-request-id"] for answer in answers}) == 3


def test_no_text_of_a_client_makes_a_second_line_or_a_second_field():
    entry = RequestRecord("7", "GET", '/a\nid=8 status=200" \u2028', {})
    assert access_log.line(entry).startswith('id=7 method=GET path="/a\\nid=8 status=200\\" \\u2028" status=499 ')
    entry.path = "x" * 5000
    assert len(access_log.line(entry)) < 300


def test_whose_key_it_was_is_said():
    entry = RequestRecord("7", "GET", "/", {}, status=200, complete=True, principal="alice")
    assert access_log.line(entry) == 'id=7 method=GET path="/" status=200 seconds=0.000000 key=alice'


def test_a_client_that_left_has_an_incomplete_answer(live, engine, caplog):
    caplog.set_level(logging.INFO, "roofline")
    engine.gate.clear()
    host, port = live(access_log=True).removeprefix("http://").split(":")
    body = json.dumps(CHAT).encode()
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        until(lambda: engine.open)
    lines = until(lambda: [entry.getMessage() for entry in caplog.records if entry.name == "roofline.access"])
    assert "status=499 " in lines[0]
    assert "complete=false" in lines[0]
    assert "completion_tokens=0" in lines[0]


POST = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: mine\r\nTransfer-Encoding: chunked\r\n"
PAST = {  # what is sent, the status, the path that is logged, whether the client names the request
    "in the body": ([POST + b"\r\n", b"zz\r\n"], 400, "/tokenize", True),
    "in the body, at once": ([POST + b"\r\nzz\r\n"], 400, "/tokenize", True),
    "trailers": ([POST + b"\r\n0\r\n", b"X: " + b"y" * 20_000], 431, "/tokenize", True),
    "in the head": ([POST + b"Content-Length: 5\r\n\r\n"], 400, "/tokenize", True),
    "by its method": ([b"get /stats?key=secret HTTP/1.1\r\n\r\n"], 400, "/stats", False),
    "a large head": ([b"GET /stats HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 20_000], 431, "/stats", False),
    "bytes": ([b"\x16\x03\x01\xff\r\n\r\n"], 400, "", False),
}


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("name", PAST)
def test_what_is_refused_before_any_route_has_a_line_and_an_id(live, lines, name, pipelined):
    reads, status, path, named = PAST[name]
    before = [request("GET", "/limits") + reads[0], *reads[1:]] if pipelined else reads
    answers = Answers(sent(live(access_log=True), before))
    assert [each for each, _ in answers.list] == ([200] if pipelined else []) + [status]
    identity = answers.heads[-1]["x-request-id"]
    assert (identity == "mine") == named
    entries = until(lambda: [entry for entry in lines() if entry["id"] == identity])
    assert [(entry["status"], json.loads(entry["path"])) for entry in entries] == [(str(status), path)]
    assert "complete" not in entries[0]


def test_a_connection_on_which_nothing_was_asked_has_no_line(live, lines):
    answers = Answers(sent(live(access_log=True, limits=Limits(read_seconds=0.3)), [b"\r\n"]))
    assert [each for each, _ in answers.list] == [408]
    assert not lines()


def test_the_name_of_the_key_is_that_of_the_scopes_state():
    seen = []

    async def app(scope, receive, send):
        scope["state"]["principal"] = SimpleNamespace(name="alice")
        assert Request(scope).state.record.id == "7"

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"x-request-id", b"7")]}
    asyncio.run(Recorder(app, [seen.append])(scope, None, None))
    assert seen[0].principal == "alice"
    assert (seen[0].status, seen[0].complete) == (499, False)


@pytest.mark.parametrize(
    ("bodies", "complete"),
    [([], False), ([True], False), ([True, True], False), ([False], True), ([True, False], True), ([None], True)],
)
def test_an_answer_is_complete_with_its_last_piece(bodies, complete):
    """bodies: what each piece says of whether more follow; None: nothing."""
    seen = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})
        for more in bodies:
            await send({"type": "http.response.body", **({} if more is None else {"more_body": more})})

    async def send(message):
        """It arrives."""

    asyncio.run(Recorder(app, [seen.append])({"type": "http", "method": "GET", "path": "/", "headers": []}, None, send))
    assert (seen[0].status, seen[0].complete) == (200, complete)


def leaky_bodies():
    """Bodies that are refused, or break something, for different reasons; each has the secret in a place of its own."""
    good = {"model": "tiny", "prompt": SECRET}
    chat = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}]}
    yield "/v1/completions", good
    yield "/v1/chat/completions", chat
    yield "/v1/completions", {**good, "stream": True}
    yield "/v1/chat/completions", {**chat, "stream": True, "n": 2}
    yield "/v1/completions", {**good, "stop": [SECRET]}
    yield "/v1/completions", {**good, "max_tokens": 10**6}
    yield "/v1/completions", {**good, "model": SECRET}
    yield "/v1/completions", {**good, "prompt": SECRET * 1000}
    yield "/v1/completions", {**good, SECRET: 1}
    yield "/v1/completions", {**good, "temperature": SECRET}
    yield "/v1/completions", {**good, "suffix": SECRET}
    yield "/v1/chat/completions", {**chat, "messages": [{"role": SECRET, "content": SECRET}]}
    yield "/v1/chat/completions", {**chat, "messages": [{"role": "assistant", "content": SECRET}]}
    yield "/v1/chat/completions", {**chat, "tools": [{"type": "function", "function": {"name": SECRET}}]}
    yield "/v1/completions", f'{{"prompt": "{SECRET}"'
    yield "/v1/completions", SECRET


@pytest.mark.parametrize("broken", ["nothing", "engine", "engine's answer", "text"])
def test_no_line_at_any_level_has_text_of_prompts_or_answers(call, make_context, engine, caplog, broken):
    caplog.set_level(1)
    context = make_context(access_log=True)
    engine.answer = SECRET.encode()
    if broken == "engine's answer":
        engine.error = "out of luck"
    elif broken == "engine":

        async def refuse(*_, **__):
            raise RequestError(503, "engine_unavailable", "gone")

        engine.submit = refuse
    elif broken == "text":
        context.text.encode = context.text.encode_chat = lambda text, most=None: 1 // 0
    for path, body in leaky_bodies():
        content = body if isinstance(body, str) else json.dumps(body)
        call("POST", path, content=content, context=context, headers={"content-type": "application/json"})
    ours = [entry for entry in caplog.records if entry.name.startswith("roofline")]
    assert len(ours) >= 16
    formatter = logging.Formatter("%(name)s %(message)s")
    for entry in ours:
        assert SECRET not in formatter.format(entry)
