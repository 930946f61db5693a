"""Who may ask for which route: what is not declared needs an administrator, and what is unknown needs a key."""

import hashlib

import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute

from roofline.server import app as module
from roofline.server.app import ROUTERS, create_app
from roofline.server.keys import ADMIN, USE, Keys
from roofline.server.scopes import OPEN, STRICTNESS, ScopeTable, needs

KEYS = {"user": '["use"]', "admin": '["use", "admin"]', "idle": "[]"}


@pytest.fixture
def keys(tmp_path):
    file = tmp_path / "keys.toml"
    entries = (
        f'[[keys]]\nname = "{name}"\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\nscopes = {scopes}\n'
        for name, scopes in KEYS.items()
    )
    file.write_text("".join(entries))
    return Keys(file=file)


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"} if name else {}


def all_routes() -> list[APIRoute]:
    routes = [route for router in ROUTERS for route in router.routes]
    assert all(isinstance(route, APIRoute) for route in routes)
    return [route for route in routes if isinstance(route, APIRoute)]


def test_every_route_declares_what_it_needs(make_context):
    assert len(all_routes()) > 5
    undeclared = [route.path for route in all_routes() if not hasattr(route.endpoint, "_needed_scope")]
    assert not undeclared, "these need @needs(OPEN, USE or ADMIN) below their decorator (server/scopes.py)"


def test_the_application_has_no_route_beside_those_of_the_table(make_context):
    """Others would need an administrator's key: the table does not know them."""
    assert create_app(make_context()).routes == all_routes()


# What an open route tells anybody is decided here, one by one.
OPEN_ROUTES = {"/health", "/", "/page/{name:path}"}  # the page's files hold no secret


def test_open_routes_are_few():
    assert {route.path for route in all_routes() if route.endpoint._needed_scope == OPEN} == OPEN_ROUTES


@pytest.mark.parametrize("route", all_routes(), ids=lambda route: f"{sorted(route.methods)[0]} {route.path}")
def test_every_route_is_closed_to_keys_without_its_scope(call, make_context, keys, route):
    path = route.path.replace("{name:path}", "app.js" if "page" in route.path else "tiny")
    context = make_context(keys=keys)
    needed = route.endpoint._needed_scope
    for method in sorted(route.methods):
        statuses = {
            name: call(method, path, headers=bearer(name), json={}, context=context).status_code
            for name in ("", "wrong", *KEYS)
        }
        assert statuses[""] == statuses["wrong"] == (401 if needed != OPEN else statuses["admin"])
        assert (statuses["user"] == 403) == (needed == ADMIN)
        assert (statuses["idle"] == 403) == (needed != OPEN)
        assert statuses["admin"] not in (401, 403)


def test_a_route_without_a_declaration_needs_an_administrator(call, make_context, keys, monkeypatch):
    forgotten = APIRouter()
    forgotten.get("/forgotten")(lambda: {})
    monkeypatch.setattr(module, "ROUTERS", (*ROUTERS, forgotten))
    statuses = {
        name: call("GET", "/forgotten", headers=bearer(name), context=make_context(keys=keys)).status_code
        for name in ("", *KEYS)
    }
    assert statuses == {"": 401, "user": 403, "admin": 200, "idle": 403}


def test_a_route_that_the_table_does_not_know_is_not_there_for_users(call, make_context, keys, monkeypatch):
    inner, outer = APIRouter(), APIRouter()
    inner.get("/inner")(needs(USE)(lambda: {}))
    outer.include_router(inner, prefix="/outer")
    monkeypatch.setattr(module, "ROUTERS", (*ROUTERS, outer))
    answers = {
        name: call("GET", "/outer/inner", headers=bearer(name), context=make_context(keys=keys)) for name in ("", *KEYS)
    }
    assert {name: answer.status_code for name, answer in answers.items()} == {
        "": 401,
        "user": 404,
        "admin": 200,
        "idle": 404,
    }


@pytest.mark.parametrize(
    "path", ["/nothing", "/v1", "/x.html", "/Health", "/health/", "/health/x", "/metrics/", "/v1/x"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS", "TRACE"])
def test_an_unknown_route_is_unknown_to_keys_alone(call, make_context, keys, path, method):
    context = make_context(keys=keys)
    assert call(method, path, context=context).status_code == 401
    for name in ("user", "admin"):
        answer = call(method, path, headers=bearer(name), context=context)
        assert (answer.status_code, answer.json()["error"]["message"]) == (404, f"There is no route {method} {path}.")


def test_the_strictest_of_the_routes_of_a_path_counts():
    router = APIRouter()
    router.get("/v1/models/{name:path}")(needs(USE)(lambda name: name))
    router.post("/v1/models/load")(needs(ADMIN)(lambda: {}))
    router.get("/health")(needs(OPEN)(lambda: {}))
    table = ScopeTable([router])
    assert [table.needed(path) for path in ("/v1/models/a", "/v1/models/load", "/health", "/x")] == [
        *(USE, ADMIN, OPEN, ADMIN)
    ]
    assert [table.knows(path) for path in ("/v1/models/load", "/health", "/x")] == [True, True, False]
    assert STRICTNESS == (OPEN, USE, ADMIN)


def test_without_keys_this_machine_administers_and_others_do_not(call, make_context, monkeypatch):
    router = APIRouter()
    router.get("/change")(needs(ADMIN)(lambda: {}))
    monkeypatch.setattr(module, "ROUTERS", (*ROUTERS, router))
    assert call("GET", "/change").status_code == 200
    public = make_context(host="0.0.0.0")
    refused = call("GET", "/change", base="http://a.example", context=public)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_scope")
    assert call("GET", "/stats", base="http://a.example", context=public).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "user"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"authorization": "Bearer user", "x-api-key": "wrong"}, 200),
        ({"authorization": "Bearer wrong", "x-api-key": "user"}, 401),
        ({"authorization": "Basic user", "x-api-key": "user"}, 401),
        ({"authorization": "bearer  user "}, 200),
    ],
)
def test_keys_come_in_either_header(call, make_context, keys, headers, status):
    assert call("GET", "/stats", headers=headers, context=make_context(keys=keys)).status_code == status


def test_routes_know_who_asks(call, make_context, keys, monkeypatch):
    from fastapi import Request

    from roofline.server.context import principal_of

    router = APIRouter()

    async def name(request: Request) -> dict[str, str]:
        return {"name": principal_of(request).name}

    router.get("/name")(needs(OPEN)(name))
    monkeypatch.setattr(module, "ROUTERS", (*ROUTERS, router))
    for key, told in (("user", "user"), ("admin", "admin"), ("", "nobody"), ("wrong", "nobody")):
        assert call("GET", "/name", headers=bearer(key), context=make_context(keys=keys)).json() == {"name": told}
    assert call("GET", "/name").json() == {"name": "local"}
    assert call("GET", "/name", context=make_context(host="::")).json() == {"name": "anybody"}
