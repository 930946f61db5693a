"""POST /rerank and /score: the order, the fields of Jina's, Cohere's and vLLM's forms, and what is refused."""

import math

import pytest

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
