"""How what a client sends is cut into reads makes no difference; h11 reads what is answered in the same way."""

import asyncio
import json
import random

import h11
import pytest
import uvicorn
from uvicorn.server import ServerState

from roofline.server.limits import Limits
from tests.server.conftest import protocol_of
from tests.server.raw_http import Answers
from tests.server.test_http_forms import LAST, READ, REFUSED

FORMS = {name: (b"".join(reads), name in READ) for name, (reads, _) in {**READ, **REFUSED}.items()}


class Sent(asyncio.Transport):
    """A connection to nobody, which keeps what is sent."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.data, self.paused, self.closed, self.ended = b"", False, False, False

    def write(self, data):
        assert not self.ended, "asyncio's would raise"
        self.data += b"" if self.closed else data

    def close(self):
        self.closed = True

    def can_write_eof(self):
        return True

    def write_eof(self):
        self.ended = True

    def is_closing(self):
        return self.closed

    def pause_reading(self):
        self.paused = True

    def resume_reading(self):
        self.paused = False

    def get_write_buffer_size(self):
        return 0


async def echo(scope, receive, send):
    """Answers with what was read of a request."""
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message["more_body"]:
            break
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    content = json.dumps([scope["method"], target.decode(), body.decode()]).encode()
    headers = [(b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


@pytest.fixture(scope="module")
def config() -> uvicorn.Config:
    made = uvicorn.Config(echo, lifespan="off", log_config=None, access_log=False)
    made.load()
    return made


async def answered(config: uvicorn.Config, parts: list[bytes]) -> list:
    """What each request was read as, or the status that it was refused with."""
    protocol, transport = protocol_of(Limits())(config, ServerState(), {}), Sent()
    protocol.connection_made(transport)
    for part in parts:
        while transport.paused and not transport.closed:
            await asyncio.sleep(0)
        if not transport.closed:
            protocol.data_received(part)
            await asyncio.sleep(0)
    for _ in range(50):
        await asyncio.sleep(0)
    protocol.connection_lost(None)
    answers = Answers(transport.data)
    assert answers.whole
    return [json.loads(body) if status == 200 else status for status, body in answers.list]


def by_h11(raw: bytes) -> list:
    connection, requests = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20), []
    connection.receive_data(raw)
    while not isinstance(event := connection.next_event(), type(h11.NEED_DATA)) and event is not h11.PAUSED:
        if isinstance(event, h11.Request):
            requests.append([event.method.decode(), event.target.decode(), ""])
        elif isinstance(event, h11.Data):
            requests[-1][2] += event.data.decode()
        elif isinstance(event, h11.EndOfMessage):
            connection.send(h11.Response(status_code=404, headers=[("Content-Length", "0")]))
            connection.send(h11.EndOfMessage())
            if connection.our_state is h11.MUST_CLOSE:
                break
            connection.start_next_cycle()
    return requests


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_read_the_same_however_it_is_cut(config, name):
    raw, generator = FORMS[name][0] + LAST, random.Random(name)
    expected = asyncio.run(answered(config, [raw]))
    assert asyncio.run(answered(config, [raw[at : at + 1] for at in range(len(raw))])) == expected
    for _ in range(4):
        cuts = sorted(generator.sample(range(len(raw)), 3))
        parts = [raw[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
        assert asyncio.run(answered(config, parts)) == expected, cuts


# h11 takes no empty lines before a request, and refuses trailers whose values would be wrong in headers.
NOT_TO_H11 = ("empty lines before", "trailers of a message's meaning, all")


@pytest.mark.parametrize("name", [name for name in READ if not name.startswith(NOT_TO_H11)])
def test_h11_reads_what_is_answered_in_the_same_way(config, name):
    raw = FORMS[name][0] + LAST
    read = asyncio.run(answered(config, [raw]))
    expected = [
        [method, "/" + target.split("/", 3)[3] if "://" in target.split("?")[0] else target, body]
        for method, target, body in by_h11(raw)
    ]
    assert read == expected
