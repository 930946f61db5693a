"""How far a prompt is, as events of a stream of those who ask for it."""

import json

import pytest

from roofline.engine.events import Event, PromptProgress, Usage

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True}


@pytest.fixture
def steps(engine):
    """An engine that computes a prompt in two steps, and tells whoever wants to know."""

    async def events(ids, params, request_id):
        for processed, seconds in ((64, 0.25), (100, 0.4996)):
            if params.prompt_progress:
                yield Event(request_id, 0, [], progress=PromptProgress(100, 32, processed, seconds))
        yield Event(request_id, 0, [72], None, "length", None, None, Usage(100, 1, 32, 7))

    engine._events = events


def events_of(answer) -> list:
    assert answer.status_code == 200
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
@pytest.mark.usefixtures("steps")
def test_progress_is_told_before_the_first_token(call, route):
    body = CHAT if route != "completions" else {"model": "tiny", "prompt": "Hi", "stream": True}
    events = events_of(call("POST", f"/v1/{route}", json={**body, "return_progress": True}))
    told = [event.get("prompt_progress") for event in events]
    first = {"index": 0, "total": 100, "cache": 32, "processed": 64, "time_ms": 250}
    assert told[:2] == [first, first | {"processed": 100, "time_ms": 500}]
    assert [event["choices"] for event in events[:2]] == [[], []]
    assert all(each is None for each in told[2:])
    plain = events_of(call("POST", f"/v1/{route}", json=body))
    assert [event["choices"] for event in events[2:]] == [event["choices"] for event in plain]


@pytest.mark.usefixtures("steps")
def test_who_does_not_ask_is_not_told(call):
    for fields in ({}, {"return_progress": False}, {"return_progress": None}):
        assert "prompt_progress" not in call("POST", "/v1/chat/completions", json=CHAT | fields).text


def test_there_is_no_progress_without_a_stream(call):
    answer = call("POST", "/v1/chat/completions", json={**CHAT, "stream": False, "return_progress": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "return_progress")
