"""POST /rerank, /v1/rerank, /v2/rerank: documents in the order of how well they answer a query, as Jina and Cohere have
it. POST /score, /v1/score: how well the second text of each pair answers the first, as vLLM has it.

Both are made of the model's own logits, or of an encoder's vectors: see `engine/relevance.py`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from roofline.common.json_types import JsonObject
from roofline.engine.params import SamplingParams
from roofline.engine.pooling import Pooling, cosine, probability
from roofline.engine.relevance import VARIABLES, check_instruction, pair_messages, yes_or_no
from roofline.server.answers import Answers
from roofline.server.body import Body, count_within, fields_of, invalid, refuse_unsupported, renamed, typed, within
from roofline.server.context import Context
from roofline.server.generation import Generation, check_own_model, check_prompts
from roofline.server.respond import respond_with_vectors
from roofline.server.scopes import USE, needs

router = APIRouter()
# Fields that clients send and we do not have, with the values that ask for nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "max_chunks_per_doc": (None, 1),
    "max_tokens_per_doc": (None,),
    "priority": (None, 0),
    "rank_fields": (None, [], ["text"]),
    "return_embeddings": (None, False),
    "truncate_prompt_tokens": (None,),
    "truncation": (None, False),
    "use_activation": (None, True),
}
_SHORTEN = "Documents are never cut: shorten them"
INSTEAD = dict.fromkeys(("max_chunks_per_doc", "max_tokens_per_doc", "truncate_prompt_tokens", "truncation"), _SHORTEN)


class Document(Body):
    """A document as Cohere's older API and Jina's have it."""

    text: str


class Relevance(Body):
    """What both routes share. instruction: what documents are looked for; user: names the request in our log lines."""

    model: str | None = None
    instruction: str | None = None
    user: str | None = None


class RerankBody(Relevance):
    """POST /rerank. return_documents: default true, and false on Cohere's /v2/rerank."""

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None


class ScoreBody(Relevance):
    """POST /score. A single text_1 is compared with each text_2; of several, each with its own."""

    text_1: str | list[str]
    text_2: str | list[str]


@dataclass(frozen=True)
class Pairs(Generation):
    """Pairs of texts. compared: of an encoder, which two of the prompts each is of; none: a prompt is a pair."""

    compared: tuple[tuple[int, int], ...] = ()

    def scores(self, vectors: Sequence[bytes]) -> list[float]:
        """How well each document answers its query, by the vectors of all prompts."""
        if self.compared:
            return [cosine(vectors[query], vectors[document]) for query, document in self.compared]
        return [probability(vector) for vector in vectors]


@dataclass(frozen=True)
class Ranking(Pairs):
    """With what the answer tells: of the documents, none where they are not told, the `top` best."""

    documents: tuple[str, ...] = ()
    top: int = 0


@router.post("/rerank")
@router.post("/v1/rerank")
@needs(USE, RerankBody)
async def rerank(request: Request) -> Response:
    """Documents by how well they answer a query, the best first."""
    return await respond_with_vectors(request, read_ranking, _ranked)


@router.post("/v2/rerank")
@needs(USE, RerankBody)
async def rerank_v2(request: Request) -> Response:
    """Documents by how well they answer a query, the best first; by their index alone."""
    return await respond_with_vectors(request, lambda raw, server: read_ranking(raw, server, tells=False), _ranked)


@router.post("/score")
@router.post("/v1/score")
@needs(USE, ScoreBody)
async def score(request: Request) -> Response:
    """How well the second text of each pair answers the first."""
    return await respond_with_vectors(request, read_pairs, _scored)


