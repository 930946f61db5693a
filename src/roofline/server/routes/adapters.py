"""GET, POST /v1/adapters; GET, DELETE /v1/adapters/NAME: the LoRA adapters beside the model, for administrators."""

from fastapi import APIRouter, Request, Response

from roofline.common.errors import CapacityError, ConfigError, RequestError, UnsupportedError
from roofline.common.json_types import JsonObject
from roofline.server import context
from roofline.server.adapters import ServedAdapter, as_refusal
from roofline.server.body import Body, fields_of, typed
from roofline.server.context import Context
from roofline.server.keys import ADMIN
from roofline.server.respond import on_thread_if_large
from roofline.server.response import json_response
from roofline.server.scopes import needs

router = APIRouter()


class AdapterBody(Body):
    """name: what requests will give as model; path: a folder on the server's machine."""

    name: str
    path: str


@router.get("/v1/adapters")
@needs(ADMIN)
async def list_adapters(request: Request) -> Response:
    """What is loaded, where from, and how many requests use it now."""
    served = context.of(request).adapters
    return json_response({"object": "list", "data": [_card(each) for each in served.all]})


def _read(raw: bytes, served: Context) -> AdapterBody:
    return typed(AdapterBody, fields_of(raw, served.limits))


@router.post("/v1/adapters")
@needs(ADMIN, AdapterBody)
async def load_adapter(request: Request) -> Response:
    """Load a folder of PEFT's files, or a GGUF file, under a name."""
    served = context.of(request)
    body = await on_thread_if_large(request, await request.body(), _read)
    served.loaded()
    try:
        return json_response(_card(await served.adapters.load(body.name, body.path)))
    except (ConfigError, UnsupportedError, CapacityError) as error:
        raise as_refusal(error) from None


@router.get("/v1/adapters/{name:path}")
@needs(ADMIN)
async def get_adapter(name: str, request: Request) -> Response:
    """One of them."""
    adapter = context.of(request).adapters.get(name)
    if adapter is None:
        raise RequestError(404, "adapter_not_found", f"There is no adapter {name[:100]!r}.", param="name")
    return json_response(_card(adapter))


@router.delete("/v1/adapters/{name:path}")
@needs(ADMIN)
async def unload_adapter(name: str, request: Request) -> Response:
    """Take no new requests for it; its memory is free when the last of those it has is answered."""
    adapter = context.of(request).adapters.unload(name)
    return json_response({"id": name, "object": "adapter", "deleted": True, "requests": adapter.uses})


def _card(adapter: ServedAdapter) -> JsonObject:
    info = adapter.info
    return {
        "id": adapter.name,
        "object": "adapter",
        "created": adapter.created,
        "path": info.path,
        "rank": info.rank,
        "matrices": info.matrices,
        "bytes": info.nbytes,
        "digest": info.digest,
        "requests": adapter.uses,
    }
