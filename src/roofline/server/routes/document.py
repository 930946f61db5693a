"""GET /openapi.json: every route with the bodies that it takes, for generators of clients and for tests."""

import re
from collections.abc import Iterable

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import roofline
from roofline.common.json_types import JsonObject
from roofline.server.keys import USE
from roofline.server.response import json_response
from roofline.server.scopes import bodies_of, is_open, needs

router = APIRouter()
REFERENCE = "#/components/schemas/{model}"
KEY = "key"  # the name of the only way to be let in


@router.get("/openapi.json")
@needs(USE)
async def document(request: Request) -> Response:
    """This document. Fields at values that ask for nothing are accepted beyond what it lists."""
    routes = [route for router in request.app.state.routers for route in router.routes]
    return json_response(openapi_document(route for route in routes if isinstance(route, APIRoute)))


def openapi_document(routes: Iterable[APIRoute]) -> JsonObject:
    """The OpenAPI 3.1 document of some routes."""
    routes = list(routes)
    kinds = list(dict.fromkeys(kind for route in routes for kind in bodies_of(route)))
    references, definitions = models_json_schema([(kind, "validation") for kind in kinds], ref_template=REFERENCE)
    schemas = {kind: references[kind, "validation"] for kind in kinds}
    paths: dict[str, JsonObject] = {}
    for route in routes:
        path = re.sub(r":\w+}", "}", route.path)
        for method in sorted(route.methods or ()):
            # Of two routes for a path and method the first answers.
            paths.setdefault(path, {}).setdefault(method.lower(), _operation(route, path, method, schemas))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Roofline", "version": roofline.__version__},
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {KEY: {"type": "http", "scheme": "bearer"}},
        },
        "security": [{KEY: []}],
    }


def _operation(route: APIRoute, path: str, method: str, schemas: dict[type[BaseModel], JsonObject]) -> JsonObject:
    operation: JsonObject = {
        "operationId": f"{method.lower()}_{re.sub('[^a-z0-9]+', '_', path.lower()).strip('_') or 'root'}",
        "summary": " ".join((route.endpoint.__doc__ or "").split()),
        "responses": {
            "200": {"description": "The answer."},
            "default": {"description": "An error, in the form of the route's API."},
        },
    }
    names = re.findall(r"{(\w+)}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    bodies = [schemas[kind] for kind in bodies_of(route)]
    if bodies:
        schema = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if is_open(route):
        operation["security"] = []
    return operation
