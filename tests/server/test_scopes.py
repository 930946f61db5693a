"""Who may ask for which route: what is not declared needs an administrator, and what is unknown needs a key."""

import hashlib
from types import SimpleNamespace

import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute

from roofline.server import app as module
from roofline.server.app import ROUTERS, create_app
from roofline.server.keys import ADMIN, METRICS, SCOPES, USE, Keys
from roofline.server.scopes import ENOUGH, OPEN, PROBES, WATCH, ScopeTable, needs

KEYS = {
    "user": '["use"]',
    "admin": '["use", "admin"]',
    "idle": "[]",
    "prometheus": '["metrics"]',
    "only-admin": '["admin"]',
}


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
WATCHED = {"/metrics", "/ready"}  # that a key of scope `metrics` may read beside them


def test_open_routes_are_few():
    assert {route.path for route in all_routes() if route.endpoint._needed_scope == OPEN} == OPEN_ROUTES
    assert {route.path for route in all_routes() if route.endpoint._needed_scope == WATCH} == WATCHED
    assert PROBES <= WATCHED


@pytest.mark.parametrize("route", all_routes(), ids=lambda route: f"{sorted(route.methods)[0]} {route.path}")
def test_every_route_is_closed_to_keys_without_its_scope(call, make_context, keys, route):
    path = route.path.replace("{name:path}", "app.js" if "page" in route.path else "tiny")
    context = make_context(keys=keys)
    needed, may_watch = route.endpoint._needed_scope, route.path in WATCHED
    for method in sorted(route.methods):
        statuses = {
            name: call(method, path, headers=bearer(name), json={}, context=context).status_code
            for name in ("", "wrong", *KEYS)
        }
        assert statuses[""] == statuses["wrong"] == (401 if needed != OPEN else statuses["admin"])
        assert (statuses["user"] == 403) == (needed == ADMIN)
        assert (statuses["idle"] == 403) == (needed != OPEN)
        assert (statuses["prometheus"] == 403) == (needed != OPEN and not may_watch)
        assert (statuses["only-admin"] == 403) == (needed not in (OPEN, ADMIN))
        assert statuses["admin"] not in (401, 403)


def test_a_route_without_a_declaration_needs_an_administrator(call, make_context, keys, monkeypatch):
    forgotten = APIRouter()
    forgotten.get("/forgotten")(lambda: {})
    monkeypatch.setattr(module, "ROUTERS", (*ROUTERS, forgotten))
    statuses = {
        name: call("GET", "/forgotten", headers=bearer(name), context=make_context(keys=keys)).status_code
        for name in ("", *KEYS)
    }
    assert statuses == {"": 401, "user": 403, "admin": 200, "idle": 403, "prometheus": 403, "only-admin": 200}


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
        "prometheus": 404,
        "only-admin": 200,
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


def test_a_key_must_satisfy_all_routes_of_a_path():
    router = APIRouter()
    router.get("/v1/models/{name:path}")(needs(USE)(lambda name: name))
    router.post("/v1/models/load")(needs(ADMIN)(lambda: {}))
    router.get("/health")(needs(OPEN)(lambda: {}))
    router.get("/figures")(needs(WATCH)(lambda: {}))
    router.post("/figures")(needs(OPEN)(lambda: {}))
    table, opened = ScopeTable([router]), ScopeTable([router], opened=["/figures"])
    lacking = {
        (path, *scopes): table.lacking(path, scopes)
        for path in ("/v1/models/a", "/v1/models/load", "/health", "/figures", "/x")
        for scopes in ((), (USE,), (METRICS,), (ADMIN,), (USE, ADMIN), SCOPES)
    }
    both = [METRICS, USE]
    assert {key: value for key, value in lacking.items() if value} == {
        **{("/v1/models/a", *scopes): [USE] for scopes in ((), (METRICS,), (ADMIN,))},
        **{("/v1/models/load", *scopes): [ADMIN] for scopes in ((), (USE,), (METRICS,))},
        **{("/v1/models/load", ADMIN): [USE]},
        **{("/figures", *scopes): both for scopes in ((), (ADMIN,))},
        **{("/x", *scopes): [ADMIN] for scopes in ((), (USE,), (METRICS,))},
    }
    paths = ("/v1/models/load", "/health", "/figures", "/x")
    assert [table.is_open(path) for path in paths] == [False, True, False, False]
    assert [opened.is_open(path) for path in paths] == [False, True, True, False]
    assert [table.knows(path) for path in ("/v1/models/load", "/health", "/x")] == [True, True, False]
    assert set().union(*ENOUGH.values()) == set(SCOPES)


def test_a_key_for_metrics_reads_the_figures_of_all_and_not_of_each_key(call, make_context, keys):
    context = make_context(keys=keys)
    context.key_metrics.generated("user", 3)
    texts = {name: call("GET", "/metrics", headers=bearer(name), context=context).text for name in KEYS}
    assert ["roofline:key_" in texts[name] for name in ("prometheus", "user", "admin")] == [False, False, True]
    assert "vllm:num_requests_running" in texts["prometheus"]
    assert call("GET", "/ready", headers=bearer("prometheus"), context=context).json()["model"] == "tiny"
    refused = call("GET", "/stats", headers=bearer("prometheus"), context=context).json()["error"]
    assert (refused["code"], refused["message"]) == (
        "insufficient_scope",
        "This route needs a key with the scope 'use'.",
    )
    refused = call("GET", "/ready", headers=bearer("idle"), context=context).json()["error"]
    assert refused["message"] == "This route needs a key with the scope 'metrics' or 'use'."


PROBLEMS = {
    "the engine is gone": {"up": False, "problem": "GPU 7 of host-a fell off the bus"},
    "loading": {"up": False},
    "stalled": {"stalled_for": 11.0},
    "weights": {"checked": SimpleNamespace(problem="secret-model.gguf was changed")},
}


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("problem", [None, *PROBLEMS])
def test_open_probes_tell_those_without_a_key_whether_and_nothing_else(
    call, make_context, keys, engine, method, problem
):
    for name, value in PROBLEMS.get(problem, {}).items():
        setattr(engine, name, value)
    context = make_context(keys=keys, open_probes=True, name="secret-model")
    answers = {name: call(method, "/ready", headers=bearer(name), context=context) for name in ("", "wrong", *KEYS)}
    status = 200 if problem is None else 503
    assert {answer.status_code for answer in answers.values()} == {status}
    if method == "HEAD":
        return
    error = {"message": "The server is not ready.", "type": "server_error", "param": None, "code": "not_ready"}
    for name in ("", "wrong", "idle", "only-admin"):
        assert answers[name].json() == ({"status": "ready"} if problem is None else {"error": error})
        others = {"date", "content-length", "content-type", "x-request-id", "retry-after"}
        assert set(answers[name].headers) <= others
    for name in ("user", "admin", "prometheus"):
        assert answers[name].json() not in ({"status": "ready"}, {"error": error})


def test_open_probes_open_nothing_else(call, make_context, keys):
    plain, opened = make_context(keys=keys), make_context(keys=keys, open_probes=True)
    changed = []
    for path in sorted({route.path.replace("{name:path}", "tiny") for route in all_routes()}):
        for method in ("GET", "POST"):
            statuses = [call(method, path, json={}, context=each).status_code for each in (plain, opened)]
            changed += [(method, path, *statuses)] if statuses[0] != statuses[1] else []
    assert changed == [("GET", "/ready", 401, 200), ("POST", "/ready", 401, 405)]


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
