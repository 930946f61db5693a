"""Behind a proxy that has few connections to the server for all its clients: whatever one of them sends, the others get
the answers to their own requests, and what the proxy refuses is not reached."""

import contextlib
import socket
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from roofline.server.app import create_app
from roofline.server.context import Context
from roofline.server.keys import Keys
from roofline.server.limits import Limits
from tests.server.conftest import BytesText, FakeEngine, protocol_of, serving
from tests.server.proxies import KINDS, program, proxy
from tests.server.raw_http import Answers, connect, request, tokenize, told
from tests.server.test_http_forms import CHUNKED, HEAD, JSON, OFFER, READ, REFUSED, SMUGGLED, STREAM, WEBSOCKET, text_of

VICTIMS = 3


# Slow: what has the same program with other settings beside it.
AGAIN = {"nginx", "nginx, HTTP/1.0"}


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=[pytest.mark.slow] * (kind in AGAIN)) for kind in KINDS]
)
def proxied(request, tmp_path_factory) -> Iterator[str]:
    if program(request.param) is None:
        pytest.skip(f"{KINDS[request.param][0]} is not installed")
    keys, engine, limits = Keys(None), FakeEngine(), Limits()
    context = Context(engine=engine, text=BytesText(), name="tiny", created=1, limits=limits, keys=keys)
    folder = tmp_path_factory.mktemp("proxy")
    with (
        serving(create_app(context), http=protocol_of(limits)) as target,
        proxy(request.param, target, folder) as address,
    ):
        yield address


def exchange(connection: socket.socket, raw: bytes) -> list[tuple[int, bytes]]:
    """The first answer to a request on a connection that goes on."""
    connection.sendall(raw)
    data = b""
    while more := connection.recv(65536):
        data += more
        answers = Answers(data)
        if answers.list and answers.whole:
            return answers.list
    return Answers(data).list


def batched(names: Iterable[str], size: int) -> list[list[str]]:
    listed = list(names)
    return [listed[at : at + size] for at in range(0, len(listed), size)]


class Victims:
    """Clients with connections of their own, each of which asks again and again for what is its own."""

    def __init__(self, address: str):
        self.connections = [connect(address) for _ in range(VICTIMS)]
        self.turn = 0

    def check(self) -> None:
        self.turn += 1
        wrong: list[object] = []

        def ask(number: int) -> None:
            mark = f"victim {number} turn {self.turn}"
            answers = exchange(self.connections[number], tokenize(mark))
            if [(status, told(body) if status == 200 else body) for status, body in answers] != [(200, mark)]:
                wrong.append((mark, answers))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(VICTIMS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


@pytest.fixture
def victims(proxied) -> Iterator[Victims]:
    clients = Victims(proxied)
    yield clients
    for connection in clients.connections:
        connection.close()


def attack(address: str, parts: list[bytes]) -> bytes:
    """What comes back within a moment; a proxy may hold the connection open for the rest of a request."""
    data = b""
    with connect(address, timeout=0.2) as connection, contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            connection.sendall(part)
            threading.Event().wait(0.01)
        while more := connection.recv(65536):
            data += more
    return data


def refused_path_reached(data: bytes) -> bool:
    """Whether something of the answer to /stats is there."""
    return b'"pages_total"' in data


def smuggling(offer: bytes, pad: int, smuggled: bytes = SMUGGLED * 3) -> list[bytes]:
    """A request whose body is other ones, behind so many empty lines: wherever a read ends, the next one may begin."""
    body = b"\r\n" * pad + smuggled
    return [HEAD + offer + b"Content-Length: %d\r\n\r\n" % len(body), body]


HALF = b"GET /stats HTTP/1.1\r\nHost: localhost\r\nX: "  # the next request on that connection would be its end
PADS = (0, 4000, 8000, 12_000, 16_000, 24_000, 32_000, 150_000)
ATTACKS = {
    **{name: reads for name, (reads, _) in READ.items() if len(reads) < 9},
    **{name: reads for name, (reads, _) in REFUSED.items()},
    **{f"offer of h2c, {pad}": smuggling(OFFER, pad) for pad in PADS},
    **{f"offer of websocket, {pad}": smuggling(WEBSOCKET, pad) for pad in PADS},
    **{f"half a request, {pad}": smuggling(WEBSOCKET, pad, HALF) for pad in PADS},
    **{f"half a request, h2c, {pad}": smuggling(OFFER, pad, HALF) for pad in PADS},
    "offer of websocket, chunked": [
        HEAD + WEBSOCKET + CHUNKED + b"\r\n",
        b"%x\r\n%s\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED),
    ],
    "request as a trailer": [HEAD + CHUNKED + b"\r\n12\r\n" + JSON + b"\r\n0\r\nX: y\r\n\r\n" + SMUGGLED],
}


def test_whatever_one_client_sends_the_others_get_their_own_answers(proxied, victims):
    victims.check()
    for names in batched(ATTACKS, 16):
        with ThreadPoolExecutor(len(names)) as attackers:
            under_way = [attackers.submit(attack, proxied, ATTACKS[name]) for name in names]
            victims.check()
            reached = [name for name, each in zip(names, under_way, strict=True) if refused_path_reached(each.result())]
        assert not reached
        victims.check()


def test_streams_come_whole_through_a_proxy_while_requests_are_refused(proxied):
    texts: list[str] = []

    def stream() -> None:
        with connect(proxied) as connection:
            connection.sendall(STREAM.replace(b"Host", b"Connection: close\r\nHost", 1))
            answers = Answers(b"".join(iter(lambda: connection.recv(65536), b"")))
        texts.extend(text_of(body) for status, body in answers.list if status == 200)

    threads = [threading.Thread(target=stream) for _ in range(6)]
    for thread in threads:
        thread.start()
    for parts in smuggling(WEBSOCKET, 0), smuggling(OFFER, 20_000), REFUSED["gzip, chunked"][0]:
        attack(proxied, parts)
    for thread in threads:
        thread.join()
    assert texts == ["Hello, world."] * 6


@pytest.mark.parametrize("offer", [b"", OFFER, WEBSOCKET], ids=["none", "h2c", "websocket"])
def test_an_offer_of_another_protocol_keeps_its_body(proxied, offer):
    with connect(proxied) as connection:
        (answer,) = exchange(connection, HEAD + offer + b"Content-Length: %d\r\n\r\n" % len(JSON) + JSON)
        assert (answer[0], told(answer[1])) == (200, "mine")
        refused = exchange(connection, request("GET", "/stats"))
    assert [status for status, _ in refused] == [403]
