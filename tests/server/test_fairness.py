"""Limits of keys over the whole application: open requests, deadlines, priorities, shares; GET /limits."""

import asyncio
import json
from dataclasses import fields

import httpx
import msgspec
import pytest

from roofline.server import key_metrics
from roofline.server.admission import Queue
from roofline.server.app import create_app
from roofline.server.keys import Keys
from roofline.server.limits import Limits

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "tiny", "prompt": "Hi", "max_tokens": 3}
FILE = """
[[keys]]
name = "ann"
key = "a"
streams = 2
[[keys]]
name = "bob"
key = "b"
priority = -5
weight = 4
[[keys]]
name = "late"
key = "l"
priority = 3
"""


@pytest.fixture
def keys(tmp_path):
    (tmp_path / "keys.toml").write_text(FILE)
    return Keys(file=tmp_path / "keys.toml")


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


async def until(check, seconds=20.0):
    async with asyncio.timeout(seconds):
        while not check():
            await asyncio.sleep(0.002)


@pytest.fixture
def client_of(make_context):
    """client_of(**context) -> a client of the application in this event loop."""

    def make(**changes):
        transport = httpx.ASGITransport(create_app(make_context(**changes)), raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=30)

    return make


def test_a_key_has_so_many_requests_open(client_of, engine, keys):
    async def run():
        engine.gate.clear()
        async with client_of(keys=keys) as client:
            post = lambda key: client.post("/v1/completions", json=TEXT, headers=bearer(key))  # noqa: E731
            waiting = [asyncio.create_task(post("a")) for _ in range(2)]
            await until(lambda: len(engine.open) == 2)
            refused = await post("a")
            other = asyncio.create_task(post("b"))
            await until(lambda: len(engine.open) == 3)
            engine.gate.set()
            done = await asyncio.gather(*waiting, other)
            return refused, [each.status_code for each in done], (await post("a")).status_code

    refused, done, again = asyncio.run(run())
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_streams")
    assert int(refused.headers["retry-after"]) >= 1
    assert (done, again) == ([200] * 3, 200)


def last_events(response) -> list:
    return [line.removeprefix("data: ") for line in response.text.split("\n\n") if line and not line.startswith(":")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("limits", "headers", "status", "code"),
    [
        (Limits(first_token_seconds=0.05), {}, 503, "first_token_timeout"),
        (Limits(total_seconds=0.05), {}, 504, "deadline_exceeded"),
        (Limits(), {"x-request-timeout": "0.05"}, 504, "deadline_exceeded"),
        (Limits(total_seconds=0.05), {"x-request-timeout": "60"}, 504, "deadline_exceeded"),
    ],
)
def test_a_request_that_takes_too_long_is_ended(call, engine, make_context, stream, limits, headers, status, code):
    engine.gate.clear()
    body = {**CHAT, "stream": stream}
    context = make_context(limits=limits)
    response = call("POST", "/v1/chat/completions", json=body, headers=headers, context=context)
    if stream:
        *_, error, done = last_events(response)
        assert (response.status_code, done) == (200, "[DONE]")
        assert json.loads(error)["error"]["code"] == code
    else:
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert "0.05 seconds" in response.json()["error"]["message"]
    assert not engine.open
    assert engine.aborted


def test_a_first_token_in_time_is_enough_for_its_deadline(call, engine, make_context):
    engine.delay = 0.03  # 14 tokens: 0.42 seconds at least
    context = make_context(limits=Limits(first_token_seconds=0.3, total_seconds=0))
    engine.answer = b"x" * 30
    answer = call("POST", "/v1/chat/completions", json=CHAT, context=context)
    assert answer.status_code == 200 or answer.json()["error"]["code"] == "first_token_timeout"  # a machine that stalls
    context = make_context(limits=Limits(first_token_seconds=0, total_seconds=0))
    assert call("POST", "/v1/chat/completions", json=CHAT, context=context).status_code == 200


