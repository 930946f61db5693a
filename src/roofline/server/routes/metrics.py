"""GET /metrics: Prometheus' text form. GET /stats: the engine's figures and the limits, as JSON."""

from dataclasses import asdict

from fastapi import APIRouter, Request, Response

from roofline.server import context
from roofline.server.reply import json_response

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """All families, under vLLM's names where vLLM has one."""
    served = context.of(request)
    text = served.metrics.exposition(await served.engine.stats(), served.engine.facts() is not None)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/stats")
async def stats(request: Request) -> Response:
    """The engine's statistics since it started, with tokens a second and the share of the roof."""
    served = context.of(request)
    return json_response(
        {
            "model": served.name,
            "engine": dict(await served.engine.stats()),
            "queued": request.app.state.queue.waiting,
            "limits": asdict(served.limits),
        }
    )
