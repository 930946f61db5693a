"""GET /v1/models: what is served. GET /health, /ready: whether it answers. GET /metrics, /stats: what was counted."""

from dataclasses import asdict

from fastapi import APIRouter, Request, Response

from roofline.common.errors import RequestError
from roofline.common.json_types import JsonObject
from roofline.server import context
from roofline.server.context import Context
from roofline.server.metrics import engine_figures
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


@router.get("/health")
async def health() -> Response:
    """200 while this process runs; needs no key, tells nothing else."""
    return json_response({"status": "alive"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 while an engine is up, else 503. exact: an answer does not depend on what else the engine computes; replicas:
    which of several engines are up."""
    served = context.of(request)
    loaded, engines = served.loaded(), served.engine.engines
    body = {
        "status": "ready",
        "model": served.name,
        "max_model_len": loaded.max_model_len,
        "system_fingerprint": loaded.fingerprint,
        "exact": loaded.exact,
    }
    return json_response(body | ({"replicas": [engine.ready for engine in engines]} if engines else {}))


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """All families in Prometheus' text form, under vLLM's names where vLLM has one."""
    served = context.of(request)
    text = served.metrics.exposition(engine_figures(served.engine), served.engine.ready)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/stats")
async def stats(request: Request) -> Response:
    """As JSON: the engine's statistics since it started, with tokens a second and the share of the roof; the limits."""
    served = context.of(request)
    figures, queued = engine_figures(served.engine), request.app.state.queue.waiting
    return json_response({"model": served.name, "engine": figures, "queued": queued, "limits": asdict(served.limits)})
