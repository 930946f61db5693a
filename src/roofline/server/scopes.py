"""What a route declares of itself: the scope that its callers need, and the kinds of its bodies.

A route that declares no scope needs an administrator.
"""

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel

from roofline.common.errors import RequestError
from roofline.server.keys import ADMIN, USE

OPEN = "open"  # no key
STRICTNESS = (OPEN, USE, ADMIN)
# Routes of vLLM's that are others here.
ELSEWHERE = {
    "/v1/load_lora_adapter": 'POST /v1/adapters loads an adapter, {"name": NAME, "path": FOLDER}',
    "/v1/unload_lora_adapter": "DELETE /v1/adapters/NAME unloads an adapter",
}
Endpoint = TypeVar("Endpoint", bound=Callable[..., object])
_DECLARED, _BODIES = "_needed_scope", "_bodies"


def needs(scope: str, *bodies: type[BaseModel]) -> Callable[[Endpoint], Endpoint]:
    """Declares, below the decorator that makes a function a route, which scope its callers need.

    bodies: the kinds of JSON that it reads, for the OpenAPI document alone.
    """
    assert scope in STRICTNESS, scope

    def declare(endpoint: Endpoint) -> Endpoint:
        setattr(endpoint, _DECLARED, scope)
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
    """The declared scopes of routes by their paths, read before anything is routed.

    A path that no declared route has needs ADMIN, also where the application has a route for it that is not in one of
    these routers: forgetting a declaration closes a route, and never opens one.
    """

    def __init__(self, routers: Iterable[APIRouter]) -> None:
        routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
        self._rows: list[tuple[re.Pattern[str], str]] = [
            (route.path_regex, getattr(route.endpoint, _DECLARED, ADMIN)) for route in routes
        ]

    def needed(self, path: str) -> str:
        """The strictest scope that any route of this path declares, whatever the method."""
        declared = [scope for pattern, scope in self._rows if pattern.match(path)]
        return max(declared, key=STRICTNESS.index, default=ADMIN)

    def knows(self, path: str) -> bool:
        """Whether a route of the table has this path."""
        return any(pattern.match(path) for pattern, _ in self._rows)


def unknown_route(method: str, path: str) -> RequestError:
    """What anybody is told of a path without a route, and a key without the scope of a path that is not declared."""
    remedy = f" {ELSEWHERE[path]}." if path in ELSEWHERE else ""
    return RequestError(404, "not_found", f"There is no route {method[:16]} {path[:200]}.{remedy}")
