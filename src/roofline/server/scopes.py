"""What a route declares of itself: what its callers need, and the kinds of its bodies.

A declaration stands for a set of scopes, any of which is enough; scopes have no order, and a key has those it is given.
A route that declares nothing needs an administrator.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import TypeVar

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel

from roofline.common.errors import RequestError
from roofline.server.keys import ADMIN, METRICS, USE

OPEN = "open"  # no key
WATCH = "watch"  # figures and readiness
# What a route declares -> the scopes of keys of which any is enough. OPEN asks for none.
ENOUGH: Mapping[str, frozenset[str]] = MappingProxyType(
    {WATCH: frozenset((USE, METRICS)), USE: frozenset((USE,)), ADMIN: frozenset((ADMIN,))}
)
PROBES = frozenset(("/ready",))  # paths that --open-probes opens: without a key they say whether, and nothing else
# Routes of vLLM's that are others here.
ELSEWHERE = {
    "/v1/load_lora_adapter": 'POST /v1/adapters loads an adapter, {"name": NAME, "path": FOLDER}',
    "/v1/unload_lora_adapter": "DELETE /v1/adapters/NAME unloads an adapter",
}
Endpoint = TypeVar("Endpoint", bound=Callable[..., object])
_DECLARED, _BODIES = "_needed_scope", "_bodies"


def needs(need: str, *bodies: type[BaseModel]) -> Callable[[Endpoint], Endpoint]:
    """Declares, below the decorator that makes a function a route, what its callers need: OPEN, or a key of `ENOUGH`.

    bodies: the kinds of JSON that it reads, for the OpenAPI document alone.
    """
    assert need == OPEN or need in ENOUGH, need

    def declare(endpoint: Endpoint) -> Endpoint:
        setattr(endpoint, _DECLARED, need)
        setattr(endpoint, _BODIES, bodies)
        return endpoint

    return declare


def bodies_of(route: APIRoute) -> tuple[type[BaseModel], ...]:
    """The kinds of bodies that a route declares."""
    return getattr(route.endpoint, _BODIES, ())


def is_open(route: APIRoute) -> bool:
    """Whether a route needs no key."""
    return getattr(route.endpoint, _DECLARED, ADMIN) == OPEN


class ScopeTable:
    """What routes declare by their paths, read before anything is routed. opened: paths that need no key here.

    A path that no declared route has needs ADMIN, also where the application has a route for it that is not in one of
    these routers: forgetting a declaration closes a route, and never opens one.
    """

    def __init__(self, routers: Iterable[APIRouter], opened: Collection[str] = ()) -> None:
        routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
        self._rows: list[tuple[re.Pattern[str], str]] = [
            (route.path_regex, OPEN if route.path in opened else getattr(route.endpoint, _DECLARED, ADMIN))
            for route in routes
        ]

    def is_open(self, path: str) -> bool:
        """Whether every route of this path needs no key, whatever the method."""
        return self._needs(path) == {OPEN}

    def lacking(self, path: str, scopes: Collection[str]) -> list[str]:
        """What a key of these scopes lacks for this path: scopes of which it needs one, in alphabetical order; none
        where it may ask. It must satisfy all routes of the path, whatever the method."""
        needs = sorted(self._needs(path) - {OPEN})
        return next((sorted(ENOUGH[need]) for need in needs if ENOUGH[need].isdisjoint(scopes)), [])

    def _needs(self, path: str) -> set[str]:
        return {need for pattern, need in self._rows if pattern.match(path)} or {ADMIN}

    def knows(self, path: str) -> bool:
        """Whether a route of the table has this path."""
        return any(pattern.match(path) for pattern, _ in self._rows)


def unknown_route(method: str, path: str) -> RequestError:
    """What anybody is told of a path without a route, and a key without the scope of a path that is not declared."""
    remedy = f" {ELSEWHERE[path]}." if path in ELSEWHERE else ""
    return RequestError(404, "not_found", f"There is no route {method[:16]} {path[:200]}.{remedy}")