def read_ranking(raw: bytes, context: Context, tells: bool = True) -> Ranking:
    """A body of /rerank. tells: whether the answer has the documents where the body does not say. Raises RequestError,
    UnsupportedError."""
    fields = fields_of(raw, context.limits)
    refuse_unsupported(fields, NEUTRAL, INSTEAD)
    body = typed(RerankBody, fields)
    texts = tuple(document if isinstance(document, str) else document.text for document in body.documents)
    count_within("documents", len(texts), 1, context.limits.documents)
    within("top_n", body.top_n, 1, 1 << 31)
    base = _generation(body, [(body.query, text) for text in texts], "documents", context)
    told = tells if body.return_documents is None else body.return_documents
    top = min(len(texts), body.top_n or len(texts))
    return Ranking(**vars(base), documents=texts if told else (), top=top)


def read_pairs(raw: bytes, context: Context) -> Pairs:
    """A body of /score. Raises RequestError, UnsupportedError."""
    fields = fields_of(raw, context.limits)
    refuse_unsupported(fields, NEUTRAL, INSTEAD)
    body = typed(ScoreBody, fields)
    firsts, seconds = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
    within("text_1", len(firsts), 1, context.limits.documents)
    within("text_2", len(seconds), 1, context.limits.documents)
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds):
        raise invalid("text_2", f"has {len(seconds)} texts, but text_1 has {len(firsts)}; give as many, or one text_1")
    return _generation(body, list(zip(firsts, seconds, strict=True)), "text_2", context)


def _generation(body: Relevance, pairs: Sequence[tuple[str, str]], field: str, context: Context) -> Pairs:
    """What is computed of pairs of a query and a document. field: what the API calls the document."""
    if body.model is not None:
        check_own_model(body.model, context)
    if len(body.user or "") > context.limits.user_characters:
        raise invalid("user", f"may have at most {context.limits.user_characters} characters")
    loaded, text = context.loaded(), context.text
    if loaded.encoder:
        return _compared(body, pairs, field, context)
    params = SamplingParams(temperature=0, pooling=yes_or_no(text.tokenizer))
    with renamed({"messages": field}):
        prompts = tuple(
            tuple(text.encode_chat(pair_messages(*pair, body.instruction), loaded.max_model_len, variables=VARIABLES))
            for pair in pairs
        )
    check_prompts(field, prompts, params, loaded)
    return Pairs(prompts, params, context.name, loaded.fingerprint, user=body.user)


def _compared(body: Relevance, pairs: Sequence[tuple[str, str]], field: str, context: Context) -> Pairs:
    """The same of an encoder: each text is a prompt, once."""
    check_instruction(body.instruction)
    loaded, text = context.loaded(), context.text
    number = {each: index for index, each in enumerate(dict.fromkeys(each for pair in pairs for each in pair))}
    params = SamplingParams(temperature=0, pooling=context.pooling or Pooling(loaded.pooling))
    with renamed({"prompt": field}):
        prompts = tuple(tuple(text.encode(each, loaded.max_model_len)) for each in number)
    check_prompts(field, prompts, params, loaded)
    compared = tuple((number[query], number[document]) for query, document in pairs)
    return Pairs(prompts, params, context.name, loaded.fingerprint, user=body.user, compared=compared)


def _ranked(answers: Answers, vectors: list[bytes]) -> JsonObject:
    ranking = answers.generation
    assert isinstance(ranking, Ranking), "it was read here"
    scores = ranking.scores(vectors)
    best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: ranking.top]
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": ranking.documents[index]}} if ranking.documents else {})
        for index in best
    ]
    return {"id": f"rerank-{answers.id}", "model": ranking.model, "results": results, "usage": _usage(ranking)}


def _scored(answers: Answers, vectors: list[bytes]) -> JsonObject:
    generation = answers.generation
    assert isinstance(generation, Pairs), "it was read here"
    scores = generation.scores(vectors)
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    head = {"id": f"score-{answers.id}", "object": "list", "created": int(time.time()), "model": generation.model}
    return {**head, "data": data, "usage": _usage(generation)}


def _usage(generation: Generation) -> JsonObject:
    return {"prompt_tokens": generation.prompt_tokens, "total_tokens": generation.prompt_tokens}
