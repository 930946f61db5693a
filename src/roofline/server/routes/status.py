"""GET /v1/models: what is served. GET /health, /ready: whether it answers. GET /metrics, /stats: what was counted.
GET /limits: what may be asked for."""

from dataclasses import asdict

from fastapi import APIRouter, Request, Response

from roofline.common.errors import RequestError
from roofline.common.json_types import JsonObject
from roofline.server import context
from roofline.server.adapters import ServedAdapter
from roofline.server.context import Context
from roofline.server.generation import check_model
from roofline.server.keys import ADMIN, UNLIMITED
from roofline.server.metrics import engine_figures
from roofline.server.models import ExtraModel
from roofline.server.response import json_response
from roofline.server.scopes import ENOUGH, OPEN, USE, WATCH, needs

router = APIRouter()


@router.get("/v1/models")
@needs(USE)
async def list_models(request: Request) -> Response:
    """The model served here under each of its names, its adapters, and the extra models, which say whether they are
    loaded."""
    served, models = context.of(request), request.app.state.models
    own = [_card(served, name) for name in served.names]
    adapters = [_card(served, adapter.name, adapter) for adapter in served.adapters.all]
    extra = [_extra_card(served, model) for model in models.extra.values()]
    return json_response({"object": "list", "data": [*own, *adapters, *extra]})


@router.get("/v1/models/{name:path}")
@needs(USE)
async def get_model(name: str, request: Request) -> Response:
    """The card of a model or of an adapter; 404 for any other, with the names that are served."""
    served = context.of(request)
    if (model := request.app.state.models.extra.get(name)) is not None:
        return json_response(_extra_card(served, model))
    check_model(name, served)
    return json_response(_card(served, name, served.adapters.get(name)))


def _card(served: Context, name: str, adapter: ServedAdapter | None = None) -> JsonObject:
    engine = served.engine
    return {
        "id": name,
        "object": "model",
        "created": served.created if adapter is None else adapter.created,
        "owned_by": "roofline",
        "max_model_len": engine.description.max_model_len if engine.ready and engine.description else None,
    } | ({} if adapter is None else {"parent": served.name})


def _extra_card(served: Context, model: ExtraModel) -> JsonObject:
    loaded = model.context.engine.description if model.context is not None else None
    return {
        "id": model.name,
        "object": "model",
        "created": served.created,
        "owned_by": "roofline",
        "max_model_len": loaded.max_model_len if loaded is not None else None,
        "status": model.status(),
    }


@router.api_route("/health", methods=["GET", "HEAD"])
@needs(OPEN)
async def health() -> Response:
    """200 while this process runs; needs no key, tells nothing else."""
    return json_response({"status": "alive"})


@router.api_route("/ready", methods=["GET", "HEAD"])
@needs(WATCH)
async def ready(request: Request) -> Response:
    """200 while an engine is up and computes what it is asked for, else 503, as where the weights turned out not to be
    those that were written. An engine that has computed nothing lately is given a token to compute.
    weights_checked: whether they were compared with their hash; golden: what came of comparing golden prompts with a
    slow reference, beyond whose thresholds it is 503 too; exact: an answer does not depend on what else the
    engine computes; replicas: which of several engines are up; models: the extra ones, of which those that are pinned
    must be loaded. Without a key, where --open-probes allows it: the status alone."""
    if not ENOUGH[WATCH].isdisjoint(context.principal_of(request).scopes):
        return json_response(_readiness(request))
    try:
        _readiness(request)
    except RequestError:  # which names models, files and figures
        raise RequestError(503, "not_ready", "The server is not ready.") from None
    return json_response({"status": "ready"})


def _readiness(request: Request) -> JsonObject:
    """What /ready tells. Raises RequestError 503 with the reason where it is not."""
    served = context.of(request)
    if not served.engine.ready:
        reason = f": {served.engine.problem}." if served.engine.problem is not None else ". Try again in a moment."
        raise RequestError(503, "engine_not_ready", f"The engine is not ready{reason}")
    loaded, engines, checked = served.loaded(), served.engine.engines, served.engine.checked
    if served.adapters.loading:
        raise RequestError(503, "engine_not_ready", "The adapters are being loaded. Try again in a moment.")
    models = request.app.state.models
    if (late := models.missing()) is not None:
        raise RequestError(503, "engine_not_ready", f"The model {late.name!r} is not ready: {late.status()}.")
    trouble = served.engine.trouble(served.stall_seconds)
    if served.canary_seconds:
        served.engine.prove(served.canary_seconds)
    if trouble is not None:
        raise RequestError(503, "engine_stalled", f"The engine is not ready: {trouble}.")
    if checked is not None and checked.problem is not None:
        raise RequestError(503, "weights_changed", checked.problem)
    if served.golden.problem is not None:
        raise RequestError(503, "golden_check_failed", served.golden.problem)
    body: JsonObject = {
        "status": "ready",
        "model": served.name,
        "max_model_len": loaded.max_model_len,
        "system_fingerprint": loaded.fingerprint,
        "exact": loaded.exact,
        "weights_checked": checked is not None,
        "golden": served.golden.shown(),
    }
    up = [engine.ready and engine.trouble(served.stall_seconds) is None for engine in engines]
    return body | ({"replicas": up} if engines else {}) | ({"models": models.shown()} if models.extra else {})


@router.get("/metrics")
@needs(WATCH)
async def metrics(request: Request) -> Response:
    """All families in Prometheus' text form, under vLLM's names where vLLM has one; those by key, which tell the names
    of all keys, for an administrator alone."""
    served = context.of(request)
    up = served.engine.ready and served.engine.trouble(served.stall_seconds) is None
    figures = engine_figures(served.engine)
    waiting = figures["waiting"]
    assert isinstance(waiting, int), "a count"
    figures["waiting"] = waiting + request.app.state.queue.held  # wherever they wait
    figures["golden"] = served.golden.shown()
    for other in request.app.state.models.contexts()[1:]:
        figures_there = engine_figures(other.engine) | {"golden": other.golden.shown()}
        other.metrics.observe(figures_there, other.engine.ready and other.engine.trouble(served.stall_seconds) is None)
    text = served.metrics.exposition(figures, up)
    if ADMIN in context.principal_of(request).scopes:
        text += served.key_metrics.exposition()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/limits")
@needs(USE)
async def limits(request: Request) -> Response:
    """What requests may ask for, by name, and what the key that asks may do."""
    served, principal = context.of(request), context.principal_of(request)
    description = served.engine.description
    streams = served.limits.streams if principal.streams is None else principal.streams
    key = {
        "name": principal.name,
        "scopes": sorted(principal.scopes),
        "streams": None if streams == UNLIMITED else streams,
        "priority": principal.priority,
        "weight": principal.weight,
    }
    context_tokens = description.max_model_len if description else None
    return json_response({"limits": served.limits.listed(), "context_tokens": context_tokens, "key": key})


@router.get("/stats")
@needs(USE)
async def stats(request: Request) -> Response:
    """As JSON: the engine's statistics since it started, with tokens a second and the share of the roof; the limits."""
    served = context.of(request)
    figures, queue = engine_figures(served.engine), request.app.state.queue
    by_model = {other.name: engine_figures(other.engine) for other in request.app.state.models.contexts()[1:]}
    waiting = {"queued": queue.waiting, "held": queue.held, "oldest_waiting_seconds": round(queue.oldest_seconds, 3)}
    answer = {"model": served.name, "engine": figures, **waiting, "limits": asdict(served.limits)}
    return json_response(answer | ({"models": by_model} if by_model else {}))
