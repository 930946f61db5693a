"""POST /v1/embeddings"""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fastapi import APIRouter, Request, Response

from roofline.common.json_types import JsonObject
from roofline.engine.params import SamplingParams
from roofline.engine.pooling import Pooling, embedding, vector_bytes
from roofline.server.answers import Answers
from roofline.server.body import Body, count_within, fields_of, invalid, refuse_unsupported, typed
from roofline.server.context import Context
from roofline.server.generation import Generation, check_own_model, check_prompts
from roofline.server.respond import respond_with_vectors
from roofline.server.scopes import USE, needs

router = APIRouter()
# vLLM's fields that are not here, with the values that ask for nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
    "messages": (None,),
    "normalize": (None, True),
    "priority": (None, 0),
    "truncate_prompt_tokens": (None,),
    "use_activation": (None, True),
}
INSTEAD = {
    "messages": "/apply-template writes a conversation as a text, which input takes",
    "truncate_prompt_tokens": "Shorten the input, or give so many of its token ids",
}


class EmbeddingsBody(Body):
    """POST /v1/embeddings. user: names the request in our log lines, and does nothing else."""

    model: str
    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    add_special_tokens: bool | None = None


@dataclass(frozen=True)
class EmbeddingsGeneration(Generation):
    """With how its vectors are told: as base64 or as numbers, whole or cut to so many."""

    base64: bool = False
    dimensions: int | None = None


@router.post("/v1/embeddings")
@needs(USE, EmbeddingsBody)
async def embeddings(request: Request) -> Response:
    """The vectors of one or several texts, given as text or as token ids; special tokens in text are plain text."""
    return await respond_with_vectors(request, read_embeddings, _listed)


def read_embeddings(raw: bytes, context: Context) -> EmbeddingsGeneration:
    """A body of /v1/embeddings. Raises RequestError, UnsupportedError."""
    fields = fields_of(raw, context.limits)
    refuse_unsupported(fields, NEUTRAL, INSTEAD)
    body = typed(EmbeddingsBody, fields)
    check_own_model(body.model, context)
    if len(body.user or "") > context.limits.user_characters:
        raise invalid("user", f"may have at most {context.limits.user_characters} characters")
    if body.dimensions is not None and body.dimensions < 1:
        raise invalid("dimensions", f"{body.dimensions} is not at least 1")
    loaded = context.loaded()
    many = _inputs(body.input)
    count_within("input", len(many), 1, context.limits.inputs)
    special = body.add_special_tokens is not False
    prompts = tuple(
        tuple(context.text.encode(each, loaded.max_model_len, add_special=special) if isinstance(each, str) else each)
        for each in many
    )
    params = SamplingParams(temperature=0, pooling=context.pooling or Pooling(loaded.pooling))
    check_prompts("input", prompts, params, loaded)
    return EmbeddingsGeneration(
        prompts,
        params,
        context.name,
        loaded.fingerprint,
        user=body.user,
        base64=body.encoding_format == "base64",
        dimensions=body.dimensions,
    )


def _inputs(given: str | list[str] | list[int] | list[list[int]]) -> Sequence[str | Sequence[int]]:
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]  # type: ignore[list-item]  # a list of ids is one text
    return given  # type: ignore[return-value]


def _listed(answers: Answers, vectors: list[bytes]) -> JsonObject:
    """OpenAI's list: numbers, or the base64 of float32 in little-endian order."""
    generation, data = answers.generation, []
    assert isinstance(generation, EmbeddingsGeneration), "it was read here"
    for index, vector in enumerate(vectors):
        numbers = embedding(vector, generation.dimensions)
        told = b64encode(vector_bytes(numbers)).decode() if generation.base64 else numbers.tolist()
        data.append({"object": "embedding", "index": index, "embedding": told})
    tokens = generation.prompt_tokens
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": generation.model, "usage": usage}
