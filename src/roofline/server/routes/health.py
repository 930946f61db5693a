"""GET /health: this process is alive. GET /ready: requests will be answered."""

from fastapi import APIRouter, Request, Response

from roofline.server import context
from roofline.server.reply import json_response

router = APIRouter()


@router.get("/health")
async def health() -> Response:
    """200 while this process runs; needs no key, tells nothing else."""
    return json_response({"status": "alive"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 while an engine is up, else 503. exact: an answer does not depend on what else the engine computes; replicas:
    which of several engines are up."""
    served = context.of(request)
    facts = served.facts()
    return json_response(
        {
            "status": "ready",
            "model": served.name,
            "max_model_len": facts.max_model_len,
            "system_fingerprint": facts.fingerprint,
            "exact": facts.exact,
            **({"replicas": list(facts.replicas)} if facts.replicas else {}),
        }
    )
