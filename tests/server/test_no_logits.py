"""A backend that computes nothing has no logits: what would need them is refused before the engine sees it."""

import msgspec
import pytest

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "tiny", "prompt": "Say"}
REQUESTS = [
    ("/v1/chat/completions", {**CHAT, "logprobs": True}, "log-probabilities"),
    ("/v1/chat/completions", {**CHAT, "prompt_logprobs": 1}, "log-probabilities"),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, "a form of the answer"),
    ("/v1/completions", {**TEXT, "logprobs": 0}, "log-probabilities"),
    ("/v1/completions", {**TEXT, "best_of": 2}, "log-probabilities"),
    ("/v1/completions", {**TEXT, "use_beam_search": True, "best_of": 2}, "log-probabilities"),
    ("/api/chat", {**CHAT, "logprobs": True}, "log-probabilities"),
    ("/generate", {"inputs": "Say", "parameters": {"details": True, "top_n_tokens": 2}}, "log-probabilities"),
    ("/rerank", {"query": "a", "documents": ["b"]}, "scores"),
]


@pytest.mark.parametrize(("path", "body", "what"), REQUESTS)
def test_what_needs_logits_is_refused(call, engine, path, body, what):
    engine.description = msgspec.structs.replace(engine.description, gives_logits=False)
    response = call("POST", path, json=body)
    assert response.status_code == 400, response.text
    assert f"{what} of a simulated model is not supported: nothing is computed." in response.text
    assert engine.submitted == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_an_answer_needs_none(call, engine, path):
    engine.description = msgspec.structs.replace(engine.description, gives_logits=False)
    assert call("POST", path, json={**CHAT, "stream": False}).status_code == 200
