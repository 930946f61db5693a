"""Classes of weaknesses that servers of models had, each tested on every route: E, memory that is bounded too late; G,
who may ask; K, errors that tell of our insides. Class I, whose pages the cache gives, is in test_cache_salt.py."""

import asyncio
import gzip
import json
import re

import pytest
from fastapi.routing import APIRoute

from roofline.server.app import ROUTERS, create_app
from roofline.server.limits import Limits
from roofline.server.scopes import OPEN

SECRET = "s3cret-key-of-the-operator"
ROUTES = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]


def path_of(route: APIRoute) -> str:
    """A path that the route has."""
    return re.sub(r"\{\w+:path\}", "tiny", route.path)


CLOSED = sorted({path_of(route) for route in ROUTES if route.endpoint._needed_scope != OPEN})
UPLOADS = ("/v1/files",)  # bounded by another limit: test_batches.py
POSTS = sorted({path_of(route) for route in ROUTES if "POST" in route.methods} - {*UPLOADS})
MORE_THAN_A_FAKE = ("/v1/explain", "/api/show", "/tokenize")  # these need a tokenizer and a template
NO_BODY = (
    "/v1/batches/{batch_id}/cancel",
    "/v1/responses/{name}/cancel",
)  # what is sent there is bounded, and not read
READ = [path for path in POSTS if path not in (*MORE_THAN_A_FAKE, *NO_BODY)]
GENERATE = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"model": "tiny", "prompt": "Hi"},
    "/v1/responses": {"model": "tiny", "input": "Hi"},
    "/v1/messages": {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]},
}
JSON = {"content-type": "application/json"}
LOADING = ("/api/chat", "/api/generate")  # routes of Ollama's that load a model


def request(app, path, headers=(), method="GET", body=()):
    """(status, body, parts of the body that were read) of a request as a server hands it over, whatever its headers."""

    async def run():
        parts, taken, sent = list(body), [], []

        async def receive():
            if not parts:
                await asyncio.Event().wait()
            taken.append(parts.pop(0))
            return {"type": "http.request", "body": taken[-1], "more_body": bool(parts)}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode("latin-1"),
            "root_path": "", "scheme": "http", "query_string": b"", "headers": list(headers),
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        }  # fmt: skip
        async with asyncio.timeout(30):
            await app(scope, receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]), len(taken)

    return asyncio.run(run())


@pytest.mark.parametrize("path", POSTS)
def test_class_e_a_body_is_bounded_while_it_arrives(make_context, path):
    """Whatever it says of its length, and however small its parts are: what is beyond the bound is not read."""
    app = create_app(make_context(limits=Limits(body_bytes=1000)))
    host = (b"host", b"localhost")
    for length in ((), ((b"content-length", b"10"),)):
        status, body, taken = request(app, path, [host, *length], "POST", [b" " * 100] * 500)
        assert (status, taken) == (413, 11)
        assert b"at most 1000 bytes" in body
    status, _, taken = request(app, path, [host, (b"content-length", b"1001")], "POST", [b" " * 100] * 500)
    assert (status, taken) == (413, 0)


@pytest.mark.parametrize("path", READ)
def test_class_e_nothing_is_unpacked(make_context, path):
    """A megabyte of zeros in a kilobyte stays a kilobyte of no JSON."""
    app, packed = create_app(make_context(limits=Limits(body_bytes=4000))), gzip.compress(b" " * 1_000_000)
    assert len(packed) < 4000
    headers = [(b"host", b"localhost"), (b"content-encoding", b"gzip"), (b"content-type", b"application/json")]
    status, body, _ = request(app, path, headers, "POST", [packed])
    assert status == 415
    assert b"none is unpacked here" in body
    assert request(app, path, [*headers[:1], (b"content-encoding", b"identity")], "POST", [b"[]"])[0] == 400


@pytest.mark.parametrize("path", CLOSED)
def test_class_e_headers_are_bounded_before_the_key_is_looked_at(make_context, path):
    app = create_app(make_context(api_key=SECRET))
    many = [(b"host", b"localhost"), *((b"x-%d" % i, b"y" * 100) for i in range(200))]
    assert request(app, path, many)[0] == 431
    assert request(app, path, [(b"host", b"localhost"), (b"authorization", b"Bearer " + b"k" * 20_000)])[0] == 431