@pytest.mark.parametrize("text", ["0", "0.0", "-1", "1e3", "nan", "inf", "", "x", "1" * 10, "٣"])
def test_a_timeout_that_is_no_time_is_refused(call, engine, text):
    refused = call("POST", "/v1/chat/completions", json=CHAT, headers={"x-request-timeout": text.encode()})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_header")
    assert not engine.submitted


@pytest.mark.parametrize(
    ("key", "priority", "status"),
    [
        ("a", None, 200), ("a", 0, 200), ("a", 7, 200), ("a", -1, 403),
        ("b", -5, 200), ("b", -6, 403), ("l", None, 200), ("l", 3, 200), ("l", 2, 403),
        ("a", 1001, 400), ("b", -1001, 400), ("a", "0", 400), ("a", 0.5, 400),
    ],
)  # fmt: skip
def test_a_key_names_priorities_up_to_its_own(call, make_context, engine, keys, key, priority, status):
    body = {**TEXT, "priority": priority}
    answer = call("POST", "/v1/completions", json=body, headers=bearer(key), context=make_context(keys=keys))
    assert answer.status_code == status, answer.text
    if status != 200:
        error = answer.json()["error"]
        assert error["param"] == "priority"
        assert (error["code"] == "priority_not_allowed") == (status == 403)
        assert not engine.submitted


@pytest.mark.parametrize(
    ("key", "named", "priority"),
    [("a", None, 0), ("b", None, 0), ("l", None, 3), ("b", -5, -5), ("b", 1, 1), ("l", 4, 4)],
)
def test_a_request_that_names_no_priority_has_the_usual_one_unless_its_key_has_less(
    call, make_context, engine, keys, monkeypatch, key, named, priority
):
    entered, enter = [], Queue.enter

    def noting(queue, principal, tokens, priority):
        entered.append(priority)
        return enter(queue, principal, tokens, priority)

    monkeypatch.setattr(Queue, "enter", noting)
    body = TEXT if named is None else {**TEXT, "priority": named}
    answer = call("POST", "/v1/completions", json=body, headers=bearer(key), context=make_context(keys=keys))
    assert (answer.status_code, entered) == (200, [priority])
    assert engine.priorities == [priority], "the engine computes by it too"


def test_requests_are_handed_over_in_the_order_of_priorities_and_shares(client_of, engine, keys, make_context):
    """What the engine has no room for waits: of bob's by priority, and four of his to one of late's, as by weights."""

    async def run():
        engine.gate.clear()
        async with client_of(keys=keys) as client:

            def post(key, number, priority):
                body = {"model": "tiny", "prompt": [number] * 400, "max_tokens": 1, "priority": priority}
                return asyncio.create_task(client.post("/v1/completions", json=body, headers=bearer(key)))

            tasks = [post("b", 1, 0) for _ in range(8)]  # more than the engine has room for, and the least it is given
            await until(lambda: len(engine.open) == 8)
            for i in range(12):
                tasks += [post("b", 20 + i, 12 - i), post("l", 40 + i, 3)]
            await until(lambda: client._transport.app.state.queue.waiting == 32)
            assert len(engine.submitted) == 8
            told = (await client.get("/metrics", headers=bearer("b"))).text
            assert 'vllm:num_requests_waiting{model_name="tiny"} 24.0' in told.splitlines()
            engine.gate.set()
            answers = await asyncio.gather(*tasks)
            return {each.status_code for each in answers}, [ids[0] for ids, _ in engine.submitted[8:]]

    statuses, order = asyncio.run(run())
    assert statuses == {200}
    assert [number for number in order if number < 40] == list(range(31, 19, -1))
    assert [number for number in order if number >= 40] == list(range(40, 52))
    early = order[:10]
    assert 1 <= sum(number >= 40 for number in early) <= 4


