"""POST /v2/models/NAME/generate, /generate_stream; GET /v2, /v2/models/NAME, and what is ready under /v2."""

from functools import partial

from fastapi import APIRouter, Request, Response

import roofline
from roofline.server import context
from roofline.server.generation import check_model
from roofline.server.keys import USE
from roofline.server.respond import respond
from roofline.server.response import json_response
from roofline.server.routes import status
from roofline.server.routes.triton import read
from roofline.server.routes.triton.form import TritonForm
from roofline.server.routes.triton.schema import GenerateBody
from roofline.server.scopes import needs

router = APIRouter()


@router.post("/v2/models/{model:path}/generate")
@needs(USE, GenerateBody)
async def generate(model: str, request: Request) -> Response:
    """Go on from a text."""
    check_model(model, context.of(request))
    return await respond(request, partial(read.generate, model=model, stream=False), TritonForm)


@router.post("/v2/models/{model:path}/generate_stream")
@needs(USE, GenerateBody)
async def generate_stream(model: str, request: Request) -> Response:
    """Go on from a text, with an event for each piece."""
    check_model(model, context.of(request))
    return await respond(request, partial(read.generate, model=model, stream=True), TritonForm)


@router.get("/v2")
@needs(USE)
async def server() -> Response:
    """What serves."""
    return json_response({"name": "roofline", "version": roofline.__version__, "extensions": ["generate"]})


@router.get("/v2/health/live")
@needs(USE)
async def live() -> Response:
    """200 while this process runs."""
    return Response()


@router.get("/v2/health/ready")
@needs(USE)
async def ready(request: Request) -> Response:
    """200 where /ready has it."""
    await status.ready(request)
    return Response()


@router.get("/v2/models/{model:path}/ready")
@needs(USE)
async def model_ready(model: str, request: Request) -> Response:
    """200 where /ready has it, for the served model."""
    check_model(model, context.of(request))
    await status.ready(request)
    return Response()


@router.get("/v2/models/{model:path}")
@needs(USE)
async def model_metadata(model: str, request: Request) -> Response:
    """The inputs and outputs of the served model."""
    check_model(model, context.of(request))
    text = {"datatype": "BYTES", "shape": [1]}
    return json_response(
        {
            "name": model,
            "versions": ["1"],
            "platform": "roofline",
            "inputs": [{"name": "text_input", **text}],
            "outputs": [{"name": "text_output", **text}],
        }
    )
