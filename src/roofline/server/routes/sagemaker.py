"""GET /ping, POST /invocations: what Amazon SageMaker asks of a container."""

from collections.abc import Callable
from typing import TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from roofline.common.errors import RequestError
from roofline.server.body import fields_of, invalid, renamed
from roofline.server.context import Context
from roofline.server.keys import USE
from roofline.server.respond import on_thread_if_large, respond
from roofline.server.routes import status
from roofline.server.routes.openai import read as openai
from roofline.server.routes.openai.chat import ChatForm
from roofline.server.routes.openai.completions import CompletionForm
from roofline.server.routes.openai.schema import ChatBody, CompletionBody
from roofline.server.routes.tgi import read as tgi
from roofline.server.routes.tgi.form import TgiForm
from roofline.server.routes.tgi.read import TgiGeneration
from roofline.server.routes.tgi.schema import GenerateBody
from roofline.server.scopes import needs

router = APIRouter()
Result = TypeVar("Result")
SHAPES = ("messages", "prompt", "inputs")  # by which the API of a body is told


@router.get("/ping")
@needs(USE)
async def ping(request: Request) -> Response:
    """200 where /ready has it."""
    await status.ready(request)
    return Response()


@router.post("/invocations")
@needs(USE, ChatBody, CompletionBody, GenerateBody)
async def invocations(request: Request) -> Response:
    """Answer a body of /v1/chat/completions, /v1/completions or TGI's /generate; none needs a model, and that of the
    last names an adapter, as its parameters.adapter_id does."""
    shape = await on_thread_if_large(request, await request.body(), _shape)
    if shape == "messages":
        return await respond(request, _with_model(openai.chat), ChatForm)
    if shape == "prompt":
        return await respond(request, _with_model(openai.completion), CompletionForm)
    return await respond(request, _tgi_with_model, TgiForm)


def _shape(raw: bytes, context: Context) -> str:
    fields = fields_of(raw, context.limits)
    shapes = [name for name in SHAPES if name in fields]
    if len(shapes) != 1:
        message = "Give one of messages (as to /v1/chat/completions), prompt (/v1/completions) and inputs (/generate)."
        raise RequestError(400, "invalid_value", message, param="messages")
    return shapes[0]


def _tgi_with_model(raw: bytes, context: Context) -> TgiGeneration:
    """A body of /generate that may name a model, which TGI's own bodies do by parameters.adapter_id."""
    fields = fields_of(raw, context.limits)
    model, parameters = fields.pop("model", None), fields.get("parameters") or {}
    raw = msgspec.json.encode(fields)
    if model is None or model in context.names or not isinstance(parameters, dict):
        return tgi.generate(raw, context)
    if not isinstance(model, str):
        raise invalid("model", "Input should be a string")
    if parameters.get("adapter_id") not in (None, model):
        raise invalid("model", "is not the same as parameters.adapter_id; give one of them")
    raw = msgspec.json.encode({**fields, "parameters": {**parameters, "adapter_id": model}})
    with renamed({"parameters.adapter_id": "model"}):
        return tgi.generate(raw, context)


def _with_model(read: Callable[[bytes, Context], Result]) -> Callable[[bytes, Context], Result]:
    """A reader of bodies that may leave out the model."""

    def read_named(raw: bytes, context: Context) -> Result:
        fields = fields_of(raw, context.limits)
        if fields.get("model") is None:
            raw = msgspec.json.encode({**fields, "model": context.name})
        return read(raw, context)

    return read_named
