"""Forms of requests that two programs may read differently (RFC 9112, section 11), on a live socket: each is answered
as its only reading, or refused and the connection closed."""

import contextlib
import json
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from roofline.server.app import create_app
from roofline.server.context import Context
from roofline.server.keys import Keys
from roofline.server.limits import Limits
from tests.server.conftest import BytesText, FakeEngine, protocol_of, serving
from tests.server.raw_http import Answers, connect, request, sent, tokenize, told
from tests.server.test_live import eventually

LAST = tokenize("last", "Connection: close")
JSON = b'{"prompt": "mine"}'
SMUGGLED = request("GET", "/stats")
HEAD = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: 18\r\n"
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"
WEBSOCKET = b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"9\r\n" + JSON[:9] + b"\r\n9;a=b\r\n" + JSON[9:] + b"\r\n0\r\n\r\n"
# Fields that would say where a message ends and how its connection goes on, were they headers.
MEANING = (
    b"Content-Length: 5\r\nContent-Length: x\r\nTransfer-Encoding: chunked\r\ntransfer-encoding: gzip\r\n"
    b"Connection: close\r\nConnection: upgrade\r\nUpgrade: h2c\r\nExpect: 100-continue\r\nHost: evil\r\n"
)


def get(line: bytes) -> list[bytes]:
    return [line + b"\r\nHost: localhost\r\n\r\n"]


def head(*lines: bytes) -> bytes:
    return HEAD + b"".join(lines) + b"\r\n"


