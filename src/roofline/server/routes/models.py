"""GET /v1/models and /v1/models/{name}"""

from fastapi import APIRouter, Request, Response

from roofline.common.errors import RequestError
from roofline.common.json_types import JsonObject
from roofline.server import context
from roofline.server.context import Context
from roofline.server.response import json_response

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The one model served here."""
    return json_response({"object": "list", "data": [_card(context.of(request))]})


@router.get("/v1/models/{name:path}")
async def get_model(name: str, request: Request) -> Response:
    """The card of a model; 404 unless it is the one served here."""
    served = context.of(request)
    if name != served.name:
        raise RequestError(404, "model_not_found", f"The model {name[:100]!r} is not served here.", param="model")
    return json_response(_card(served))


def _card(served: Context) -> JsonObject:
    engine = served.engine
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "roofline",
        "max_model_len": engine.description.max_model_len if engine.ready and engine.description else None,
    }
