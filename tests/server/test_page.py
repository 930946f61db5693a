"""The files of the chat page: headers, tags, nothing beside the list. test_chat_page opens them in a browser."""

import re

import pytest

from roofline.server.routes import page


def test_the_list_names_every_file_there_is():
    assert {path.name for path in page.FOLDER.iterdir()} == page.FILES


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in sorted(page.FILES))])
def test_a_file_is_sent_as_it_is_with_its_type(call, path):
    response = call("GET", path)
    name = path.removeprefix("/page/") if path != "/" else page.INDEX
    assert (response.status_code, response.content) == (200, (page.FOLDER / name).read_bytes())
    kind = response.headers["content-type"].partition(";")[0]
    assert (
        kind
        == {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}[
            name.rpartition(".")[2]
        ]
    )
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["cache-control"] == "no-cache"


def test_the_policy_allows_the_page_itself_alone(call):
    policy = dict(part.split(" ", 1) for part in call("GET", "/").headers["content-security-policy"].split("; "))
    assert policy.pop("default-src") == "'none'"
    assert {policy.pop(name) for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert policy.pop("img-src") == "'self' data:"
    assert {policy.pop(name) for name in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert policy == {"require-trusted-types-for": "'script'", "trusted-types": "'none'"}


def test_no_file_names_another_host():
    """Scripts and styles come from this server, and nothing else is asked for."""
    for path in page.FOLDER.iterdir():
        text = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"""["'(]\s*(https?:)?//\w""", text), path.name
        assert not re.search(r"@import|url\(|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), (
            path.name
        )
        for target in re.findall(r'(?:from|src=|href=) ?"([^"#]+)"', text):
            name = target.removeprefix("./").removeprefix("/page/")
            assert name in page.FILES, (path.name, target)


@pytest.mark.parametrize("condition", ["{}", "W/{}", '"other", {}', "*"])
def test_the_same_file_is_not_sent_again(call, condition):
    tag = call("GET", "/page/app.js").headers["etag"]
    assert re.fullmatch(r'"[0-9a-f]{32}"', tag)
    response = call("GET", "/page/app.js", headers={"if-none-match": condition.format(tag)})
    assert (response.status_code, response.content) == (304, b"")
    assert response.headers["etag"] == tag
    assert "content-security-policy" in response.headers


def test_another_tag_is_answered_with_the_file(call):
    other = call("GET", "/page/dom.js").headers["etag"]
    assert call("GET", "/page/app.js", headers={"if-none-match": other}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/page/", "/page/../app.py", "/page/..%2fapp.py", "/page/%2e%2e/app.py", "/page//etc/passwd", "/page/app.js/",
        "/page/./app.js/../../gate.py", "/page/..%5capp.py", "/page/APP.JS", "/page/app.js%00", "/index.html", "http://127.0.0.1//",
    ],
)  # fmt: skip
@pytest.mark.parametrize("api_key", [None, "s3cret"])
def test_nothing_else_is_a_file(call, make_context, path, api_key):
    response = call("GET", path, context=make_context(api_key=api_key))
    assert response.status_code in ({401, 404} if api_key else {404})


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_files_are_read_only(call, method):
    response = call(method, "/", content=b"{}", headers={"content-type": "application/json"})
    assert response.status_code == 405
    assert response.headers["allow"] in ("GET, HEAD", "HEAD, GET")


def test_head_sends_headers_alone(call):
    response, full = call("HEAD", "/"), call("GET", "/")
    assert (response.status_code, response.content) == (200, b"")
    assert {name: response.headers[name] for name in ("etag", "content-length")} == {
        name: full.headers[name] for name in ("etag", "content-length")
    }


@pytest.mark.parametrize("path", ["/", "/page/app.js", "/page/style.css"])
def test_no_key_is_needed_to_read_it(call, make_context, path):
    """It holds no secret and asks for the key itself: a browser cannot send one with an address."""
    context = make_context(api_key="s3cret")
    assert call("GET", path, context=context).status_code == 200
    assert call("GET", "/v1/models", context=context).status_code == 401


def test_it_can_be_left_out(call, make_context):
    """What is left of / is the HEAD by which Ollama's command line sees that a server is there."""
    assert call("GET", "/page/app.js", context=make_context(page=False)).status_code == 404
    assert call("GET", "/page/app.js", context=make_context(page=False, api_key="s3cret")).status_code == 401
    assert call("GET", "/", context=make_context(page=False)).status_code == 405
    assert call("HEAD", "/", context=make_context(page=False)).status_code == 200


def test_foreign_host_names_get_no_page(call):
    """Without a key a page whose name resolves to this machine could use the server through it."""
    assert call("GET", "/", base="http://evil.example").status_code == 403


def test_files_are_short():
    for path in page.FOLDER.iterdir():
        assert path.read_text("utf-8").count("\n") <= 400, path.name