def test_prompts_have_a_bound_together(call, make_context, engine):
    context = make_context(limits=Limits(prompt_tokens=10))
    within, beyond = ({**TEXT, "prompt": ["x" * 5, "x" * size]} for size in (5, 6))
    assert call("POST", "/v1/completions", json=within, context=context).status_code == 200
    engine.submitted.clear()
    refused = call("POST", "/v1/completions", json=beyond, context=context)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "prompts_too_large")
    assert "have 11 tokens together, and may have 10" in refused.json()["error"]["message"]
    assert not engine.submitted


def test_limits_are_listed_with_what_they_are_of(call, make_context, keys):
    told = call("GET", "/limits", headers=bearer("b"), context=make_context(keys=keys, limits=Limits())).json()
    assert told["limits"].keys() == {each.name for each in fields(Limits)}
    for name, entry in told["limits"].items():
        assert entry.keys() == {"limit", "unit", "about"}, f"{name} needs limit(default, unit, about)"
        assert entry["about"]
        assert entry["limit"] == getattr(Limits(), name)
    assert told["limits"]["body_bytes"] == {"limit": 8 << 20, "unit": "bytes", "about": "a request's body"}
    assert told["context_tokens"] == 1000
    assert told["key"] == {"name": "bob", "scopes": ["use"], "streams": 256, "priority": -5, "weight": 4.0}
    assert call("GET", "/limits").json()["key"]["streams"] is None
    assert call("GET", "/limits", headers=bearer("a"), context=make_context(keys=keys)).json()["key"]["streams"] == 2


def test_what_keys_use_is_told_to_administrators_alone(call, make_context, tmp_path):
    (tmp_path / "keys.toml").write_text(FILE + '[[keys]]\nname = "root"\nkey = "r"\nscopes = ["admin", "use"]\n')
    context = make_context(keys=Keys(file=tmp_path / "keys.toml"), limits=Limits(streams=2))
    for key, count in (("a", 2), ("b", 1)):
        for _ in range(count):
            assert call("POST", "/v1/completions", json=TEXT, headers=bearer(key), context=context).status_code == 200
    full = make_context(keys=context.keys, limits=Limits(queued=0), key_metrics=context.key_metrics)
    assert call("POST", "/v1/completions", json=TEXT, headers=bearer("b"), context=full).status_code == 429
    told = call("GET", "/metrics", headers=bearer("r"), context=context).text.splitlines()
    for line in (
        'roofline:key_requests_total{key="ann"} 2.0',
        'roofline:key_requests_total{key="bob"} 1.0',
        'roofline:key_prompt_tokens_total{key="ann"} 4.0',
        'roofline:key_generation_tokens_total{key="ann"} 6.0',
        'roofline:key_refused_total{key="bob"} 1.0',
    ):
        assert line in told
    assert any(line.startswith("vllm:") for line in told)
    for key in "ab":
        assert "key=" not in call("GET", "/metrics", headers=bearer(key), context=context).text


def test_the_engines_are_given_the_prompts_of_two_steps_each(make_context, engine):
    context = make_context()
    engine.description = msgspec.structs.replace(engine.description, step_tokens=300)
    for engines, tokens in (((), 600), ((engine,), 600), ((engine, engine), 1200), ((engine,) * 3, 1800)):
        engine.engines = engines
        assert context.window() == tokens
    engine.engines, engine.description = (), None
    assert context.window() == 2 * 512, "while it is not known"


def test_labels_of_keys_have_a_bound(monkeypatch):
    assert key_metrics.MAX_NAMES == 1000
    monkeypatch.setattr(key_metrics, "MAX_NAMES", 2)
    metrics = key_metrics.KeyMetrics()
    for name in ("a", "b", "c", "d", "a"):
        metrics.refused(name)
    lines = metrics.exposition().decode().splitlines()
    counts = [line for line in lines if line.startswith("roofline:key_refused_total")]
    assert [line.partition("key=")[2] for line in counts] == ['"a"} 2.0', '"b"} 1.0', '"(others)"} 2.0']
