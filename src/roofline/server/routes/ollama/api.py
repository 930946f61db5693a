"""POST /api/chat, /api/generate, /api/show; GET /api/tags, /api/ps, /api/version; HEAD /"""

import time
from hashlib import sha256

from fastapi import APIRouter, Request, Response

import roofline
from roofline.common.json_types import JsonObject
from roofline.engine.process.messages import Ready
from roofline.server import context
from roofline.server.body import fields_of, invalid, typed
from roofline.server.context import Context
from roofline.server.keys import USE
from roofline.server.respond import on_thread_if_large, respond
from roofline.server.response import json_response
from roofline.server.routes.ollama import read
from roofline.server.routes.ollama.form import GenerateForm, OllamaChatForm, timestamp
from roofline.server.routes.ollama.schema import ChatRequest, GenerateRequest, ShowRequest
from roofline.server.scopes import OPEN, needs
from roofline.weights.facts import ModelFacts

router = APIRouter()
NEVER = "9999-12-31T23:59:59Z"


@router.post("/api/chat")
@needs(USE, ChatRequest)
async def chat(request: Request) -> Response:
    """Answer a conversation. Body, lines and errors are Ollama's."""
    model = read.model_to_load(await request.body(), context.of(request), "messages")
    if model is not None:
        return _loaded(model, {"message": {"role": "assistant", "content": ""}})
    return await respond(request, read.chat, OllamaChatForm)


@router.post("/api/generate")
@needs(USE, GenerateRequest)
async def generate(request: Request) -> Response:
    """Answer a prompt, or go on from a raw one."""
    model = read.model_to_load(await request.body(), context.of(request), "prompt")
    if model is not None:
        return _loaded(model, {"response": ""})
    return await respond(request, read.generate, GenerateForm)


@router.head("/")
@needs(OPEN)
async def heartbeat() -> Response:
    """Ollama's command line asks this first."""
    return Response()


@router.get("/api/version")
@needs(USE)
async def version() -> Response:
    """Roofline's version."""
    return json_response({"version": roofline.__version__})


@router.get("/api/tags")
@needs(USE)
async def tags(request: Request) -> Response:
    """The model served here under each of its names, and the extra ones."""
    served, models = context.of(request), request.app.state.models
    extra = [_card_of(name, name.encode(), served, None) for name in models.extra]
    return json_response({"models": [*(_card(served, name) for name in served.names), *extra]})


@router.get("/api/ps")
@needs(USE)
async def running(request: Request) -> Response:
    """The models that are loaded."""
    cards = [
        {**_card(each, each.name), "size_vram": 0, "expires_at": NEVER, "context_length": each.loaded().max_model_len}
        for each in request.app.state.models.contexts()
    ]
    return json_response({"models": cards})


def _show(raw: bytes, served: Context) -> ShowRequest:
    return typed(ShowRequest, fields_of(raw, served.limits))


@router.post("/api/show")
@needs(USE, ShowRequest)
async def show(request: Request) -> Response:
    """The model's template, sizes and abilities."""
    served = context.of(request)
    body = await on_thread_if_large(request, await request.body(), _show)
    name = body.model if body.model is not None else body.name
    if name is None:
        raise invalid("model", "is missing")
    read.served_name(name, served)
    loaded, text = served.loaded(), served.text
    return json_response(
        {
            "modified_at": timestamp(served.created),
            "modelfile": f"FROM {served.name}\n",
            "parameters": "",
            "template": text.template.source,
            "details": _details(loaded.facts),
            "model_info": _model_info(served.name, loaded),
            "capabilities": _abilities(loaded, text.reply_format.thinks),
        }
    )


def _loaded(model: str, answer: JsonObject) -> Response:
    """What is told of a model that was to be loaded, and is."""
    head = {"model": model, "created_at": timestamp(time.time())}
    return json_response({**head, **answer, "done": True, "done_reason": "load"})


def _card(served: Context, name: str) -> JsonObject:
    loaded = served.loaded()
    return _card_of(name, loaded.fingerprint.encode(), served, loaded.facts)


def _card_of(name: str, identity: bytes, served: Context, facts: ModelFacts | None) -> JsonObject:
    """What is known of a model; facts: None where it is not loaded."""
    return {
        "name": name,
        "model": name,
        "modified_at": timestamp(served.created),
        "digest": sha256(identity).hexdigest(),
        "size": 0 if facts is None else facts.weight_bytes,
        "details": _details(facts),
    }


def _details(facts: ModelFacts | None) -> JsonObject:
    if facts is None:
        names = ("parent_model", "format", "family", "parameter_size", "quantization_level")
        return {**dict.fromkeys(names, ""), "families": []}
    return {
        "parent_model": "",
        "format": facts.file_kind,
        "family": facts.family,
        "families": [facts.family],
        "parameter_size": parameter_size(facts.parameters),
        "quantization_level": facts.weight_format,
    }


def parameter_size(count: int) -> str:
    """A number of parameters as Ollama writes it: 134.52M, 8.0B, 70B."""
    for unit, letter, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if count >= unit:
            return f"{count / unit:.{digits if count % unit else 0}f}{letter}"
    return str(count)


def _model_info(name: str, loaded: Ready) -> JsonObject:
    family = "roofline" if loaded.facts is None else loaded.facts.family
    count = {} if loaded.facts is None else {"general.parameter_count": loaded.facts.parameters}
    return {
        "general.architecture": family,
        "general.basename": name,
        **count,
        f"{family}.context_length": loaded.max_model_len,
        f"{family}.vocab_size": loaded.vocab_size,
    }


def _abilities(loaded: Ready, thinks: bool) -> list[str]:
    if loaded.encoder:
        return ["embedding"]
    return ["completion", "tools", *(["thinking"] if thinks else [])]
