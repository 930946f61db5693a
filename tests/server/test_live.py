"""Over real sockets: disconnects, slow and oversized senders, the queue's bound, the openai client."""

import asyncio
import contextlib
import json
import socket
import time

import httpx
import openai
import pytest

from roofline.server.limits import Limits
from roofline.server.lingering import MOST_BYTES

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


def eventually(check, seconds=30.0):
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def raw_request(address: str, body: dict) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(content) + content
    )
    return connection


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("queued", [True, False])
def test_disconnect_aborts_at_once(live, engine, stream, queued):
    """Streaming or not, in mid-answer or still waiting: nothing runs on for a client that is gone."""
    engine.delay = 10.0
    if queued:
        engine.gate.clear()
    connection = raw_request(live(), {**CHAT, "stream": stream})
    eventually(lambda: engine.open)
    if stream and not queued:
        assert b"200 OK" in connection.recv(1000)
    connection.close()
    eventually(lambda: not engine.open)
    assert engine.aborted


def test_many_disconnects_leave_nothing(live, engine):
    engine.delay = 10.0
    address = live()
    for _ in range(50):
        connection = raw_request(address, {**CHAT, "stream": True, "n": 2})
        connection.recv(10)
        connection.close()
    eventually(lambda: not engine.open)
    assert len({name for name, _ in engine.aborted}) == 50
    assert httpx.get(f"{address}/stats").json()["queued"] == 0


def test_queue_bound_answers_429_with_retry_after(live, engine):
    engine.gate.clear()
    address = live(limits=Limits(queued=2))
    waiting = [raw_request(address, CHAT) for _ in range(2)]
    eventually(lambda: len(engine.open) == 2)
    refused = httpx.post(f"{address}/v1/chat/completions", json=CHAT)
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.json()["error"]["type"] == "rate_limit_error"
    for connection in waiting:
        connection.close()
    eventually(lambda: not engine.open)


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: loc"])
def test_half_a_header_is_not_waited_for(live, sent):
    host, port = live(limits=Limits(read_seconds=0.2)).removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(sent)
        assert b"408" in connection.recv(100)


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Content-Length: 33\r\n\r\n{"model": "tiny", "prompt": "Hi"}'
)


@pytest.mark.parametrize("before", [b"", GET, POST], ids=["first", "after GET", "after POST"])
@pytest.mark.parametrize(("size", "status"), [(264, b"408"), (265, b"431")])
def test_half_a_header_has_a_bound_in_each_request_of_a_connection(live, before, size, status):
    """64 bytes beyond the bound, for the request line, are waited on in vain; one more is refused at once."""
    seconds = 0.2 if status == b"408" else 20.0
    host, port = live(limits=Limits(header_bytes=200, read_seconds=seconds)).removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(before)
        answer = b""
        while before and not answer.endswith(b"}"):
            answer += connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 200" if before else b"")
        head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "
        connection.sendall(head.ljust(size, b"y"))
        refusal = b""
        while data := connection.recv(4096):  # until the server closes
            refusal += data
        assert refusal.startswith(b"HTTP/1.1 " + status)