# Answered, and the connection goes on: what is sent, and how it is answered.
READ = {
    "plain": ([head(LENGTH) + JSON], ["mine"]),
    "in single bytes": ([bytes([byte]) for byte in head(LENGTH) + JSON], ["mine"]),
    "chunked": ([head(CHUNKED) + CHUNKS], ["mine"]),
    "chunked, in two reads": ([head(CHUNKED), CHUNKS], ["mine"]),
    "h2c offered": ([head(OFFER, LENGTH) + JSON], ["mine"]),
    "h2c offered, body later": ([head(OFFER, LENGTH), JSON], ["mine"]),
    "h2c offered, body in parts": ([head(OFFER, LENGTH) + JSON[:5], JSON[5:]], ["mine"]),
    "h2c offered, chunked": ([head(OFFER, CHUNKED) + CHUNKS], ["mine"]),
    "h2c offered, chunked later": ([head(OFFER, CHUNKED), CHUNKS], ["mine"]),
    "h2c offered thrice": ([(head(OFFER, LENGTH) + JSON) * 3], ["mine"] * 3),
    "websocket, body later": ([head(WEBSOCKET, LENGTH), JSON], ["mine"]),
    "anything offered": ([head(b"Connection: upgrade\r\nUpgrade: any/1\r\n", LENGTH) + JSON], ["mine"]),
    "h2c without a body": ([request("GET", "/limits", "Connection: Upgrade", "Upgrade: h2c")], [200]),
    "a request as an offer's body": (
        [head(OFFER, b"Content-Length: %d\r\n" % len(SMUGGLED)), SMUGGLED], [400],
    ),
    "a request as an offer's chunk": (
        [head(OFFER, CHUNKED), b"%x\r\n%s\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED)], [400],
    ),
    "pipelined": ([tokenize("one") + tokenize("two") + tokenize("three")], ["one", "two", "three"]),
    "pipelined over reads": ([tokenize("one") + tokenize("two")[:40], tokenize("two")[40:]], ["one", "two"]),
    "pipelined behind chunks": ([head(CHUNKED) + CHUNKS + tokenize("two")], ["mine", "two"]),
    "trailers": ([head(CHUNKED) + CHUNKS[:-2] + b"Host: evil\r\nX: y\r\n\r\n"], ["mine"]),
    "trailers later": ([head(CHUNKED) + CHUNKS[:-5], b"0\r\nHost: evil\r\n", b"X: y\r\n\r\n"], ["mine"]),
    "trailers before the next": ([head(CHUNKED) + CHUNKS[:-2] + b"Host: evil\r\n\r\n" + tokenize("two")],
                                 ["mine", "two"]),
    "trailers of a message's meaning": (
        [head(CHUNKED) + CHUNKS[:-2] + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n"
         b"Upgrade: h2c\r\n\r\n" + tokenize("two")], ["mine", "two"],
    ),
    "trailers of a message's meaning, all": ([head(CHUNKED) + CHUNKS[:-2] + MEANING + b"\r\n" + tokenize("two")],
                                        ["mine", "two"]),
    "trailers of a message's meaning, all, in single bytes": (
        [bytes([byte]) for byte in head(CHUNKED) + CHUNKS[:-2] + MEANING + b"\r\n" + tokenize("two")], ["mine", "two"],
    ),
    "trailers of a message's meaning, all, h2c offered": (
        [head(OFFER, CHUNKED) + CHUNKS[:-2] + MEANING + b"\r\n" + tokenize("two")], ["mine", "two"],
    ),
    "zeros before a chunk's size": ([head(CHUNKED) + b"00012\r\n" + JSON + b"\r\n000\r\n\r\n"], ["mine"]),
    "empty lines before": ([b"\r\n\r\n" + tokenize("one")], ["one"]),
    "absolute target": (get(b"GET http://localhost/limits HTTP/1.1"), [200]),
    "absolute target, large letters": (get(b"GET HTTP://LocalHost/limits HTTP/1.1"), [200]),
    "a target that has another in its query": (get(b"GET /limits?x=http://evil/ HTTP/1.1"), [200]),
}  # fmt: skip
# Refused, and the connection closed: what is sent, and the status.
REFUSED = {
    "two hosts": ([request("GET", "/limits", "Host: other")], 400),
    "length and chunked": ([head(LENGTH, CHUNKED) + CHUNKS], 400),
    "chunked and length": ([head(CHUNKED, LENGTH) + CHUNKS], 400),
    "length and chunked, offered": ([head(OFFER, LENGTH, CHUNKED) + CHUNKS], 400),
    "two lengths": ([head(LENGTH, LENGTH) + JSON], 400),
    "two lengths that differ": ([head(LENGTH, b"Content-Length: 0\r\n") + JSON], 400),
    "two lengths that differ, offered": ([head(OFFER, LENGTH, b"Content-Length: 0\r\n") + JSON], 400),
    "lengths as a list": ([head(b"Content-Length: 18, 18\r\n") + JSON], 400),
    "signed length": ([head(b"Content-Length: +18\r\n") + JSON], 400),
    "hexadecimal length": ([head(b"Content-Length: 0x12\r\n") + JSON], 400),
    "folded header": ([head(LENGTH, b"X: a\r\n b\r\n") + JSON], 400),
    "folded coding": ([head(b"Transfer-Encoding:\r\n chunked\r\n") + CHUNKS], 400),
    "bare LF": ([head(LENGTH).replace(b"\r\n", b"\n") + JSON], 400),
    "bare LF at a header": ([head(LENGTH, b"X: a\nY: b\r\n") + JSON], 400),
    "bare CR at a header": ([head(LENGTH, b"X: a\rY: b\r\n") + JSON], 400),
    "bare LF at a chunk": ([head(CHUNKED) + b"12\n" + JSON + b"\r\n0\r\n\r\n"], 400),
    "no line end at a chunk": ([head(CHUNKED) + b"12\r\n" + JSON + b"0\r\n\r\n"], 400),
    "chunk's size with 0x": ([head(CHUNKED) + b"0x12\r\n" + JSON + b"\r\n0\r\n\r\n"], 400),
    "chunk's size with a space": ([head(CHUNKED) + b"12 \r\n" + JSON + b"\r\n0\r\n\r\n"], 400),
    "chunk's size too large": ([head(CHUNKED) + b"1" * 17 + b"\r\n" + JSON], 400),
    "line end in a chunk's extension": ([head(CHUNKED) + b'12;a="\n"\r\n' + JSON + b"\r\n0\r\n\r\n"], 400),
    "negative chunk's size": ([head(CHUNKED) + b"-5\r\n" + JSON + b"\r\n0\r\n\r\n"], 400),
    "no chunk's size": ([head(CHUNKED) + b"\r\n" + JSON + b"\r\n0\r\n\r\n"], 400),
    "bare LF at a trailer": ([head(CHUNKED) + CHUNKS[:-2] + b"X: y\n\r\n"], 400),
    "bare LF behind a trailer": ([head(CHUNKED) + CHUNKS[:-2] + b"X: y\r\n\n"], 400),
    "bare CR in a trailer": ([head(CHUNKED) + CHUNKS[:-2] + b"X: y\rZ: y\r\n\r\n"], 400),
    "bare LF behind the last chunk": ([head(CHUNKED) + CHUNKS[:-2] + b"\n"], 400),
    "folded trailer": ([head(CHUNKED) + CHUNKS[:-2] + b"X: y\r\n z\r\n\r\n"], 400),
    "NUL in a trailer": ([head(CHUNKED) + CHUNKS[:-2] + b"X: y\0z\r\n\r\n"], 400),
    "space before the colon of a trailer": ([head(CHUNKED) + CHUNKS[:-2] + b"X : y\r\n\r\n"], 400),
    "trailer without a name": ([head(CHUNKED) + CHUNKS[:-2] + b": y\r\n\r\n"], 400),
    "trailer without a colon": ([head(CHUNKED) + CHUNKS[:-2] + b"GET / HTTP/1.1\r\n\r\n"], 400),
    "gzip, chunked": ([head(b"Transfer-Encoding: gzip, chunked\r\n") + CHUNKS], 501),
    "chunked twice": ([head(b"Transfer-Encoding: chunked, chunked\r\n") + CHUNKS], 400),
    "gzip alone": ([head(b"Transfer-Encoding: gzip\r\n") + JSON], 501),
    "chunked, identity": ([head(b"Transfer-Encoding: chunked, identity\r\n") + CHUNKS], 400),
    "xchunked": ([head(b"Transfer-Encoding: xchunked\r\n") + CHUNKS], 501),
    "gzip, chunked, offered": ([head(OFFER, b"Transfer-Encoding: gzip, chunked\r\n") + CHUNKS], 501),
    "coding in two headers": ([head(b"Transfer-Encoding: gzip\r\n", CHUNKED) + CHUNKS], 501),
    "coding of HTTP/1.0": ([head(CHUNKED).replace(b"/1.1", b"/1.0") + CHUNKS], 400),
    "HTTP/2.0": (get(b"GET /health HTTP/2.0"), 505),
    "HTTP/0.9": (get(b"GET /health HTTP/0.9"), 505),
    "HTTP/1.2": (get(b"GET /health HTTP/1.2"), 505),
    "HTTP/1.9": (get(b"GET /health HTTP/1.9"), 505),
    "HTTP/3.0": (get(b"GET /health HTTP/3.0"), 505),
    "HTTP/1.10": (get(b"GET /health HTTP/1.10"), 400),
    "HTTP/2": (get(b"GET /health HTTP/2"), 400),
    "no version": ([b"GET /health\r\n\r\n"], 505),
    "RTSP": (get(b"GET /health RTSP/1.0"), 400),
    "preface of HTTP/2": ([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], 505),
    "preface of HTTP/2 with another version": (get(b"PRI * HTTP/1.1"), 400),
    "fragment": (get(b"GET /health#x HTTP/1.1"), 400),
    "two spaces before the target": (get(b"GET  /health HTTP/1.1"), 400),
    "two spaces behind the target": (get(b"GET /health  HTTP/1.1"), 400),
    "space behind the version": (get(b"GET /health HTTP/1.1 "), 400),
    "space before the method": (get(b" GET /health HTTP/1.1"), 400),
    "tab in the request line": (get(b"GET\t/health HTTP/1.1"), 400),
    "space in the target": (get(b"GET /health x HTTP/1.1"), 400),
    "space before the colon": ([head(b"Content-Length : 18\r\n") + JSON], 400),
    "NUL in a header": ([head(LENGTH, b"X: a\0b\r\n") + JSON], 400),
    "NUL in a name": ([head(LENGTH, b"X\0: a\r\n") + JSON], 400),
    "NUL in the target": (get(b"GET /health\0 HTTP/1.1"), 400),
    "header without a name": ([head(LENGTH, b": a\r\n") + JSON], 400),
    "target of another host": (get(b"GET http://evil/limits HTTP/1.1"), 400),
    "target of another port": (get(b"GET http://localhost:1/limits HTTP/1.1"), 400),
    "target with a user": (get(b"GET http://evil@localhost/limits HTTP/1.1"), 400),
    "target of another scheme": (get(b"GET ftp://localhost/limits HTTP/1.1"), 400),
    "target of another host, HTTP/1.0": (get(b"GET http://evil/limits HTTP/1.0"), 400),
    "target of another host, HTTP/1.0 without Host": ([b"GET http://evil/limits HTTP/1.0\r\n\r\n"], 403),
    "target with a user, HTTP/1.0 without Host": ([b"GET http://a@localhost/limits HTTP/1.0\r\n\r\n"], 400),
    "no host": ([b"GET /health HTTP/1.1\r\n\r\n"], 400),
    "CONNECT": (get(b"CONNECT localhost:80 HTTP/1.1"), 405),
    "TLS": ([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64)], 400),
}  # fmt: skip


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A server for all forms."""
    keys, engine, limits = Keys(None), FakeEngine(), Limits()
    context = Context(engine=engine, text=BytesText(), name="tiny", created=1, limits=limits, keys=keys)
    with serving(create_app(context), http=protocol_of(limits)) as started:
        yield started


def outcomes(answers: Answers) -> list:
    """Of each answer the prompt that it is to, else its status."""
    return [told(body) if body.startswith(b'{"count":') else status for status, body in answers.list]


@pytest.mark.parametrize("name", READ)
def test_a_form_with_one_reading_is_answered_and_the_connection_goes_on(address, name):
    reads, expected = READ[name]
    answers = Answers(sent(address, [*reads, LAST], pause=0.0 if len(reads) > 9 else 0.01))
    assert outcomes(answers) == [*expected, "last"]
    assert answers.whole


CAUSES = {
    "length and chunked": "Transfer-Encoding can't be present with Content-Length",
    "two lengths": "two headers Content-Length",
    "signed length": "Invalid character in Content-Length",
    "chunk's size with 0x": "Invalid character in chunk size",
    "bare LF at a header": "Missing expected CR after header value",
    "folded trailer": "Invalid header token",
    "lower-case method": "methods have capital letters alone",
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_refusal_names_its_cause(address, name):
    reads = get(b"get /health HTTP/1.1") if name == "lower-case method" else REFUSED[name][0]
    ((status, body),) = Answers(sent(address, reads)).list
    assert status == 400
    assert CAUSES[name] in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_form_with_two_readings_is_refused_and_the_connection_closed(address, name):
    reads, status = REFUSED[name]
    answers = Answers(sent(address, [*reads, LAST], pause=0.0))
    assert outcomes(answers) == [status]
    assert answers.whole
    assert answers.heads[0]["connection"] == "close"
    assert "error" in json.loads(answers.list[0][1])


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_behind_other_requests_comes_behind_their_answers(address, name):
    reads, status = REFUSED[name]
    answers = Answers(sent(address, [tokenize("one") + tokenize("two") + reads[0], LAST]))
    assert outcomes(answers) == ["one", "two", status]
    assert answers.whole


@pytest.mark.parametrize("later", [False, True], ids=["one read", "reads apart"])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_request_line_is_not_taken_for_that_of_another_request(address, before, later):
    """The right line stands before the wrong one, in its body, and in the body before it."""
    right = get(b"GET /tokenize HTTP/1.1")[0]
    other = request("POST", "/tokenize", body=right * 2)
    first = other + tokenize("x" * 300) + other + tokenize("y" * 300)[:-150]
    wrong = request("POST", "/tokenize", body=right * 2).replace(b"POST", b"GET").replace(b" /", b"  /", 1)
    parts = [first, tokenize("y" * 300)[-150:] + right * before + other + wrong[:30], wrong[30:] + LAST]
    answers = outcomes(Answers(sent(address, parts if later else [b"".join(parts)])))
    assert answers == [400, "x" * 300, 400, "y" * 300, *[405] * before, 400, 400]


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
STREAM = request("POST", "/v1/chat/completions", body=json.dumps(CHAT).encode())


def text_of(body: bytes) -> str:
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.parametrize(
    ("behind", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: loc", 408),
        (b"GET  /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"\0", 400),
        (b"GET /health HTTP/1.1\r\nX: " + b"y" * 20_000, 431),
    ],
    ids=["half a request", "two spaces", "NUL", "large"],
)
def test_nothing_is_written_into_a_stream(live, engine, behind, status):
    """The stream takes longer than half a request may."""
    engine.delay = 0.02
    address = live(limits=Limits(read_seconds=0.2))
    answers = Answers(sent(address, [STREAM, behind]))
    assert [each for each, _ in answers.list] == [200, status]
    assert text_of(answers.list[0][1]) == "Hello, world."
    assert answers.list[0][1].endswith(b"data: [DONE]\n\n")
    assert answers.whole


def test_a_request_behind_a_stream_is_answered_after_it(live, engine):
    engine.delay = 0.02
    half = len(LAST) // 2
    answers = Answers(sent(live(limits=Limits(read_seconds=0.2)), [STREAM, LAST[:half], LAST[half:]]))
    assert text_of(answers.list[0][1]) == "Hello, world."
    assert outcomes(answers)[1] == "last"


@pytest.mark.parametrize("apart", [False, True], ids=["one read", "reads apart"])
@pytest.mark.parametrize("trailer", [b"Authorization: Bearer secret\r\n", b"X-Api-Key: secret\r\n"])
def test_a_trailer_gives_no_key(live, trailer, apart):
    parts = [head(CHUNKED) + CHUNKS[:-5], b"0\r\n" + trailer, b"\r\n", LAST]
    answers = Answers(sent(live(api_key="secret"), parts if apart else [b"".join(parts)]))
    assert [status for status, _ in answers.list] == [401, 401]


@pytest.mark.parametrize("in_a_read", [1, 7, 1 << 20])
@pytest.mark.parametrize(("size", "status"), [(264, 200), (265, 431)])
def test_trailers_have_the_bound_of_headers(live, size, status, in_a_read):
    trailers = b"X: ".ljust(100, b"y") + b"\r\nX: "
    trailers = trailers.ljust(size - 4, b"y") + b"\r\n\r\n"
    rest = CHUNKS[:-2] + trailers + LAST
    reads = [rest[at : at + in_a_read] for at in range(0, len(rest), in_a_read)]
    answers = Answers(sent(live(limits=Limits(header_bytes=200)), [head(CHUNKED), *reads], pause=0.0))
    assert outcomes(answers) == (["mine", "last"] if status == 200 else [431])
    assert answers.whole


@pytest.mark.parametrize("in_a_read", [7, 1 << 20])
@pytest.mark.parametrize(("size", "status"), [(264, 200), (265, 431)])
def test_a_head_has_its_bound_however_it_is_read(live, size, status, in_a_read):
    line, headers = b"GET /limits?", b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    whole = line.ljust(size - len(headers), b"x") + headers
    reads = [whole[at : at + in_a_read] for at in range(0, len(whole), in_a_read)]
    answers = Answers(sent(live(limits=Limits(header_bytes=200)), reads, pause=0.0))
    assert [each for each, _ in answers.list] == [status]


def test_the_line_of_a_chunk_has_the_bound_of_headers(live):
    line = b"12;x=".ljust(300, b"y") + b"\r\n"
    reads = [head(CHUNKED), line + JSON + b"\r\n0\r\n\r\n", LAST]
    assert outcomes(Answers(sent(live(limits=Limits(header_bytes=200)), reads))) == [431]


@pytest.mark.parametrize("reads", [1, 2])
def test_a_megabyte_of_trailers_has_one_answer(live, reads):
    lines = b"".join(b"X-%d: %s\r\n" % (number, b"y" * 1000) for number in range(1000))
    parts = [head(CHUNKED) + CHUNKS[:-2], lines + b"\r\n"]
    answers = Answers(sent(live(), parts if reads == 2 else [b"".join(parts)]))
    assert [status for status, _ in answers.list] == [431]


def test_a_body_that_is_never_read_closes_its_connection_in_time(live):
    """The request is answered before its body is there, and the body never comes."""
    address = live(limits=Limits(read_seconds=0.3))
    answers = Answers(sent(address, [request("POST", "/nowhere", "Content-Length: 50"), b"x"]))
    assert [status for status, _ in answers.list] == [404]


def test_a_body_behind_its_answer_does_not_end_a_connection(live):
    late = b"x" * 50
    parts = [request("POST", "/nowhere", "Content-Length: 50"), late[:20], late[20:] + LAST]
    assert outcomes(Answers(sent(live(), parts))) == [404, "last"]


def test_requests_ahead_of_their_answers_wait_in_the_socket(live, engine):
    """A client that sends on without reading is not read either."""
    engine.gate.clear()
    with connect(live(limits=Limits())) as connection:
        connection.sendall(STREAM)
        connection.settimeout(0.2)
        size = 0
        with contextlib.suppress(TimeoutError):
            while size < 64 << 20:
                size += connection.send(SMUGGLED * 1000)
    engine.gate.set()
    assert size < 32 << 20


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_stream_to_http_1_0_has_no_transfer_coding(address, version):
    data = sent(
        address, [STREAM.replace(b"/1.1", f"/{version}".encode(), 1).replace(b"Host", b"Connection: close\r\nHost")]
    )
    top, _, body = data.partition(b"\r\n\r\n")
    assert (b"transfer-encoding: chunked" in top.lower()) == (version == "1.1")
    assert b"connection: close" in top.lower()
    if version == "1.0":
        assert text_of(body) == "Hello, world."
        assert body.endswith(b"data: [DONE]\n\n")


def test_http_1_0_without_a_host_is_answered(address):
    """Clients of HTTP/1.0 need not send one; browsers do."""
    top = sent(address, [b"GET /limits HTTP/1.0\r\n\r\n"])
    assert top.startswith(b"HTTP/1.1 200 ")
    for host in b"evil.example", b"":
        refused = sent(address, [b"GET /limits HTTP/1.0\r\nHost: " + host + b"\r\n\r\n"])
        assert refused.startswith(b"HTTP/1.1 403 ")
    assert sent(address, [b"GET http://localhost/limits HTTP/1.0\r\n\r\n"]).startswith(b"HTTP/1.1 200 ")


def test_http_1_0_is_kept_alive_where_it_asks_for_it(address):
    """As long as answers have their length; a stream, which has none, ends the connection."""

    def old(raw: bytes, *lines: bytes) -> bytes:
        return raw.replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n" + b"".join(line + b"\r\n" for line in lines), 1)

    keep = b"Connection: Keep-Alive"
    answers = Answers(sent(address, [old(tokenize("one"), keep), old(tokenize("two"), keep) + old(tokenize("three"))]))
    assert outcomes(answers) == ["one", "two", "three"]
    assert [answer["connection"] for answer in answers.heads] == ["keep-alive", "keep-alive", "close"]
    top, _, body = sent(address, [old(STREAM, keep) + tokenize("two")]).partition(b"\r\n\r\n")
    assert b"connection: close" in top
    assert b"keep-alive" not in top
    assert body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("path", ["/health", "/limits", "/nowhere", "/"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_answers_to_http_1_0_have_their_length(address, path, method):
    data = sent(address, [f"{method} {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode()])
    top, _, body = data.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in top.lower()
    assert f"content-length: {len(body)}".encode() in top.lower() or method == "HEAD"


def test_a_client_that_reads_nothing_is_cut(live):
    """Its answers are larger than what the sockets hold; the time it has begins when they are full."""
    address = live(limits=Limits(unread_seconds=0.3))
    with connect(address, received_bytes=4096) as connection:
        connection.sendall(request("GET", "/page/style.css") * 400)
        gone = select.poll()
        gone.register(connection, select.POLLHUP)
        assert gone.poll(30_000), "it is still connected"


def peer_states(connection: socket.socket) -> list[str]:
    """States of the other end of a connection of this machine, as the kernel numbers them; [] where it has none."""
    client, server = (f":{name[1]:04X}" for name in (connection.getsockname(), connection.getpeername()))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [row[3] for row in rows if row[1].endswith(server) and row[2].endswith(client)]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="there is no table of connections")
def test_what_a_closed_connection_left_in_the_kernel_is_given_up(live):
    """Nothing waits in the server: all of the answer lies in the kernel, which would keep it as long as the client
    acknowledges probes of its shut window."""
    address, closed = live(limits=Limits(unread_seconds=0.3)), "04"
    with connect(address, received_bytes=2048) as connection:
        connection.sendall(request("GET", "/openapi.json", "Connection: close"))
        eventually(lambda: peer_states(connection) == [closed], 20)
        eventually(lambda: not peer_states(connection), 30)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="there is no table of connections")
def test_what_a_closed_connection_left_in_the_kernel_is_read_in_time(live):
    address = live(limits=Limits(unread_seconds=30.0))
    with connect(address, received_bytes=2048) as connection:
        connection.sendall(request("GET", "/openapi.json", "Connection: close"))
        eventually(lambda: peer_states(connection) == ["04"], 20)
        data = b""
        while more := connection.recv(1 << 20):
            data += more
    ((status, body),) = Answers(data).list
    assert status == 200
    assert json.loads(body)["openapi"]


def test_a_client_that_reads_slowly_is_not_cut(live):
    address = live(limits=Limits(unread_seconds=1.0))
    with connect(address, received_bytes=65536) as connection:
        connection.sendall(request("GET", "/page/style.css") * 300 + request("GET", "/health", "Connection: close"))
        data = b""
        while more := connection.recv(1 << 20):
            data += more
            time.sleep(0.001)
        assert [status for status, _ in Answers(data).list] == [200] * 301


def test_a_chunk_s_line_and_trailers_are_refused_by_the_limit_that_is_listed(live):
    address = live(limits=Limits())
    for late in (b"1;" + b"y" * 20_000, b"0\r\nX: " + b"y" * 20_000):
        ((status, body),) = Answers(sent(address, [head(CHUNKED), late])).list
        assert status == 431
        assert f"larger than {Limits().header_bytes} bytes" in json.loads(body)["error"]["message"]
