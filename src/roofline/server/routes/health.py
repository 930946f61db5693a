"""GET /health: this process is alive. GET /ready: requests will be answered."""

from fastapi import APIRouter, Request, Response

from roofline.server import context
from roofline.server.response import json_response

router = APIRouter()


@router.get("/health")
async def health() -> Response:
    """200 while this process runs; needs no key, tells nothing else."""
    return json_response({"status": "alive"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 while an engine is up, else 503. exact: an answer does not depend on what else the engine computes; replicas:
    which of several engines are up."""
    server = context.of(request)
    loaded = server.loaded()
    engines = server.engine.engines
    return json_response(
        {
            "status": "ready",
            "model": server.name,
            "max_model_len": loaded.max_model_len,
            "system_fingerprint": loaded.fingerprint,
            "exact": loaded.exact,
            **({"replicas": [engine.ready for engine in engines]} if engines else {}),
        }
    )
