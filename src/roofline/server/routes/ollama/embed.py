"""POST /api/embed, /api/embeddings: vectors of texts, as `/v1/embeddings` makes them."""

import time
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from roofline.common.errors import RequestError
from roofline.common.json_types import JsonObject
from roofline.engine.params import SamplingParams
from roofline.engine.pooling import Pooling, embedding
from roofline.server.answers import Answers
from roofline.server.body import count_within, fields_of, invalid, refuse_unsupported, typed
from roofline.server.context import Context
from roofline.server.generation import Generation, check_prompts
from roofline.server.keys import USE
from roofline.server.respond import respond_with_vectors
from roofline.server.routes.ollama import read
from roofline.server.routes.ollama.schema import INSTEAD, NEUTRAL_OPTIONS, EmbeddingsRequest, EmbedRequest
from roofline.server.scopes import needs

router = APIRouter()


@dataclass(frozen=True)
class EmbedGeneration(Generation):
    """With how many numbers of its vectors are told; None: all."""

    dimensions: int | None = None


@router.post("/api/embed")
@needs(USE, EmbedRequest)
async def embed(request: Request) -> Response:
    """Vectors of one or several texts. Body, answer and errors are Ollama's."""
    return await respond_with_vectors(request, read_embed, _vectors)


@router.post("/api/embeddings")
@needs(USE, EmbeddingsRequest)
async def embeddings(request: Request) -> Response:
    """The vector of one text, as Ollama had it first."""
    return await respond_with_vectors(request, read_embeddings, _vector)


def read_embed(raw: bytes, context: Context) -> EmbedGeneration:
    """A body of /api/embed. Raises RequestError, UnsupportedError."""
    body = typed(EmbedRequest, _fields(raw, context))
    if body.dimensions is not None and body.dimensions < 1:
        raise invalid("dimensions", f"{body.dimensions} is not at least 1")
    texts = [body.input] if isinstance(body.input, str) else body.input
    return _generation("input", body, texts, context, cuts=body.truncate is True, dimensions=body.dimensions)


def read_embeddings(raw: bytes, context: Context) -> EmbedGeneration:
    """A body of /api/embeddings. Raises RequestError, UnsupportedError."""
    body = typed(EmbeddingsRequest, _fields(raw, context))
    return _generation("prompt", body, [body.prompt], context)


def _fields(raw: bytes, context: Context) -> dict[str, object]:
    fields = fields_of(raw, context.limits)
    if isinstance(options := fields.get("options"), dict):
        refuse_unsupported(options, NEUTRAL_OPTIONS, INSTEAD, "options.")
    return fields


def _generation(
    field: str,
    body: EmbedRequest | EmbeddingsRequest,
    texts: list[str],
    context: Context,
    *,
    cuts: bool = False,
    dimensions: int | None = None,
) -> EmbedGeneration:
    name = read.served_name(body.model, context)
    if name not in context.names:
        message = f"model: {name[:100]!r} is an adapter, and vectors are those of the model itself, {context.name!r}."
        raise RequestError(400, "unsupported_parameter", message, param="model")
    read.check_keep_alive(body.keep_alive)
    count_within(field, len(texts), 1, context.limits.inputs)
    loaded = context.loaded()
    room = loaded.max_model_len
    prompts = tuple(
        tuple(context.text.encode(text, None if cuts else room)[: room if cuts else None]) for text in texts
    )
    params = SamplingParams(temperature=0, pooling=context.pooling or Pooling(loaded.pooling))
    check_prompts(field, prompts, params, loaded)
    return EmbedGeneration(prompts, params, body.model, loaded.fingerprint, dimensions=dimensions)


def _vectors(answers: Answers, vectors: list[bytes]) -> JsonObject:
    generation = answers.generation
    assert isinstance(generation, EmbedGeneration), "it was read here"
    return {
        "model": generation.model,
        "embeddings": [embedding(vector, generation.dimensions).tolist() for vector in vectors],
        "total_duration": int((time.monotonic() - answers.arrived) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": generation.prompt_tokens,
    }


def _vector(answers: Answers, vectors: list[bytes]) -> JsonObject:
    (vector,) = vectors
    return {"embedding": embedding(vector).tolist()}
