"""Receipts beside answers: what stands in them is what was told, streamed or not, and who asks for none has none."""

import json
from hashlib import sha256

import msgspec
import pytest

from roofline.engine.receipts.receipt import Receipt, hash_of_ids
from roofline.engine.receipts.signing import broken_seal

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
PROMPT = {"model": "tiny", "prompt": ["Hi", "Ho"]}


def digest(token: int) -> bytes:
    return sha256(bytes([token % 256])).digest()[:16]


@pytest.fixture
def exact(engine):
    """An exact engine that tells digests to who wants them."""
    engine.description = msgspec.structs.replace(engine.description, exact=True, weights_identity="ab" * 32)
    plain = engine._event

    def event(request_id, index, step, limit, params, prompt):
        told = plain(request_id, index, step, limit, params, prompt)
        return told._replace(digests=[digest(token) for token in told.ids]) if params.digests else told

    engine._event = event
    return engine


def receipt_in(answer) -> Receipt:
    """Of an object, or of the last event of a stream."""
    assert answer.status_code == 200, answer.text
    if "event-stream" not in answer.headers["content-type"]:
        return msgspec.convert(answer.json()["receipt"], Receipt)
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    assert not any('"receipt"' in line for line in lines[:-2])
    last = json.loads(lines[-2][6:])
    assert last["choices"] == []
    return msgspec.convert(last["receipt"], Receipt)


@pytest.mark.parametrize("stream", [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}])
def test_it_says_what_was_told(call, exact, stream):
    fields = {"receipt": True, "n": 2, "seed": 9, "top_k": 4, "logit_bias": {"5": 1}, "max_tokens": 8}
    receipt = receipt_in(call("POST", "/v1/completions", json=PROMPT | fields | stream))
    assert broken_seal(receipt) is None
    assert (receipt.model, receipt.fingerprint, receipt.weights) == ("tiny", "feedc0de", "ab" * 32)
    assert [(c.prompt, c.sample, c.finish_reason) for c in receipt.choices] == [
        (prompt, sample, "length") for prompt in range(2) for sample in range(2)
    ]
    for choice in receipt.choices:
        assert choice.ids == list(b"Hello, w")
        assert choice.digests == [digest(token).hex() for token in choice.ids]
    assert [(p.tokens, p.sha256, p.ids) for p in receipt.prompts] == [
        (2, hash_of_ids(text.encode()), None) for text in PROMPT["prompt"]
    ]
    sampling = receipt.sampling
    assert (sampling.seed, sampling.n, sampling.top_k, sampling.logit_bias) == (9, 2, 4, [(5, 1.0)])
    assert all(params.seed == 9 for _, params in exact.submitted)


@pytest.mark.usefixtures("exact")
def test_the_prompt_is_in_it_only_where_the_request_says_so(call):
    told = receipt_in(call("POST", "/v1/chat/completions", json={**CHAT, "receipt": "with_prompt"})).prompts
    assert [prompt.ids for prompt in told] == [list(b"<user>Hi")]
    refused = call("POST", "/v1/chat/completions", json={**CHAT, "receipt": "with_prompts"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "receipt")


def test_an_answer_that_a_stop_string_ended_has_no_more_digests_than_ids(call, exact):
    receipt = receipt_in(call("POST", "/v1/chat/completions", json={**CHAT, "stop": "o, w", "receipt": True}))
    (choice,) = receipt.choices
    assert (choice.finish_reason, choice.stop, len(choice.ids), len(choice.digests)) == ("stop", "o, w", 8, 8)
    seeds = [params.seed for _, params in exact.submitted]
    assert seeds == [receipt.sampling.seed], "a request without a seed is given one that the receipt tells"


@pytest.mark.usefixtures("exact")
def test_a_response_has_it_at_its_end(call):
    body = {"model": "tiny", "input": "Hi", "receipt": True, "max_output_tokens": 5}
    whole = call("POST", "/v1/responses", json=body).json()
    lines = call("POST", "/v1/responses", json={**body, "stream": True}).text.strip().splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert "receipt" not in events[0]["response"]
    for response in (whole, events[-1]["response"]):
        receipt = msgspec.convert(response["receipt"], Receipt)
        assert broken_seal(receipt) is None
        assert f"resp_{receipt.id}" == response["id"]
        assert receipt.choices[0].ids == list(b"Hello")


def test_who_asks_for_none_has_none(call, exact):
    for fields in ({}, {"receipt": False}, {"receipt": None}):
        assert "receipt" not in call("POST", "/v1/chat/completions", json=CHAT | fields).text
    assert not any(params.digests for _, params in exact.submitted)


def test_an_engine_that_is_not_exact_gives_none(call):
    refused = call("POST", "/v1/chat/completions", json={**CHAT, "receipt": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "receipt")
    assert "--exact" in refused.json()["error"]["message"]