TRICKS = [
    [(b"host", b"localhost/health")],
    [(b"host", b"localhost/health?")],
    [(b"host", b"localhost:80/health#")],
    [(b"host", b"localhost@health")],
    [(b"host", b"a b")],
    [(b"host", b"localhost"), (b"host", b"localhost/health")],
    [],
    [(b"host", b"localhost"), (b"x-original-url", b"/health"), (b"x-rewrite-url", b"/health")],
    [(b"host", b"localhost"), (b"x-forwarded-host", b"localhost"), (b"x-forwarded-for", b"127.0.0.1")],
    [(b"host", b"localhost"), (b"x-forwarded-prefix", b"/health"), (b"x-http-method-override", b"OPTIONS")],
    [(b"host", b"localhost"), (b"authorization", b"Bearer"), (b"x-api-key", SECRET.encode())],
    [(b"host", b"localhost"), (b"authorization", b"Bearer x"), (b"authorization", b"Bearer " + SECRET.encode())],
    [(b"host", b"localhost"), (b"cookie", b"key=" + SECRET.encode())],
    [(b"host", b"localhost"), (b"origin", b"http://localhost"), (b"access-control-request-method", b"GET")],
]


@pytest.mark.parametrize("path", [*CLOSED, "/nothing", "/health/", "/health/..", "/health%2f", "/HEALTH", "/;/health"])
def test_class_g_no_header_opens_a_route(make_context, path, engine):
    app = create_app(make_context(api_key=SECRET))
    for headers in TRICKS:
        for method in ("GET", "POST", "OPTIONS", "HEAD"):
            assert request(app, path, headers, method, [b"{}"])[0] in (400, 401), (headers, method)
    assert not engine.submitted


@pytest.mark.parametrize("path", CLOSED)
def test_class_g_keys_are_in_no_answer_and_no_log_line(call, make_context, caplog, path):
    caplog.set_level("DEBUG")
    context = make_context(api_key=SECRET, access_log=True)
    for method in ("GET", "POST"):
        for scheme in ("Bearer", "Basic"):
            for value in (SECRET, f"{SECRET}x"):
                headers = {"authorization": f"{scheme} {value}", "x-api-key": value}
                response = call(method, path, headers=headers, json={"model": value[:3]}, context=context)
                assert SECRET not in response.text + str(response.headers)
    assert SECRET not in caplog.text


INSIDES = re.compile(
    r"0x[0-9a-f]{6,}|Traceback|site-packages|\.py\b|<[a-z_.]+ object|Error\(|asyncio|pydantic|roofline/"
)
NASTY = "</script>\\u0000" + "A" * 4000
BAD_BODIES = [
    b"", b"null", b"[]", b"{", b"\xff\xfe", b'{"model": 5}', b'{"model": "tiny"}', b"1" * 5000, b'"' + b"x" * 5000,
    b'{"model": "tiny", "messages": 5, "prompt": {}}', b'{"a":' * 40 + b"1" + b"}" * 40, b'{"model": NaN}',
    json.dumps({"model": NASTY}).encode(), json.dumps({"model": "tiny", NASTY: 1}).encode(),
    json.dumps({"model": "tiny", "prompt": NASTY * 3, "messages": [{"role": NASTY, "content": NASTY}]}).encode(),
    json.dumps({"model": "tiny", "messages": [{"role": "user"}] * 3000}).encode(),
]  # fmt: skip


@pytest.mark.parametrize("path", READ)
def test_class_k_refusals_are_short_and_tell_nothing_of_our_insides(call, path):
    for body in BAD_BODIES:
        response = call("POST", path, content=body, headers=JSON)
        loads = path in LOADING and body == b'{"model": "tiny"}'  # Ollama's way to have a model loaded
        assert response.status_code == 200 if loads else 400 <= response.status_code < 500, response.text[:200]
        assert len(response.content) <= 8192
        assert not INSIDES.search(response.text), response.text
        assert "A" * 500 not in response.text  # the input is not repeated


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [path for path in GENERATE if path in POSTS])
@pytest.mark.parametrize("at_submit", [True, False])
def test_class_k_what_we_do_wrong_is_told_without_its_cause(call, engine, caplog, path, stream, at_submit):
    cause = "<_io.BytesIO object at 0x7f83f4e3c6d0> in /home/op/model.py"

    async def broken(*_, **__):
        raise ValueError(cause)

    async def breaks(*_):
        raise ValueError(cause)
        yield

    if at_submit:
        engine.submit = broken
    else:
        engine._events = breaks
    response = call("POST", path, json={**GENERATE[path], "stream": stream})
    assert response.status_code == (500 if not stream or at_submit else 200)
    assert "The server made a mistake" in response.text
    assert not INSIDES.search(response.text), response.text
    assert cause in caplog.text  # the operator is told


def test_class_k_unknown_routes_and_methods_are_told_shortly(call):
    routes = (("GET", "/" + "x" * 3000), ("PUT", "/v1/models"), ("X" * 100, "/stats"), ("GET", "/%00%0a%3Cscript%3E"))
    for method, path in routes:
        response = call(method, path)
        assert response.status_code in (404, 405)
        assert len(response.content) < 1000
        assert not INSIDES.search(response.text)
