"""Pages of other sites: none may read an answer unless the operator names its origin."""

import pytest

from roofline.common.errors import ConfigError
from roofline.server.options import ServeOptions

ORIGIN, OTHER = "https://chat.example.org", "https://evil.example"
ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def context(make_context):
    return make_context(api_key="k", allowed_origins=frozenset({ORIGIN}))


def names(response) -> set[str]:
    return {name for name in response.headers if name.startswith("access-control")}


@pytest.mark.parametrize("key", [None, "k"])
def test_no_page_may_read_an_answer_by_default(call, make_context, key):
    context = make_context(api_key=key)
    for method, path in (("OPTIONS", "/v1/chat/completions"), ("GET", "/health"), ("GET", "/stats"), ("GET", "/x")):
        for origin in (ORIGIN, "null", "http://127.0.0.1", "*"):
            response = call(method, path, headers={"origin": origin, **ASKS}, context=context)
            assert not names(response)
            assert "vary" not in response.headers
            assert method != "OPTIONS" or response.status_code in (401, 405)


def test_a_preflight_of_an_allowed_origin_needs_no_key(call, context, engine):
    response = call("OPTIONS", "/v1/chat/completions", headers={"origin": ORIGIN, **ASKS}, context=context)
    assert (response.status_code, response.content) == (204, b"")
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert response.headers["vary"] == "Origin"
    assert "authorization" in response.headers["access-control-allow-headers"]
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in response.headers


@pytest.mark.parametrize(
    "origin", [OTHER, f"{ORIGIN}.evil.example", f"{ORIGIN}:8443", "http://chat.example.org", "null", "", ORIGIN.upper()]
)
def test_another_origin_is_as_if_none_were_allowed(call, context, origin):
    for method, path, status in (
        ("OPTIONS", "/v1/chat/completions", 401),
        ("GET", "/stats", 401),
        ("GET", "/health", 200),
    ):
        response = call(method, path, headers={"origin": origin, **ASKS}, context=context)
        assert response.status_code == status
        assert not names(response)
        assert response.headers["vary"] == "Origin"


def test_answers_and_errors_can_be_read_by_the_page(call, context):
    headers = {"origin": ORIGIN, "authorization": "Bearer k"}
    for response, status in (
        (call("POST", "/v1/chat/completions", headers=headers, json=CHAT, context=context), 200),
        (call("POST", "/v1/chat/completions", headers=headers, json={**CHAT, "stream": True}, context=context), 200),
        (call("POST", "/v1/chat/completions", headers=headers, json={**CHAT, "n": 99}, context=context), 400),
        (call("POST", "/v1/chat/completions", headers={"origin": ORIGIN}, json=CHAT, context=context), 401),
        (call("GET", "/nothing", headers=headers, context=context), 404),
    ):
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert response.headers["access-control-expose-headers"] == "retry-after, x-request-id"
        assert response.headers["vary"] == "Origin"
        assert "access-control-allow-credentials" not in response.headers


def test_options_without_the_question_is_no_preflight(call, context):
    assert call("OPTIONS", "/health", headers={"origin": ORIGIN}, context=context).status_code == 405


def test_origins_are_named_exactly():
    for origin in (
        "*",
        "null",
        "",
        "chat.example.org",
        f"{ORIGIN}/",
        f"{ORIGIN}/x",
        "https://*.example.org",
        "HTTPS://A",
    ):
        with pytest.raises(ConfigError, match="is no origin: give it as https://name"):
            ServeOptions(allow_origin=[ORIGIN, origin])
    good = [ORIGIN, "http://localhost:3000", "http://[::1]:3000"]
    assert ServeOptions(allow_origin=good).allow_origin == good


# What OpenAI's and Anthropic's packages send from a browser.
SENT = (
    "anthropic-beta,anthropic-dangerous-direct-browser-access,anthropic-version,authorization,content-type,openai-beta,"
    "openai-organization,x-api-key,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,"
    "x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout"
)


@pytest.mark.parametrize("named", [SENT, "x-anything", "authorization, x-a"])
def test_a_preflight_allows_the_headers_that_it_names(call, context, named):
    headers = {"origin": ORIGIN, **ASKS, "access-control-request-headers": named}
    response = call("OPTIONS", "/v1/messages", headers=headers, context=context)
    assert response.status_code == 204
    assert response.headers["access-control-allow-headers"] == named


@pytest.mark.parametrize("named", [None, "", "*, x y", "a;b", "a,,b", "x-\u00e9"])
def test_what_is_no_list_of_headers_allows_none(call, context, named):
    headers = {"origin": ORIGIN, "access-control-request-method": "POST"}
    if named is not None:
        headers["access-control-request-headers"] = named.encode("latin-1")
    response = call("OPTIONS", "/v1/messages", headers=headers, context=context)
    assert response.status_code == 204
    assert "access-control-allow-headers" not in response.headers
