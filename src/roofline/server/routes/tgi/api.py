"""POST /generate, /generate_stream; GET /info"""

from fastapi import APIRouter, Request, Response

import roofline
from roofline.server import context
from roofline.server.keys import USE
from roofline.server.respond import respond
from roofline.server.response import json_response
from roofline.server.routes.tgi import read
from roofline.server.routes.tgi.form import TgiForm
from roofline.server.routes.tgi.schema import GenerateBody
from roofline.server.scopes import needs

router = APIRouter()


@router.post("/generate")
@needs(USE, GenerateBody)
async def generate(request: Request) -> Response:
    """Go on from a text. Body, answer and errors are TGI's."""
    return await respond(request, read.generate, TgiForm)


@router.post("/generate_stream")
@needs(USE, GenerateBody)
async def generate_stream(request: Request) -> Response:
    """Go on from a text, with an event for each token."""
    return await respond(request, read.generate_stream, TgiForm)


@router.get("/info")
@needs(USE)
async def info(request: Request) -> Response:
    """The served model and the limits, under TGI's names."""
    served = context.of(request)
    loaded, limits = served.loaded(), served.limits
    return json_response(
        {
            "model_id": served.name,
            "model_sha": loaded.fingerprint,
            "max_concurrent_requests": limits.queued,
            "max_best_of": 1,
            "max_stop_sequences": limits.stop_strings,
            "max_input_tokens": loaded.max_model_len - 1,
            "max_total_tokens": loaded.max_model_len,
            "max_client_batch_size": 1,
            "router": "roofline",
            "version": roofline.__version__,
        }
    )
