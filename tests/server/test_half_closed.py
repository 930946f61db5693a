"""Clients that end their side of a connection once they have asked: who still reads is answered, and for who is gone
nothing more is computed."""

import contextlib
import json
import re
import shutil
import socket
import subprocess

import pytest

from roofline.server import half_closed
from roofline.server.app import create_app
from tests.server.conftest import protocol_of
from tests.server.raw_http import Answers, connect, request, tokenize, told
from tests.server.test_http_forms import text_of
from tests.server.test_live import eventually

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
VERSIONS = pytest.mark.parametrize("version", ["1.0", "1.1"])
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["object", "stream"])


def ask(version: str, stream: bool) -> bytes:
    raw = request("POST", "/v1/chat/completions", body=json.dumps({**CHAT, "stream": stream}).encode())
    return raw.replace(b"HTTP/1.1", f"HTTP/{version}".encode(), 1)


def everything(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def texts(data: bytes) -> list[str]:
    """Of all answers, which are complete."""
    if b"transfer-encoding" not in data.lower() and b"event-stream" in data:  # its end is the connection's
        head, _, body = data.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert body.endswith(b"data: [DONE]\n\n")
        return [text_of(body)]
    answers = Answers(data)
    assert answers.whole
    assert [status for status, _ in answers.list] == [200] * len(answers.list)
    bodies = [body for _, body in answers.list]
    return [
        json.loads(body)["choices"][0]["message"]["content"] if body.startswith(b"{") else text_of(body)
        for body in bodies
    ]


@pytest.fixture
def soon(monkeypatch):
    """Bytes are sent often enough to send all of a beginning within a test."""
    monkeypatch.setattr(half_closed, "_FIRST_PERIOD", 0.0005)


@VERSIONS
@STREAMS
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_who_still_reads_is_answered(serve_app, make_context, engine, version, stream, loop):
    context = make_context()
    address = serve_app(create_app(context), http=protocol_of(context.limits), loop=loop)
    engine.delay = 0.01
    with connect(address) as connection:
        connection.sendall(ask(version, stream))
        connection.shutdown(socket.SHUT_WR)
        assert texts(everything(connection)) == ["Hello, world."]
    assert not engine.aborted


@VERSIONS
@STREAMS
def test_who_waits_for_long_gets_a_whole_answer(live, engine, soon, version, stream):
    """Longer than it takes to send all that an answer begins with."""
    engine.delay = 0.08
    engine.answer = b"abc"
    with connect(live()) as connection:
        connection.sendall(ask(version, stream))
        connection.shutdown(socket.SHUT_WR)
        data = everything(connection)
    assert texts(data) == ["abc"]
    if stream and version == "1.1":
        assert re.search(rb"\r\n0+[1-9a-f]", data), "zeros before the size of a chunk"


@VERSIONS
@STREAMS
@pytest.mark.parametrize("queued", [True, False])
def test_for_who_is_gone_nothing_more_is_computed(live, engine, version, stream, queued):
    engine.delay, engine.answer = 0.02, b"x" * 900
    if queued:
        engine.gate.clear()
    connection = connect(live())
    connection.sendall(ask(version, stream))
    eventually(lambda: engine.open)
    connection.close()
    eventually(lambda: not engine.open)
    assert engine.aborted


@pytest.mark.slow
def test_for_who_leaves_a_silent_stream_nothing_more_is_computed(live, engine):
    """All that was sent has been read, so that closing sends no reset, and no token comes that would draw one."""
    engine.gate.clear()
    connection = connect(live())
    connection.sendall(ask("1.1", stream=True))
    data = b""
    while not data.endswith(b"\n\n\r\n"):
        data += connection.recv(65536)
    connection.close()
    eventually(lambda: not engine.open)
    assert engine.aborted


@VERSIONS
@STREAMS
def test_who_leaves_after_the_end_of_its_side_is_noticed(live, engine, soon, version, stream):
    engine.delay, engine.answer = 0.02, b"x" * 900
    connection = connect(live())
    connection.sendall(ask(version, stream))
    connection.shutdown(socket.SHUT_WR)
    eventually(lambda: engine.open)
    assert connection.recv(1)
    connection.close()
    eventually(lambda: not engine.open)
    assert engine.aborted


@VERSIONS
@STREAMS
@pytest.mark.parametrize("queued", [True, False])
def test_who_leaves_with_a_request_behind_another_is_noticed(live, engine, soon, version, stream, queued):
    engine.delay, engine.answer = 0.02, b"x" * 900
    if queued:
        engine.gate.clear()
    connection = connect(live())
    keep = ask(version, stream).replace(b"Host:", b"Connection: keep-alive\r\nHost:", 1)
    connection.sendall(keep + request("GET", "/limits"))
    eventually(lambda: engine.open)
    connection.sendall(request("GET", "/limits") * 3)
    connection.close()
    eventually(lambda: not engine.open)
    assert engine.aborted


def test_little_is_read_of_requests_that_wait(live, engine):
    engine.gate.clear()
    with connect(live()) as connection:
        connection.sendall(ask("1.1", stream=True) + request("GET", "/limits"))
        eventually(lambda: engine.open)
        connection.settimeout(0.5)
        size = 0
        with contextlib.suppress(TimeoutError):
            while size < 32 << 20:
                size += connection.send(request("GET", "/limits") * 100)
        engine.gate.set()
        assert size < 16 << 20, "what the sockets hold"


def test_all_that_was_asked_is_answered(live, engine):
    engine.delay = 0.01
    with connect(live()) as connection:
        connection.sendall(ask("1.1", stream=True) + ask("1.1", stream=False) + ask("1.1", stream=True))
        connection.shutdown(socket.SHUT_WR)
        data = everything(connection)
    assert texts(data) == ["Hello, world."] * 3
    assert [answer.get("connection") for answer in Answers(data).heads] == [None, None, "close"]


@pytest.mark.parametrize("cut", [10, -1], ids=["head", "body"])
@pytest.mark.parametrize("before", [0, 2])
def test_a_request_that_is_not_complete_is_refused_behind_the_answers(live, cut, before):
    with connect(live()) as connection:
        connection.sendall(tokenize("one") * before + tokenize("two")[:cut])
        connection.shutdown(socket.SHUT_WR)
        answers = Answers(everything(connection))
    assert [status for status, _ in answers.list] == [200] * before + [400]
    assert [told(body) for _, body in answers.list[:-1]] == ["one"] * before
    assert "ended" in json.loads(answers.list[-1][1])["error"]["message"]


def test_who_has_asked_nothing_is_told_nothing(live):
    with connect(live()) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert everything(connection) == b""


@pytest.mark.skipif(shutil.which("nc") is None, reason="netcat is not installed")
@VERSIONS
@STREAMS
def test_netcat(live, engine, version, stream):
    engine.delay = 0.01
    host, port = live().removeprefix("http://").split(":")
    data = subprocess.run(
        ["nc", "-N", host, port], input=ask(version, stream), capture_output=True, check=True, timeout=20
    ).stdout
    assert texts(data) == ["Hello, world."]
