"""GET /metrics: Prometheus' text form. GET /stats: the engine's figures and the limits, as JSON."""

from dataclasses import asdict

from fastapi import APIRouter, Request, Response

from roofline.server import context
from roofline.server.metrics import engine_figures
from roofline.server.response import json_response

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """All families, under vLLM's names where vLLM has one."""
    served = context.of(request)
    text = served.metrics.exposition(engine_figures(served.engine), served.engine.ready)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/stats")
async def stats(request: Request) -> Response:
    """The engine's statistics since it started, with tokens a second and the share of the roof."""
    served = context.of(request)
    return json_response(
        {
            "model": served.name,
            "engine": engine_figures(served.engine),
            "queued": request.app.state.queue.waiting,
            "limits": asdict(served.limits),
        }
    )