def sent_before_cut(connection: socket.socket, size: int = 4096, pause: float = 0.001) -> int:
    for sent in range(0, (64 << 20) // 4096 * size, size):
        try:
            connection.sendall(b"y" * size)
        except OSError:
            return sent
        time.sleep(pause)
    return 64 << 20


def test_endless_header_is_cut(live):
    host, port = live().removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
        assert sent_before_cut(connection) < 1 << 20


LARGE = {
    "length": b"Content-Length: %d\r\n" % (9 << 20),
    "chunked": b"Transfer-Encoding: chunked\r\n",
    "unknown coding": b"Transfer-Encoding: gzip, chunked\r\n",
    "larger than the linger": b"Content-Length: %d\r\n" % (1 << 40),
}
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize("form", list(LARGE)[:3])
def test_who_sends_a_whole_body_reads_that_it_is_refused(live, form):
    """A reset, of what was sent and not read, would take the answer away."""
    body = b"x" * (9 << 20)
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if form == "chunked" else body
    host, port = live().removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(POST + LARGE[form] + b"\r\n" + body)
        answer = b""
        while data := connection.recv(4096):  # until the server closes
            answer += data
    status = b"501" if form == "unknown coding" else b"413"
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert answer.endswith(b"}")


def test_a_refused_body_is_thrown_away_up_to_a_bound(live):
    host, port = live(limits=Limits(read_seconds=30)).removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(POST + LARGE["larger than the linger"] + b"\r\n")
        assert MOST_BYTES <= sent_before_cut(connection, 65536, 0.0) < 2 * MOST_BYTES


def test_a_refused_body_is_thrown_away_for_a_bounded_time(live):
    host, port = live(limits=Limits(read_seconds=0.3)).removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(POST + LARGE["length"] + b"\r\n")
        while connection.recv(4096):
            pass
        assert sent_before_cut(connection, 16, 0.05) < 16 * 20 * 60


def test_half_a_body_is_not_waited_for(live):
    host, port = live(limits=Limits(read_seconds=0.2)).removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 50\r\n\r\n{"
        )
        assert b"408" in connection.recv(100)


@pytest.mark.slow
def test_slow_answer_is_not_cut_by_the_read_timeout(live, engine):
    engine.delay = 0.15  # 14 ids take longer than the timeout of one second
    answer = httpx.post(f"{live()}/v1/chat/completions", json=CHAT, timeout=20).json()
    assert answer["choices"][0]["message"]["content"] == "Hello, world."


def test_openai_client(live):
    client = openai.OpenAI(base_url=f"{live(api_key='k')}/v1", api_key="k", max_retries=0)
    whole = client.chat.completions.create(model="tiny", messages=CHAT["messages"])
    assert whole.choices[0].message.content == "Hello, world."
    again = [*CHAT["messages"], whole.choices[0].message.model_dump(), *CHAT["messages"]]
    assert client.chat.completions.create(model="tiny", messages=again).usage.prompt_tokens > whole.usage.prompt_tokens
    chunks = list(client.chat.completions.create(model="tiny", messages=CHAT["messages"], stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hello, world."
    assert client.completions.create(model="tiny", prompt="Hi", n=2).choices[1].text == "Hello, world."
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=CHAT["messages"], n=99)
    assert refused.value.param == "n"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=client.base_url, api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=CHAT["messages"])


def test_many_at_once(live, engine):
    engine.delay = 0.002
    address = live()

    async def run():
        async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=64)) as client:
            posts = [client.post(f"{address}/v1/chat/completions", json=CHAT) for _ in range(64)]
            return await asyncio.gather(*posts)

    answers = asyncio.run(run())
    assert {a.json()["choices"][0]["message"]["content"] for a in answers} == {"Hello, world."}
    assert not engine.open


def sent_raw(address: str, raw: bytes) -> bytes:
    """All that the server answers before it closes the connection."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(raw)
        return b"".join(iter(lambda: connection.recv(4096), b""))


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        (b"hello\r\n\r\n", b"400 Bad Request", "invalid_http"),
        (b"GET /health HTTP/1.1\r\nHost: loc", b"408 Request Timeout", "request_timeout"),
        (b"GET /health HTTP/1.1\r\nX: " + b"y" * 70_000, b"431 Request Header", "headers_too_large"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: a\r\nConnection: close\r\n\r\n", b"400 ", "invalid_header"),
    ],
)
def test_what_is_refused_before_any_route_is_told_in_json(live, raw, status, code):
    seconds = 0.3 if status.startswith(b"408") else 5.0
    head, _, body = sent_raw(live(limits=Limits(read_seconds=seconds)), raw).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status)
    assert b"content-type: application/json" in head
    assert json.loads(body)["error"]["code"] == code


def test_a_dripping_body_ends_at_its_deadline(live):
    host, port = live(limits=Limits(body_seconds=0.2)).removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n")
        assert sent_before_cut(connection, 1, 0.02) < 200
        with contextlib.suppress(ConnectionResetError):
            assert b"did not arrive within 0.2 seconds" in connection.recv(4096)


def test_a_client_that_drops_its_body_is_no_error(live, caplog):
    caplog.set_level("DEBUG")
    host, port = live().removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{")
        time.sleep(0.1)
    eventually(lambda: "a client left before its request was complete" in caplog.text)
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")]
    assert "Traceback" not in caplog.text


def test_a_stream_has_its_status_before_its_first_token(live, engine):
    engine.gate.clear()
    connection = raw_request(live(), {**CHAT, "stream": True})
    head = connection.recv(4096)
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"text/event-stream" in head
    connection.settimeout(0.2)
    with pytest.raises(TimeoutError):
        connection.recv(1)
    connection.close()
    eventually(lambda: not engine.open)
