"""POST /rerank and /score: the order, the fields of Jina's, Cohere's and vLLM's forms, and what is refused."""

import math

import msgspec
import pytest

from roofline.engine.pooling import Pooling
from roofline.engine.relevance import INSTRUCTION

DOCUMENTS = ["nn", "yyyy", {"text": "y"}, "yyyy"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_in_the_order_of_their_scores(call, engine, path):
    body = {"model": "tiny", "query": "q", "documents": DOCUMENTS}
    answer = call("POST", path, json=body).json()
    results = answer["results"]
    assert [each["index"] for each in results] == [1, 3, 2, 0]  # of equal ones the first
    scores = [each["relevance_score"] for each in results]
    odds = [math.log(p / (1 - p)) for p in scores]
    assert [a - odds[-1] for a in odds] == pytest.approx([6, 6, 3, 0], abs=1e-6)
    tokens = sum(len(ids) for ids, _ in engine.submitted)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert ("document" in results[0]) == (path != "/v2/rerank")
    best = call("POST", path, json=body | {"top_n": 1, "return_documents": True}).json()["results"]
    assert best == [{"index": 1, "relevance_score": scores[0], "document": {"text": "yyyy"}}]
    assert "document" not in call("POST", path, json=body | {"return_documents": False}).json()["results"][0]


def test_the_prompt_has_query_document_and_instruction(call, engine):
    call("POST", "/rerank", json={"query": "why?", "documents": ["because"]})
    call("POST", "/rerank", json={"query": "why?", "documents": ["because"], "instruction": "Find jokes."})
    (first, params), (second, _) = engine.submitted
    assert params.pooling.ids == (ord("y"), ord("n"))
    assert bytes(first).decode().endswith(f"<Instruct>: {INSTRUCTION}\n<Query>: why?\n<Document>: because")
    assert b"<Instruct>: Find jokes.\n" in bytes(second)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_one_text_is_scored_with_each_and_several_with_their_own(call, path):
    one = call("POST", path, json={"model": "tiny", "text_1": "q", "text_2": ["y", "n"]}).json()
    assert [each["index"] for each in one["data"]] == [0, 1]
    assert one["data"][0]["score"] > one["data"][1]["score"]
    assert {each["object"] for each in one["data"]} == {"score"}
    both = call("POST", path, json={"text_1": ["q", "q"], "text_2": ["y", "n"]}).json()
    assert both["data"] == one["data"]
    assert len(call("POST", path, json={"text_1": "q", "text_2": "y"}).json()["data"]) == 1


@pytest.mark.parametrize(
    ("path", "change", "status", "param"),
    [
        ("/rerank", {"documents": []}, 400, "documents"),
        ("/rerank", {"documents": ["a"] * 1025}, 400, "documents"),
        ("/rerank", {"documents": ["a" * 1200]}, 400, "documents"),
        ("/rerank", {"documents": [{"title": "x"}]}, 400, "documents.0.text"),
        ("/rerank", {"top_n": 0}, 400, "top_n"),
        ("/rerank", {"model": "other"}, 404, "model"),
        ("/rerank", {"max_tokens_per_doc": 5}, 400, "max_tokens_per_doc"),
        ("/v2/rerank", {"rank_fields": ["title"]}, 400, "rank_fields"),
        ("/score", {"text_1": ["a", "b", "c"]}, 400, "text_2"),
        ("/score", {"text_2": []}, 400, "text_2"),
        ("/score", {"query": "a"}, 400, "query"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(call, engine, path, change, status, param):
    body = {"text_1": "a", "text_2": ["b", "c"]} if path == "/score" else {"query": "a", "documents": ["b"]}
    answer = call("POST", path, json=body | change)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert engine.submitted == []


@pytest.fixture
def encoder(engine):
    """The engine as one of an encoder model: a text's vector is [tokens, first byte, 3]."""
    engine.description = msgspec.structs.replace(engine.description, encoder=True, pooling="mean")
    return engine


def cosine(first, second):
    a, b = ([len(text), ord(text[0]), 3] for text in (first, second))
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)


def test_an_encoder_ranks_by_cosines_and_computes_each_text_once(call, encoder):
    answer = call("POST", "/rerank", json={"query": "q", "documents": ["n", "qqqq", "n", "q"]}).json()
    assert [each["index"] for each in answer["results"]] == [3, 0, 2, 1]
    expected = [cosine("q", text) for text in ("q", "n", "n", "qqqq")]
    assert [each["relevance_score"] for each in answer["results"]] == pytest.approx(expected, abs=1e-6)
    assert [(bytes(ids), params.pooling.kind) for ids, params in encoder.submitted] == [
        (b"q", "mean"),
        (b"n", "mean"),
        (b"qqqq", "mean"),
    ]
    assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6}


def test_an_encoder_scores_pairs_by_cosines(call, encoder):
    answer = call("POST", "/score", json={"text_1": ["a", "bb"], "text_2": ["bb", "ccc"]}).json()
    expected = [cosine("a", "bb"), cosine("bb", "ccc")]
    assert [each["score"] for each in answer["data"]] == pytest.approx(expected, abs=1e-6)
    assert len(encoder.submitted) == 3


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/rerank", {"query": "a", "documents": ["b"], "instruction": "Find jokes."}, "instruction"),
        ("/rerank", {"query": "a", "documents": ["b" * 1001]}, "documents"),
        ("/score", {"text_1": "a", "text_2": "b" * 1001}, "text_2"),
    ],
)
def test_what_an_encoder_cannot_compare_is_refused_by_name(call, encoder, path, body, param):
    answer = call("POST", path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert encoder.submitted == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}),
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}]}),
        ("/api/generate", {"prompt": "a"}),
    ],
)
def test_an_encoder_answers_nothing(call, encoder, path, body):
    answer = call("POST", path, json={"model": "tiny"} | body)
    assert answer.status_code == 400
    assert "an answer of an encoder model is not supported" in answer.text
    assert "/v1/embeddings" in answer.text
    assert encoder.submitted == []


def test_what_a_models_files_say_is_the_pooling_unless_an_option_does(call, encoder, make_context):
    body = {"model": "tiny", "input": "ab"}
    call("POST", "/v1/embeddings", json=body)
    call("POST", "/v1/embeddings", json=body, context=make_context(pooling=Pooling("first")))
    assert [params.pooling.kind for _, params in encoder.submitted] == ["mean", "first"]
